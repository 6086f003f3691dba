"""Kernels whose machine code spills registers to memory on a device: they are compiled there again, with more room.

NVIDIA's assembler spills a few values where that lets one more program be resident. Each spill is a round trip to
memory that these kernels, which wait for memory, do not have to spare; a limit of registers (``maxnreg``) above what
the assembler would aim for turns the trade down. Results do not change: they are computed by the same instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from triton import JITFunction

#: Registers of a multiprocessor, and the most that one thread can name.
_REGISTERS_OF_PROCESSOR, _REGISTERS_OF_THREAD = 65536, 255
_THREADS_OF_WARP = 32
_DEFAULT_WARPS = 4
_OPTION = "maxnreg"


class _Remedy(NamedTuple):
    """Options to launch one kind of call with, and the words that a thread spilled without them."""

    options: Mapping[str, int]
    spilled: int
    has_run: bool = False


class SpillFreeKernel(JITFunction):  # type: ignore[misc]
    """A Triton kernel that is launched with room for more registers wherever its first launch of that kind spilled.

    A kind is a device, the operands' dtypes and the launch options. A kind that spills nothing costs nothing.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._remedies: dict[Any, _Remedy] = {}

    def run(self, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """Launch; gives what Triton compiled."""
        kind = _kind_of(arguments, options) if self._remedies else None
        remedy = self._remedies.get(kind)
        extra = remedy.options if remedy is not None and (remedy.has_run or _may_compile()) else {}
        compiled = super().run(*arguments, grid=grid, warmup=warmup, **options, **extra)
        if remedy is None:
            if _spilled(compiled) and _takes_limit(options):
                room = {_OPTION: _room_of(options)}
                self._remedies[_kind_of(arguments, options)] = _Remedy(room, _spilled(compiled))
        elif extra and not remedy.has_run:
            helps = _spilled(compiled) < remedy.spilled
            self._remedies[kind] = remedy._replace(options=extra if helps else {}, has_run=True)
        return compiled

    def remedy_of(self, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> _Remedy | None:
        """What is done about spills of launches with such arguments; None while they are launched as they are."""
        return self._remedies.get(_kind_of(arguments, options)) if self._remedies else None

    def forget(self) -> None:
        """Launch everything without more room again, as on a device that is seen for the first time."""
        self._remedies.clear()


def _kind_of(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    operands = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    return operands[0].device, *(operand.dtype for operand in operands), *options.items()


def _spilled(compiled: Any) -> int:
    """Words that a thread spills; known once the code is on a device."""
    return getattr(compiled, "n_spills", None) or 0


def _takes_limit(options: Mapping[str, Any]) -> bool:
    """Whether the device's compiler knows the option (AMD's does not), and nobody has set it."""
    return torch.version.hip is None and _OPTION not in options


def _room_of(options: Mapping[str, Any]) -> int:
    """Registers of a thread if its program has a multiprocessor to itself."""
    threads = _THREADS_OF_WARP * options.get("num_warps", _DEFAULT_WARPS)
    return min(_REGISTERS_OF_PROCESSOR // threads, _REGISTERS_OF_THREAD)


def _may_compile() -> bool:
    """Whether new code may be loaded: not while a CUDA graph is recorded."""
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
