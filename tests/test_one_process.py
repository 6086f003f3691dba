"""A model that asks ``torch.distributed`` in its forward is planned as on one device, whatever group there is."""

from __future__ import annotations

import sys
import sysconfig
import threading
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import get_world_size, is_initialized

import planner
from passes.capture.one_process import as_one_process
from passes.ir.types import MeshShape
from runtime.mesh.layout import virtual_ranks
from tests.small_models import seeded

IMAGES = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)


class PerProcess(nn.Module):
    """As losses of detectors do, it averages a count over the processes."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.project = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x).relu()
        count = x.new_tensor([x.shape[0]])
        if is_initialized():
            dist.all_reduce(count)
            count = count / get_world_size()
        return (self.project(x).square().sum() / count).squeeze()


class Gathering(nn.Module):
    """A contrastive loss over the features of all processes, whose own are put where they have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.left, self.right = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x).relu()
        left, right = self.left(x), self.right(x)
        if dist.is_available() and dist.is_initialized():
            everyone = [torch.zeros_like(right) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, right)
            everyone[dist.get_rank()] = right
            right = torch.cat(everyone)
        return nn.functional.cross_entropy(left @ right.T, torch.arange(len(x)))


class Unguarded(nn.Module):
    """It expects a group, and every collective that has a meaning for one process."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.project(x)
        everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, features.detach(), async_op=True).wait()
        whole, part = torch.empty_like(x), torch.empty_like(x)
        dist.all_gather_into_tensor(whole, features.detach())
        dist.reduce_scatter(part, [features.detach()])
        dist.barrier()
        target = (everyone[dist.get_rank()] + whole + part) / 3
        return (features * target).mean() * dist.get_world_size()


@pytest.mark.parametrize("build", [PerProcess, Gathering])
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "cp=2"])
def test_a_model_that_counts_processes_trains_as_on_one_device(build: Any, mesh: str) -> None:
    report = planner.verify(seeded(build), mesh, batch=(IMAGES,), steps=2)
    assert report.ok, report.table()


def test_collectives_of_one_process_copy_or_do_nothing() -> None:
    model = seeded(Unguarded)
    with as_one_process():
        loss = model(IMAGES)
    features = model.project(IMAGES)
    assert torch.equal(loss, (features * features.detach()).mean())


def test_other_threads_and_later_calls_see_the_ranks() -> None:
    seen: list[int] = []
    with virtual_ranks(MeshShape(("dp",), (4,))):
        with as_one_process():
            assert dist.get_world_size() == get_world_size() == 1 and not is_initialized()
            thread = threading.Thread(target=lambda: seen.append(dist.get_world_size()))
            thread.start()
            thread.join()
        assert seen == [4] and dist.get_world_size() == get_world_size() == 4 and dist.is_initialized()


def test_a_library_that_imports_a_collective_later_is_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = types.ModuleType("imports_later")
    library.__file__ = f"{sysconfig.get_path('purelib')}/imports_later.py"
    monkeypatch.setitem(sys.modules, library.__name__, library)
    with as_one_process():
        assert not hasattr(library, "get_world_size")
    library.get_world_size = original = get_world_size
    with as_one_process():
        assert library.get_world_size is not original and library.get_world_size() == 1
    assert library.get_world_size is original


def test_accelerate_says_one_process_meanwhile() -> None:
    accelerate = pytest.importorskip("accelerate")
    state = accelerate.Accelerator(cpu=True).state
    everyone = accelerate.PartialState()
    before = everyone.num_processes
    everyone.num_processes = 4
    try:
        with as_one_process():
            assert accelerate.PartialState().num_processes == state.num_processes == 1
        assert accelerate.PartialState().num_processes == 4
    finally:
        everyone.num_processes = before
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
