"""Launching machine code that Triton has compiled by the C function that its own launch ends in (triton 3.6).

Triton's ``compiled[grid](...)`` asks for the device and the stream, writes down what launch hooks could want to know,
and calls two chains of hooks that are nearly always empty: 20 µs of the host for a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton import knobs
from triton.compiler import CompiledKernel

__all__ = ["machine_launch"]

_FIELDS = (
    "launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl",
)  # fmt: skip
_hooks: Any = knobs.runtime


def machine_launch(compiled: CompiledKernel, grid: tuple[int, ...], device: torch.device) -> Callable[..., None]:
    """What ``compiled[grid]`` does with values for all parameters, on ``device``, which is the current one.

    Triton's own launch wherever there is more to do: hooks, memory that a launch is to be given, other launchers.
    """
    by_triton: Callable[..., None] = compiled[grid]
    launcher = compiled.run
    stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if device.type != "cuda" or stream_of is None or not all(hasattr(launcher, name) for name in _FIELDS):
        return by_triton
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return by_triton
    launch, function, metadata, index = launcher.launch, compiled.function, compiled.packed_metadata, device.index
    options = launcher.launch_cooperative_grid, launcher.launch_pdl
    nothing = (None,) * 2  # of scratch memory

    def run(*values: Any) -> None:
        if _has_calls(_hooks.launch_enter_hook) or _has_calls(_hooks.launch_exit_hook):
            by_triton(*values)
        else:
            launch(*grid, stream_of(index), function, *options, *nothing, metadata, None, None, None, *values)

    return run


def _has_calls(hook: Any) -> bool:
    """Whether anybody has hooked in; what is no chain of hooks is one itself."""
    return hook is not None and bool(getattr(hook, "calls", True))
