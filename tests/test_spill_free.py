"""A kernel that spills registers on a device is launched there with room for more, if that helps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import JITFunction

from runtime.kernels.rows import _sum_kernel
from runtime.kernels.spill_free import SpillFreeKernel

BFLOAT16, FLOAT32 = (torch.empty(4, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))


class Assembler:
    """Notes the registers that launches ask for, and spills words as told."""

    def __init__(self, spills: dict[int | None, int]) -> None:
        self.spills = spills
        self.limits: list[int | None] = []

    def run(self, kernel: Any, *operands: torch.Tensor, grid: Any, warmup: bool, **options: Any) -> Any:
        self.limits.append(options.get("maxnreg"))
        is_wide = operands[0].dtype == torch.float32
        return SimpleNamespace(n_spills=self.spills[options.get("maxnreg")] if is_wide else 0)


def limits_of(
    spills: dict[int | None, int], launches: list[tuple[torch.Tensor, int]], monkeypatch: pytest.MonkeyPatch
) -> list[int | None]:
    """Limits of registers that launches of one kernel, with an operand and so many warps each, ask for."""
    kernel, assembler = SpillFreeKernel(_sum_kernel.fn), Assembler(spills)
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **options: assembler.run(self, *args, **options))
    for operand, warps in launches:
        kernel[(1,)](operand, num_warps=warps)
    return assembler.limits


def test_launches_that_spill_are_given_more_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    spills = {None: 2, 128: 0, 255: 0}
    launches = [(FLOAT32, 16), (BFLOAT16, 16), (FLOAT32, 16), (FLOAT32, 16), (FLOAT32, 8), (FLOAT32, 8), (BFLOAT16, 16)]
    assert limits_of(spills, launches, monkeypatch) == [None, None, 128, 128, None, 255, None]


def test_more_registers_that_do_not_help_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_of({None: 2, 128: 2}, [(FLOAT32, 16)] * 4, monkeypatch) == [None, 128, None, None]


def test_nothing_is_compiled_while_a_cuda_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert limits_of({None: 2, 128: 0}, [(FLOAT32, 16)] * 3, monkeypatch) == [None, None, None]


def test_a_device_without_spills_is_launched_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_of({None: 0}, [(FLOAT32, 16)] * 3, monkeypatch) == [None, None, None]
