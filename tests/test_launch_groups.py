"""Groups of mesh axes: how many a rank makes, and what it asks of the store, does not grow with the job."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

from passes.ir.types import MeshShape
from runtime.execution.rank_mapping import RankPlaces
from runtime.launch.groups import axes_in_rank_order, mesh_of_axes
from tests.ranks import run_on_ranks

#: Of a step without experts, outermost first.
AXES = ("pp", "dp", "cp", "tp")


class CountingStore(dist.Store):
    """Answers as if all other ranks had come, and counts what is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def add(self, key: str, number: int) -> int:
        self.operations["add"] += 1
        return -1

    def set(self, key: str, value: Any) -> None:
        self.operations["set"] += 1

    def wait(self, keys: Any, timeout: Any = None) -> None:
        self.operations["wait"] += 1


@contextmanager
def fake_job(
    num_ranks: int, *, rank: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[CountingStore, list[Any]]]:
    """One rank of a job: its store, and the ranks of every group that it was asked to make."""
    store, asked = CountingStore(), list[Any]()
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    dist.init_process_group("fake", store=store, rank=rank, world_size=num_ranks)
    helper = dist.distributed_c10d._new_group_with_tag

    def counted(ranks: Any, *args: Any, **options: Any) -> Any:
        asked.append(tuple(ranks))
        return helper(ranks, *args, **options)

    monkeypatch.setattr(dist.distributed_c10d, "_new_group_with_tag", counted)
    store.operations.clear()
    try:
        yield store, asked
    finally:
        dist.destroy_process_group()
        monkeypatch.undo()


SHAPES = {"dp × tp": (1, -1, 1, 8), "pp × dp × cp × tp": (4, -1, 2, 8), "dp": (1, -1, 1, 1)}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_rank_asks_for_does_not_grow_with_the_job(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of which it is a member alone: one an axis of several ranks, one for all others, one of all data ranks."""
    counts = []
    for num_ranks in (512, 4096):
        pp, _, cp, tp = SHAPES[shape]
        sizes = (pp, num_ranks // (pp * cp * tp), cp, tp)
        with fake_job(num_ranks, rank=77, monkeypatch=monkeypatch) as (store, asked):
            ranks = torch.arange(num_ranks).reshape(sizes)
            places = RankPlaces(mesh_of_axes("cpu", ranks, AXES), MeshShape(AXES[1:], sizes[1:]))
            places.group_over(("dp", "cp"))
            assert all(77 in group for group in asked) and len(set(asked)) == len(asked)
            assert [places.device_mesh.get_group(axis).size() for axis in AXES] == list(sizes)
            counts.append((len(asked), dict(store.operations)))
    several = sum(size > 1 for size in sizes)
    # An axis of all ranks is the job's own group.
    assert counts[0] == counts[1]
    assert counts[0][0] == several + (several < 4) + (sizes[1] > 1 and sizes[2] > 1) - (several == 1)


@functools.cache
def results() -> dict[str, bool]:
    return run_on_ranks("launch_groups_worker", 4, None)


@pytest.mark.parametrize("what", ["sums", "time-outs", "another order", "stages", "second mesh"])
def test_on_four_processes(what: str) -> None:
    """Some of which are in more groups than others before."""
    assert results()[what]


@pytest.mark.parametrize(
    ("ranks", "order"),
    [
        (torch.arange(8).reshape(2, 2, 2), ("a", "b", "c")),
        (torch.arange(8).reshape(2, 2, 2).permute(2, 0, 1), ("b", "c", "a")),
        (torch.arange(4).reshape(1, 4), ("b", "a")),
        (torch.arange(0, 8, 2), ("a",)),
    ],
)
def test_axes_are_ordered_by_how_far_apart_their_ranks_are(ranks: torch.Tensor, order: tuple[str, ...]) -> None:
    assert axes_in_rank_order(SimpleNamespace(mesh=ranks, mesh_dim_names=("a", "b", "c")[: ranks.dim()])) == order


@pytest.mark.parametrize("ranks", [[1, 0], [[0, 2], [3, 1]], [[0, 3], [1, 2]]])
def test_meshes_whose_ranks_do_not_ascend_are_refused(ranks: list[Any]) -> None:
    mesh = SimpleNamespace(mesh=torch.tensor(ranks), mesh_dim_names=("a", "b")[: torch.tensor(ranks).dim()])
    with pytest.raises(ValueError, match="must ascend along its axes"):
        axes_in_rank_order(mesh)
