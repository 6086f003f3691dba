"""Data loaders whose batches every rank reads whole: those that one process would read with as many samples.

A parallel module takes its part of a global batch itself. So no loader is sharded, collators see what they see on one
process (padding to the longest of the batch), and what is computed from outputs needs no gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from runtime.agreement.ranks_together import gathered

#: What a loader is made of again, beside its dataset and batches.
_OPTIONS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
            "generator", "prefetch_factor", "persistent_workers", "in_order")  # fmt: skip


def with_global_batches(
    loader: DataLoader[Any],
    num_processes: int,
    *,
    share_order: bool = True,
    before: Callable[[], None] | None = None,
) -> DataLoader[Any]:
    """``loader`` with the samples of ``num_processes`` of its batches in each, in the first rank's order.

    The last batch may be short, as it is on one process.

    Args:
        share_order: whether to take the first rank's order (a sampler that is seeded alike on all ranks needs not).
        before: is called by each rank before it asks the first one for its order.

    Raises:
        ValueError: if the loader does not make batches.
    """
    options = {name: getattr(loader, name) for name in _OPTIONS}
    if isinstance(options["worker_init_fn"], partial) and "rank" in options["worker_init_fn"].keywords:
        options["worker_init_fn"] = partial(options["worker_init_fn"], rank=0)  # all ranks draw alike
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            raise ValueError(_NO_BATCHES)
        size = loader.batch_size * num_processes
        return DataLoader(loader.dataset, batch_size=size, drop_last=loader.drop_last, **options)
    batches = loader.batch_sampler
    if batches is None:
        raise ValueError(_NO_BATCHES)
    if type(batches) is BatchSampler:
        size = batches.batch_size * num_processes
        order = FirstRanksOrder(batches.sampler, before) if share_order else batches.sampler
        return DataLoader(loader.dataset, size, sampler=order, drop_last=batches.drop_last, **options)
    return DataLoader(loader.dataset, batch_sampler=JoinedBatches(batches, num_processes, before), **options)


_NO_BATCHES = "the data loader has no batch size, so nothing says what a global batch is: give it batch_size="


class FirstRanksOrder(Sampler[Any]):
    """The indices of a sampler as the first rank draws them."""

    def __init__(self, sampler: Any, before: Callable[[], None] | None = None) -> None:
        self.sampler, self._before = sampler, before

    def __iter__(self) -> Iterator[Any]:
        sampler = self.sampler
        if self._before is not None:
            self._before()
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            # What it draws itself, by which an epoch of one process is the same.
            seed = gathered(int(torch.empty((), dtype=torch.int64).random_().item()))[0]
            ordered = RandomSampler(
                sampler.data_source,
                replacement=sampler.replacement,
                num_samples=sampler.num_samples,
                generator=torch.Generator().manual_seed(seed),
            )
            yield from ordered
        else:
            yield from gathered(list(sampler))[0]

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler, if it asks for it."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class JoinedBatches(Sampler[list[Any]]):
    """Batches of a user's batch sampler, several after one another as one."""

    def __init__(self, batches: Any, count: int, before: Callable[[], None] | None = None) -> None:
        self.batches, self.count, self._before = batches, count, before
        if getattr(batches, "batch_size", None) is not None:
            self.batch_size = batches.batch_size * count
        self.drop_last = getattr(batches, "drop_last", False)

    def __iter__(self) -> Iterator[list[Any]]:
        if self._before is not None:
            self._before()
        joined: list[Any] = []
        for number, batch in enumerate(gathered(list(self.batches))[0], start=1):
            joined += batch
            if number % self.count == 0:
                yield joined
                joined = []
        if joined and not self.drop_last:
            yield joined

    def __len__(self) -> int:
        return len(self.batches) // self.count if self.drop_last else -(-len(self.batches) // self.count)
