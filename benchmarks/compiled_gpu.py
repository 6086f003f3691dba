"""A GPU that is not there: Triton compiles for it to machine code, and nothing runs.

Inside ``OfflineGpu`` a launch of a kernel compiles it, with Triton's compiler and the assembler that comes with it, and
notes what the assembler says: registers of a thread, shared memory of a program, bytes spilled to memory. What was
compiled before, by this process or by one that kept its ``forms``, is looked up. Operands may be on ``meta``. Triton
must have been imported without ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import re
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from runtime.kernels import chain_launch
from runtime.kernels.spill_free import SpillFreeKernel


class Device(NamedTuple):
    """What kernels and their launches ask about a GPU."""

    capability: int
    processors: int
    #: Bytes of shared memory that one program may use.
    shared_bytes: int


#: CUDA programming guide, "Technical Specifications per Compute Capability"; multiprocessors of A100, H100 SXM, B200.
DEVICES = {
    "sm_80": Device(80, 108, 163 * 1024),
    "sm_90": Device(90, 132, 227 * 1024),
    "sm_100": Device(100, 148, 227 * 1024),
}


@dataclass(frozen=True)
class Compiled:
    """One launch of a kernel, as machine code.

    Attributes:
        code: the same for launches that share their machine code; empty if there is none.
        spilled: bytes that a thread stores to memory for want of registers.
        error: why it does not compile, or cannot be launched; empty if all is well.
    """

    kernel: str
    code: str
    device: str
    num_warps: int = 0
    registers: int = 0
    shared: int = 0
    spilled: int = 0
    error: str = ""

    @property
    def is_sound(self) -> bool:
        """Whether it compiles, fits and spills nothing."""
        return not self.error and not self.spilled

    @property
    def n_spills(self) -> int:
        """Words that a thread spills, as Triton calls them."""
        return -(-self.spilled // 4)


class _Driver(DriverBase):
    """Answers what Triton asks a GPU's driver before a launch."""

    def __init__(self, device: Device) -> None:
        self.device = device

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.device.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing runs on a GPU that is not there")

    def get_current_device(self) -> int:
        """Kernels keep their machine code by the device's number."""
        return self.device.capability

    def get_current_stream(self, device: int) -> int:
        return 0


class OfflineGpu:
    """Compiles what is launched inside.

    Args:
        name: one of ``DEVICES``.
        forms: what was compiled before, for any device, by ``Compiled.code``; new forms are added.

    Attributes:
        launches: since ``take`` was last called.
    """

    def __init__(self, name: str, forms: MutableMapping[str, Compiled] | None = None) -> None:
        self.name, self.device = name, DEVICES[name]
        self.launches: list[Compiled] = []
        self._forms = {} if forms is None else forms

    def take(self) -> list[Compiled]:
        """The launches noted so far, which are then forgotten."""
        taken, self.launches = self.launches, []
        return taken

    @contextlib.contextmanager
    def __call__(self) -> Iterator[OfflineGpu]:
        compile_launch, compile_form = JITFunction.run, JITFunction._do_compile
        launched: list[SpillFreeKernel] = []

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool = True, **options: Any) -> Compiled:
            try:
                launch = compile_launch(kernel, *args, grid=grid, warmup=True, **options)
            except Exception as error:
                message = f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:300]
                launch = Compiled(_name_of(kernel), "", self.name, error=message)
            self.launches.append(launch)
            launched.append(kernel)
            return launch

        def form(kernel: Any, kind: str, *how: Any) -> Compiled:
            found = self._form_of(kernel, kind, lambda: compile_form(kernel, kind, *how))
            kernel.device_caches[self.device.capability][0][kind] = found
            return found

        def processors(device: torch.device, *, elsewhere: int) -> int:
            return self.device.processors

        before = triton.runtime.driver._active
        triton.runtime.driver.set_active(_Driver(self.device))
        try:
            with (
                mock.patch.object(JITFunction, "run", run),
                mock.patch.object(JITFunction, "_do_compile", form),
                mock.patch.object(triton.knobs.nvidia, "dump_ptxas_log", True),
                mock.patch.object(triton.knobs.compilation, "always_compile", True),
                mock.patch.object(importlib.import_module("runtime.kernels.rows"), "processors_of", processors),
                mock.patch.object(chain_launch, "processors_of", processors),
                mock.patch.object(chain_launch.Launch, "_tuned", _every_tile),
            ):
                yield self
        finally:
            triton.runtime.driver._active = before
            for kernel in launched:  # what spills on one device may not on the next
                kernel.forget()

    def _form_of(self, kernel: Any, kind: str, compile_form: Callable[[], Any]) -> Compiled:
        """A kernel for one kind of arguments and options, as Triton's own key of them says."""
        text = f"{self.device.capability} {_code_of(kernel)} {kind}"
        code = hashlib.sha256(text.encode()).hexdigest()[:12]
        if code not in self._forms:
            log = io.StringIO()
            with contextlib.redirect_stdout(log):
                binary = compile_form()
            self._forms[code] = self._read(_name_of(kernel), code, binary, log.getvalue())
        return replace(self._forms[code], kernel=_name_of(kernel))

    def _read(self, name: str, code: str, binary: Any, log: str) -> Compiled:
        shared = int(binary.metadata.shared)
        room = self.device.shared_bytes
        return Compiled(
            name,
            code,
            self.name,
            num_warps=int(binary.metadata.num_warps),
            registers=_number(r"Used (\d+) registers", log),
            shared=shared,
            spilled=_number(r"(\d+) bytes spill stores", log),
            error="" if shared <= room else f"{shared} bytes of shared memory, above the device's {room}",
        )


def _name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def _code_of(kernel: Any) -> str:
    """Triton's digest of a kernel's source and of all that it calls, wherever in an emitted program the source is."""
    if kernel.hash is None:
        kernel.starting_line_number = 0
    return str(kernel.cache_key)


def _every_tile(launch: Any, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor | None]) -> Any:
    """In the place of measuring: compile every tile that would be measured."""
    for tile in launch._tiles:
        launch._run(launch._prepared(tile), operands, results)
    return launch._tiles[0]


def _number(pattern: str, log: str) -> int:
    numbers = [int(number) for number in re.findall(pattern, log)]
    if not numbers:
        raise RuntimeError(f"the assembler's report has no {pattern!r}: {log[:500]!r}")
    return max(numbers)
