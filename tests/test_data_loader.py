"""The loader: what a training loop gets to see."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import IterableDataset, Subset

import planner


@dataclass(frozen=True)
class Group:
    """A data-parallel group, as a parallel module tells it."""

    data_rank: int
    num_data_ranks: int
    needed_inputs: frozenset[str] | None = None


@dataclass
class ChangingGroup:
    """One whose parallel module takes up other plans."""

    data_rank: int
    num_data_ranks: int
    layout: Any = None
    needed_inputs: frozenset[str] | None = None


class Numbered:
    """Samples that say their number."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {"x": torch.tensor([float(index)]), "labels": torch.tensor(index)}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (Numbered(self.length)[index] for index in range(self.length))


class Noisy:
    """Samples with random numbers from three libraries."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return {"x": torch.tensor([index, *noise], dtype=torch.float64), "labels": torch.tensor(index)}


def global_batches(dataset: Any, num_groups: int, *, field: str = "labels", **options: Any) -> list[list[Any]]:
    loaders = [planner.DataLoader(dataset, Group(group, num_groups), **options) for group in range(num_groups)]
    return [list(chain.from_iterable(part[field].tolist() for part in step)) for step in zip(*loaders, strict=True)]


@pytest.mark.parametrize("num_groups", [2, 4])
@pytest.mark.parametrize("dataset", [Numbered(21), Stream(21)], ids=["numbered", "stream"])
def test_every_plan_trains_on_the_same_batches(dataset: Any, num_groups: int) -> None:
    alone = [batch["labels"].tolist() for batch in planner.DataLoader(dataset, batch_size=8)]
    assert global_batches(dataset, num_groups, batch_size=8) == alone
    assert sorted(number for batch in alone for number in batch if number >= 0) == list(range(21))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Numbered(21), Stream(21)], ids=["numbered", "stream"])
def test_going_on_in_the_middle_is_as_if_never_stopped(dataset: Any, num_workers: int) -> None:
    loader = planner.DataLoader(dataset, batch_size=4, seed=3, num_workers=num_workers)
    states, seen = [], []
    for _ in range(2):
        for batch in loader:
            seen.append(batch["labels"].tolist())
            states.append(loader.state_dict())
    resumed = planner.DataLoader(dataset, Group(1, 2), batch_size=4, num_workers=num_workers)
    resumed.load_state_dict(states[7])  # the second of the second epoch's six batches
    assert [batch["labels"].tolist() for batch in resumed] == [batch[2:] for batch in seen[8:]]
    assert (resumed.epoch, resumed.position) == (2, 0)


def test_a_state_at_the_end_of_an_epoch_leaves_nothing_of_it() -> None:
    loader, resumed = (planner.DataLoader(Numbered(8), batch_size=4) for _ in range(2))
    states = [loader.state_dict() for _ in loader]
    resumed.load_state_dict(states[-1])
    assert list(resumed) == []
    assert [batch["labels"].tolist() for batch in resumed] == [batch["labels"].tolist() for batch in loader]


def test_resuming_reads_no_sample_again() -> None:
    dataset = Numbered(100)
    loader = planner.DataLoader(dataset, batch_size=10)
    loader.load_state_dict({**loader.state_dict(), "position": 80})
    assert len(list(loader)) == 2 and len(dataset.read) == 20


def test_an_iteration_that_training_goes_back_in_reads_the_same_again_and_whole_epochs_after_it() -> None:
    """As an elastic training does: another plan, and the state of a step before, also of the epoch before."""
    group = ChangingGroup(0, 1)
    loader = planner.DataLoader(Numbered(8), group, batch_size=2)
    batches = chain.from_iterable(loader for _ in range(4))
    seen, states = [], []
    for _ in range(4):
        seen.append(next(batches)["labels"].tolist())
        states.append(loader.state_dict())
    for step in (2, 4):  # the first of the second epoch is what comes again then
        while len(seen) <= step:
            seen.append(next(batches)["labels"].tolist())
        group.layout = object()
        loader.load_state_dict(states[step - 1])
        assert next(batches)["labels"].tolist() == seen[step]
        seen = seen[: step + 1]
    assert [next(batches)["labels"].tolist() for _ in range(7)] == epoch_of(8, 1)[1:] + epoch_of(8, 2)


def epoch_of(length: int, epoch: int) -> list[list[int]]:
    loader = planner.DataLoader(Numbered(length), batch_size=2)
    loader.set_epoch(epoch)
    return [batch["labels"].tolist() for batch in loader]


def test_another_batch_size_goes_on_in_the_same_order() -> None:
    whole = list(chain.from_iterable(global_batches(Numbered(24), 1, batch_size=4)))
    loader = planner.DataLoader(Numbered(24), batch_size=6)
    loader.load_state_dict({**loader.state_dict(), "position": 12})
    assert list(chain.from_iterable(batch["labels"].tolist() for batch in loader)) == whole[12:]


def test_an_iteration_left_early_begins_again() -> None:
    loader = planner.DataLoader(Numbered(8), batch_size=4)
    first = next(iter(loader))
    assert loader.position == 4 and loader.epoch == 0
    assert torch.equal(next(iter(loader))["labels"], first["labels"])


def test_epochs_differ_and_can_be_chosen() -> None:
    loader = planner.DataLoader(Numbered(16), batch_size=16)
    epochs = []
    for _ in range(2):
        (batch,) = loader
        epochs.append(batch["labels"].tolist())
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    loader.set_epoch(0)
    assert next(iter(loader))["labels"].tolist() == epochs[0]


def test_the_filling_of_the_last_batch_changes_neither_loss_nor_gradient() -> None:
    dataset = [
        {"x": torch.randn(6, generator=torch.Generator().manual_seed(number)), "labels": torch.tensor(number % 3)}
        for number in range(5)
    ]
    ends = {}
    for last in ("pad", "short"):
        *_, end = planner.DataLoader(dataset, batch_size=4, last=last)
        model = torch.nn.Linear(6, 3, dtype=torch.float64)
        torch.nn.init.eye_(model.weight)
        torch.nn.init.zeros_(model.bias)
        loss = F.cross_entropy(model(end["x"].double()), end["labels"])
        loss.backward()
        ends[last] = (len(end["x"]), loss.detach(), model.weight.grad)
    assert (ends["pad"][0], ends["short"][0]) == (4, 1)
    with pytest.warns(UserWarning, match="last 1 samples .* filled up to a batch of 4 .* exact for a mean over labels"):
        assert len(list(planner.DataLoader(dataset, batch_size=4))) == 2
    torch.testing.assert_close(ends["pad"][1:], ends["short"][1:], rtol=1e-14, atol=0)


def test_labels_that_are_also_inputs_are_left_as_inputs() -> None:
    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids = torch.stack([sample["labels"] for sample in samples])
        return {"input_ids": ids, "labels": ids}

    *_, end = planner.DataLoader(Numbered(5), batch_size=4, collate_fn=collate, shuffle=False)
    assert end["input_ids"].tolist() == [4, 4, 4, 4] and end["labels"].tolist() == [4, -100, -100, -100]


@pytest.mark.parametrize(
    ("sample", "options"),
    [
        ({"x": torch.zeros(2)}, {}),
        ({"x": torch.zeros(2), "labels": torch.tensor(0.5)}, {}),
        ((torch.zeros(2), torch.tensor(1)), {}),
        ({"x": torch.zeros(2), "labels": torch.tensor(1)}, {"label_fields": ("y",)}),
    ],
    ids=["no labels", "labels of a regression", "no fields", "another name"],
)
def test_a_batch_that_cannot_be_filled_says_so_at_once(sample: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="last='short'"):
        next(iter(planner.DataLoader([sample] * 9, batch_size=4, **options)))
    assert len(list(planner.DataLoader([sample] * 8, batch_size=4, **options))) == 2
    assert len(list(planner.DataLoader([sample] * 9, batch_size=4, last="short", **options))) == 3


def test_samples_are_left_out_only_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="last 2 samples"):
        loader = planner.DataLoader(Numbered(10), batch_size=4, drop_last=True)
    assert len(loader) == len(list(loader)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planner.DataLoader(Numbered(10), Group(1, 2), batch_size=4, drop_last=True)  # the first group has said it
    with pytest.warns(UserWarning, match="last 2 samples"):
        assert len(list(planner.DataLoader(Stream(10), batch_size=4, last="drop"))) == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_numbers_of_a_sample_do_not_depend_on_plan_or_workers(num_workers: int) -> None:
    torch.manual_seed(7)
    alone = global_batches(Noisy(), 1, batch_size=4, field="x")
    state = torch.get_rng_state()
    assert global_batches(Noisy(), 2, batch_size=4, field="x", num_workers=num_workers) == alone
    assert global_batches(Subset(Noisy(), range(12)), 2, batch_size=4, field="x") == alone
    assert torch.equal(torch.get_rng_state(), state)
    assert global_batches(Noisy(), 1, batch_size=4, field="x", seed=1) != alone


def test_a_rank_gets_only_the_fields_it_needs() -> None:
    first = next(iter(planner.DataLoader(Numbered(9), Group(0, 1, frozenset({"x"})), batch_size=4)))
    last = next(iter(planner.DataLoader(Numbered(9), Group(0, 1, frozenset({"labels"})), batch_size=4)))
    assert (set(first), set(last)) == ({"x"}, {"labels"})


def test_a_rank_that_needs_nothing_reads_nothing() -> None:
    dataset = Numbered(9)
    loader = planner.DataLoader(dataset, Group(0, 1, frozenset()), batch_size=4)
    states = [loader.state_dict()["position"] for batch in loader if batch == {}]
    assert states == [4, 8, 9] and dataset.read == []


def test_a_dataset_may_read_less() -> None:
    class Choosy(Numbered):
        def select_fields(self, names: frozenset[str]) -> list[dict[str, torch.Tensor]]:
            return [{name: torch.tensor(number) for name in sorted(names)} for number in range(self.length)]

    loader = planner.DataLoader(Choosy(8), batch_size=4, fields=("x",), shuffle=False)
    assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_a_collate_function_reads_is_not_taken_from_it() -> None:
    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {"double": torch.stack([2 * sample["x"] for sample in samples]), "rest": torch.zeros(len(samples))}

    group = Group(0, 1, frozenset({"double"}))
    batch = next(iter(planner.DataLoader(Numbered(8), group, batch_size=4, collate_fn=collate, shuffle=False)))
    assert set(batch) == {"double"} and batch["double"].tolist() == [[0.0], [2.0], [4.0], [6.0]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_samples": 9}, "dataset has changed"),
        ({"num_samples": None}, "a stream"),
        ({"shuffle": False}, "shuffle"),
        ({"position": 11}, "beyond the end"),
        ({"position": -1}, "whole numbers"),
        ({"epoch": "1"}, "whole numbers"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, Any], words: str) -> None:
    loader = planner.DataLoader(Numbered(10), batch_size=4)
    with pytest.raises(ValueError, match=words):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(ValueError, match="epoch, num_samples"):
        loader.load_state_dict({"position": 1, "seed": 0, "shuffle": True})


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        ([], {}, "empty"),
        (iter([1]), {}, "__getitem__"),
        (Stream(4), {"shuffle": True}, "stream"),
        (Numbered(3), {"drop_last": True}, "all 3 samples"),
        (Numbered(8), {"drop_last": True, "last": "pad"}, "contradicts"),
        (Numbered(8), {"sampler": None}, "sampler"),
        (Numbered(8), {"label_fields": ()}, "label_fields"),
    ],
)
def test_what_cannot_be_loaded(dataset: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        planner.DataLoader(dataset, batch_size=4, **options)
