"""Reading samples, and making batches of them: what runs inside the loader's workers."""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate, get_worker_info

from runtime.data.order import Order, SampleRange
from runtime.data.padding import Padding

#: Samples as they were read, and where they belong.
Read = tuple[SampleRange, list[Any]]


class Reader(Dataset[Any]):
    """Reads parts of batches from a dataset with ``__getitem__`` (or ``__getitems__``, which reads several at once).

    Random numbers that a sample draws (from torch, numpy or ``random``) come from a seed of its own, so that they
    depend neither on the plan, nor on the workers, nor on where training was resumed; the process's own generators are
    left as they were. ``__getitems__`` is seeded once for all samples it reads.
    """

    def __init__(self, dataset: Any, fields: Collection[str] | None) -> None:
        self.dataset = dataset
        self.fields = fields

    def __getitems__(self, part: SampleRange) -> Read:
        with own_randomness():
            return part, [keep_fields(sample, self.fields) for sample in self._read(part)]

    def _read(self, part: SampleRange) -> Iterator[Any]:
        if _reads_several(self.dataset):
            seed_generators(part.seeds[0])
            yield from self.dataset.__getitems__(list(part.indices))
            return
        for index, seed in zip(part.indices, part.seeds, strict=True):
            seed_generators(seed)
            yield self.dataset[index]


def _reads_several(dataset: Any) -> bool:
    while isinstance(dataset, Subset):  # has __getitems__ whether what it is a part of does or not
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


class SampleStream(IterableDataset[Read]):
    """Parts of the global batches of a stream, from sample ``start`` on.

    Every worker of every rank reads the whole stream and keeps its part; samples before ``start`` are read and left.
    """

    def __init__(self, dataset: Any, fields: Collection[str] | None, order: Order, *, start: int) -> None:
        self.dataset = dataset
        self.fields = fields
        self.order = order
        self.start = start

    def __iter__(self) -> Iterator[Read]:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        samples = itertools.islice(iter(self.dataset), self.start, None)
        for number in itertools.count():
            batch = list(itertools.islice(samples, self.order.batch_size))
            full = len(batch) == self.order.batch_size
            if number % num_workers == worker_id and batch:
                if not full and self.order.last == "drop":
                    warn_of_dropped(len(batch), group=self.order.group)
                    return
                part = self.order.part(len(batch))
                yield part, [keep_fields(batch[row], self.fields) for row in part.indices]
            if not full:
                return


@dataclass(frozen=True)
class Collate:
    """Makes a batch of the samples of a part, and takes its filling out of the loss.

    Args:
        collate_fn: list of samples → batch; None: torch's, or, with padding, one for samples of different lengths.
        kept_fields: fields that a batch keeps; None: all.
        label_fields: where filled rows are set to ``ignore_index``; none of them: this rank needs no labels.
        ignore_index: the label that the loss leaves out.
        checked: look for a label field in every batch, not only where it is needed.
        padding: to a few lengths; None: batches stay as they are.
    """

    collate_fn: Callable[[list[Any]], Any] | None
    kept_fields: Collection[str] | None
    label_fields: tuple[str, ...]
    ignore_index: int
    checked: bool
    padding: Padding | None = None

    def __call__(self, read: Read) -> tuple[int, Any]:
        part, samples = read
        batch = self._collated(samples, part)
        if self.label_fields and (part.padded_epoch or self.checked):
            batch = self._ignore(batch, part)
        if self.kept_fields is not None and isinstance(batch, Mapping):
            batch = keep_fields(batch, self.kept_fields)
        return part.num_samples, batch

    def _collated(self, samples: list[Any], part: SampleRange) -> Any:
        if self.padding is None:
            return (self.collate_fn or default_collate)(samples)
        batch = self.padding.collate(samples) if self.collate_fn is None else self.collate_fn(samples)
        return self.padding.pad(batch, part.lengths)

    def _ignore(self, batch: Any, part: SampleRange) -> Any:
        present = [name for name in self.label_fields if isinstance(batch, Mapping) and name in batch]
        if not present or any(not _is_label(batch[name], len(part.indices)) for name in present):
            fields = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise ValueError(
                "the last batch of an epoch is filled up, and the filling has to be left out of the loss "
                f"(label {self.ignore_index}): that takes an integer tensor with one row a sample named "
                f"{' or '.join(map(repr, self.label_fields))} in each batch, got {fields}. Say by label_fields=(…) "
                "what it is called, or choose last='short' (the batch stays short) or last='drop' (its samples are "
                "left out)"
            )
        if part.num_real == len(part.indices):
            return batch
        ignored = {name: batch[name].clone() for name in present}  # may share memory with another field
        for labels in ignored.values():
            labels[part.num_real :] = self.ignore_index
        return {**batch, **ignored}


def _is_label(value: Any, num_rows: int) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dtype == torch.bool:
        return False
    return value.dim() > 0 and value.shape[0] == num_rows


def keep_fields(sample: Any, fields: Collection[str] | None) -> Any:
    """A mapping with only ``fields`` (None: all); anything else as it is."""
    if fields is None or not isinstance(sample, Mapping):
        return sample
    return {name: value for name, value in sample.items() if name in fields}


def warn_of_dropped(num_samples: int, *, group: int) -> None:
    """Say (in one data group) how many samples an epoch leaves out."""
    if group == 0:
        warnings.warn(
            f"last='drop': the last {num_samples} samples of every epoch do not fill a batch and are left out "
            "(last='pad' or last='short' keeps them)",
            stacklevel=3,
        )


def warn_of_repeats(num_samples: int, batch_size: int, *, group: int) -> None:
    """Say (in one data group) that a batch was filled by the loader's default, and under which losses that is exact."""
    if group == 0:
        warnings.warn(
            f"the last {num_samples} samples of an epoch were filled up to a batch of {batch_size} with repeats whose "
            "labels the loss should leave out: exact for a mean over labels, not for a sum, a penalty on outputs or "
            "batch statistics (last='whole' or 'short' is exact under any loss; last='pad' says that this is meant)",
            stacklevel=3,
        )


def seed_generators(seed: int) -> None:
    """Seed the generators on the CPU that a dataset may draw from."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """Leaves the generators on the CPU as they were before."""
    state = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.default_generator.set_state(state[2])
