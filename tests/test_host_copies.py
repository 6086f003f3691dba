"""Inputs and checkpoints cross between host and device at once, without waiting; a fake device counts and delays it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
from runtime.checkpoint import folder_storage as storage
from runtime.checkpoint.rectangles_of_tensors import Piece
from runtime.checkpoint.staging import HostStaging, device_of
from runtime.data.host_copies import HostCopies
from tests.small_models import TiedClassifier, token_batch


class SlowDevice:
    """Copies when it is waited for, or when its next work begins: until then the host may spoil what it reads."""

    def __init__(self) -> None:
        self.started: list[list[torch.Tensor]] = []
        self.own_pinned: list[torch.Tensor] = []
        self.users_pinned: list[torch.Tensor] = []
        self._todo: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.own_pinned.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self.own_pinned[-1]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        memory = [one.untyped_storage().data_ptr() for one in self.users_pinned]
        return tensor.untyped_storage().data_ptr() in memory

    def start(self, host: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        copies = [torch.empty_like(tensor) for tensor in host]
        self.started.append(list(host))
        self._todo += zip(copies, host)
        return copies, self.run

    def run(self) -> None:
        while self._todo:
            target, source = self._todo.pop()
            target.copy_(source)


class PromptDevice(SlowDevice):
    """Copies at once."""

    def start(self, host: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        copies, wait = super().start(host)
        self.run()
        return copies, wait


def never(part: torch.Tensor) -> torch.Tensor:
    raise AssertionError(f"{part} was brought by itself")


def test_all_inputs_cross_in_one_copy_of_pinned_memory() -> None:
    """Of any dtypes, strides and sizes; what the caller overwrites afterwards was read before."""
    whole = torch.arange(48.0, dtype=torch.float64).reshape(6, 8)
    parts = [whole[2:4], whole[:, 3], torch.tensor([True, False, True]), torch.tensor(7), torch.empty(0, 3), whole[2:4]]
    expected = [part.clone() for part in parts]
    device = SlowDevice()
    brought = HostCopies(device).bring(parts, otherwise=never)
    whole.fill_(0.0)
    device.run()
    assert [len(host) for host in device.started] == [1] and device.started[0][0] is device.own_pinned[0]
    assert all(torch.equal(whole_copy, part) for whole_copy, part in zip(brought, expected, strict=True))
    assert all(tensor.is_contiguous() for tensor in brought) and brought[0] is brought[5]
    version = brought[0]._version
    brought[1].add_(1.0)
    assert brought[0]._version == version, "to autograd they are no views of one tensor"


def test_pinned_memory_of_the_caller_is_copied_from_where_it_is() -> None:
    """And not before that may it be overwritten: ``settle`` waits."""
    batch, device = torch.arange(12.0).reshape(6, 2), SlowDevice()
    device.users_pinned = [batch]
    copies = HostCopies(device)
    (brought,) = copies.bring([batch[2:4]], otherwise=never)
    assert device.started[0][1].data_ptr() == batch[2:4].data_ptr() and device.own_pinned[0].numel() == 0
    copies.settle()
    batch.fill_(0.0)
    assert brought.tolist() == [[4.0, 5.0], [6.0, 7.0]]


def test_inputs_with_history_are_brought_by_themselves() -> None:
    x = torch.ones(2, requires_grad=True)
    (brought,) = HostCopies(SlowDevice()).bring([x], otherwise=lambda part: part * 2.0)
    assert brought.grad_fn is not None


PLANS: dict[str, dict[str, Any]] = {
    "mesh": {"mesh": "dp=1"},
    "step of 4 micro-batches": {"mesh": "pp=1,dp=1", "fix": {"num_microbatches": 4}},
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_training_step_brings_its_batch_once(plan: str) -> None:
    batch = token_batch()
    model = TiedClassifier().double()  # fp64: losses agree to 1e-9
    parallel = planner.compile(model, example_inputs=batch, **PLANS[plan])
    device = PromptDevice()
    parallel.layout.copies = HostCopies(device)
    for _ in range(2):
        torch.testing.assert_close(parallel.train_step(**batch), model(**batch)["loss"].detach(), rtol=1e-9, atol=0.0)
    assert [len(host) for host in device.started] == [1, 1]
    device.users_pinned = list(batch.values())
    torch.testing.assert_close(parallel.train_step(**batch), model(**batch)["loss"].detach(), rtol=1e-9, atol=0.0)
    assert device.own_pinned[-1].numel() == 0


class SlowHost:
    """What copies pieces from a device (here the meta device) to the host: nothing is there before ``synchronize``."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._todo: list[torch.Tensor] = []

    def pinned_like(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.events += [f"pin {name}" for name in tensors]
        return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}

    def copy(self, sources: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> None:
        self.events.append(f"copy {' '.join(sources)}")
        self._todo += targets.values()

    def synchronize(self, device: torch.device) -> None:
        self.events.append(f"wait for {device}")
        for target in self._todo:
            target.fill_(1.0)


def piece(*shape: int, device: str) -> Piece:
    return Piece(torch.full(shape, 3.0, device=device), shape, (0,) * len(shape))


def test_a_checkpoint_is_staged_in_pinned_memory_that_is_kept() -> None:
    """All copies start before any is waited for, once; only what has another shape gets another buffer."""
    host = SlowHost()
    staging = HostStaging(pinned_like=host.pinned_like, copy=host.copy, synchronize=host.synchronize)
    content = {"a": piece(2, device="meta"), "b": piece(3, device="meta"), "c": piece(2, device="cpu"), "text": "{}"}
    assert device_of(content) == torch.device("meta")
    staged = staging.staged(content)
    assert host.events == ["pin a", "pin b", "copy a b", "wait for meta"]
    assert [staged[name].tensor.sum() for name in "abc"] == [2.0, 3.0, 6.0] and staged["text"] == "{}"
    content["c"].tensor.fill_(0.0)
    assert staged["c"].tensor.sum() == 6.0
    host.events.clear()
    again = staging.staged({**content, "b": piece(4, device="meta")})
    assert host.events == ["pin b", "copy a b", "wait for meta"] and again["a"].tensor is staged["a"].tensor


def test_the_thread_that_writes_a_checkpoint_uses_this_ranks_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[str, torch.device]] = []

    class Module:
        def set_device(self, device: torch.device) -> None:
            used.append((threading.current_thread().name, device))

    monkeypatch.setattr(storage.torch, "get_device_module", lambda device: Module())
    monkeypatch.setattr(storage.dcp, "save", lambda content, **arguments: used.append(("saved", content)))
    storage.write(
        {}, tmp_path, "step-1", {}, keep_last=None, group=None, asynchronous=True, device=torch.device("cuda", 3)
    ).result()
    assert [name for name, _ in used] == ["checkpoint_0", "saved"] and used[0][1] == torch.device("cuda", 3)
