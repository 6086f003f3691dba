"""A GPU that is not there: Triton compiles for it to machine code, and nothing runs.

Inside ``OfflineGpu`` a launch of a kernel compiles it, with Triton's compiler and the assembler that comes with it, and
notes what the assembler says: registers of a thread, shared memory of a program, bytes spilled to memory. Operands may
be on ``meta``. Triton must have been imported without ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
        code: the same for launches that share their machine code.
        spilled: bytes that a thread stores to memory for want of registers.
        error: why it does not compile, or cannot be launched; empty if all is well.
    """

    kernel: str
    code: str
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

    Attributes:
        launches: since ``take`` was last called.
    """

    def __init__(self, name: str) -> None:
        self.device = DEVICES[name]
        self.launches: list[Compiled] = []
        self._known: dict[int, Compiled] = {}

    def take(self) -> list[Compiled]:
        """The launches noted so far, which are then forgotten."""
        taken, self.launches = self.launches, []
        return taken

    @contextlib.contextmanager
    def __call__(self) -> Iterator[OfflineGpu]:
        compile_launch = JITFunction.run
        launched: list[SpillFreeKernel] = []

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool = True, **options: Any) -> Compiled:
            launch = self._compiled(kernel, lambda: compile_launch(kernel, *args, grid=grid, warmup=True, **options))
            self.launches.append(launch)
            launched.append(kernel)
            return launch

        def processors(device: torch.device, *, elsewhere: int) -> int:
            return self.device.processors

        before = triton.runtime.driver._active
        triton.runtime.driver.set_active(_Driver(self.device))
        try:
            with (
                mock.patch.object(JITFunction, "run", run),
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

    def _compiled(self, kernel: Any, compile_launch: Callable[[], Any]) -> Compiled:
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        log = io.StringIO()
        try:
            with contextlib.redirect_stdout(log):
                binary = compile_launch()
        except Exception as error:
            return Compiled(name, "", error=f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:300])
        if id(binary) not in self._known:
            self._known[id(binary)] = self._read(name, binary, log.getvalue())
        return self._known[id(binary)]

    def _read(self, name: str, binary: Any, log: str) -> Compiled:
        shared = int(binary.metadata.shared)
        room = self.device.shared_bytes
        return Compiled(
            name,
            binary.hash,
            num_warps=int(binary.metadata.num_warps),
            registers=_number(r"Used (\d+) registers", log),
            shared=shared,
            spilled=_number(r"(\d+) bytes spill stores", log),
            error="" if shared <= room else f"{shared} bytes of shared memory, above the device's {room}",
        )


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
