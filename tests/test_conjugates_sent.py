"""Complex numbers that are only marked as conjugates are written out before they are sent: torch sends pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.program_tools import adapters
from runtime.torch_compat import spmd_internals


def test_of_real_numbers_an_inverse_transform_gives_marked_ones_which_are_written_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marked = torch.fft.ifft(torch.randn(4))
    assert marked.is_conj()
    sent: list[torch.Tensor] = []

    def note(x: torch.Tensor, *_: Any) -> torch.Tensor:
        sent.append(x)
        return x

    monkeypatch.setattr(adapters, "exchanges_lists", lambda *_: True)
    monkeypatch.setattr(dist, "all_to_all", lambda outputs, inputs, group: note(*inputs))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    for name in ("all_gather_along", "reduce_scatter_along"):
        monkeypatch.setattr(spmd_internals, name, note)
    group: Any = object()
    adapters._Distributed.all_to_all([torch.empty_like(marked)], [marked], group)
    functional = spmd_internals._OverSeveralRanks(None)
    functional.all_gather_tensor(marked, 0, group)
    functional.reduce_scatter_tensor(marked, "sum", 0, group)
    assert [x.is_conj() for x in sent] == [False] * 3
    assert all(torch.equal(x, marked) for x in sent)
