"""Gathers over gloo have names that torch keeps without a lock, so short that no memory is freed for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.program_tools.adapters import apply_adapters
from runtime.torch_compat.process_groups import all_gather_along, functional_collectives


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    apply_adapters()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def kinds_of_gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with what gloo calls the gathers that it is asked for through our kernel."""
    kinds, original = list[int](), dist.ProcessGroup._allgather_base

    def noted(self: dist.ProcessGroup, *args: Any) -> Any:
        work: Any = original(self, *args)
        kinds.append(int(work._get_op_type()))
        return work

    monkeypatch.setattr(dist.ProcessGroup, "_allgather_base", noted)
    return kinds


def kind_of_plain_gather() -> int:
    """``ALLGATHER``: nine letters, where a string of the C++ library keeps fifteen within itself."""
    work: Any = dist.all_gather([torch.empty(1)], torch.ones(1), async_op=True)
    work.wait()
    return int(work._get_op_type())


@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_gather_of_one_tensor_has_a_short_name(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    kinds = kinds_of_gathers(monkeypatch)
    x = torch.arange(24).reshape(-1)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    whole = functional_collectives.wait_tensor(
        torch.ops._c10d_functional.all_gather_into_tensor(x, 1, group.group_name)
    )
    assert torch.equal(whole.reshape(shape), x)
    assert kinds == [kind_of_plain_gather()]


def test_gathers_of_none_and_of_several_are_as_before(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = kinds_of_gathers(monkeypatch)
    x = torch.arange(6.0).reshape(2, 3)
    several = torch.ops._c10d_functional.all_gather_into_tensor_coalesced([x, x + 1], 1, group.group_name)
    assert [functional_collectives.wait_tensor(whole).tolist() for whole in several] == [x.tolist(), (x + 1).tolist()]
    assert not kinds


def test_a_gather_between_transposed_tensors_is_as_before(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = kinds_of_gathers(monkeypatch)
    source, target = torch.arange(6.0).reshape(2, 3).t(), torch.zeros(2, 3).t()
    torch.ops.c10d.allgather_into_tensor_coalesced_([target], [source], group.boxed())
    dist.barrier()
    assert torch.equal(target, source) and not kinds


def test_gathers_along_any_dim_give_the_whole(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = kinds_of_gathers(monkeypatch)
    x = torch.arange(6.0).reshape(2, 3)
    assert (all_gather_along(x, 1, group) + 0).tolist() == x.tolist()
    assert kinds == [kind_of_plain_gather()]
