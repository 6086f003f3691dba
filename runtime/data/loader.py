"""``planner.DataLoader``: torch's loader with an order of samples that no plan changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from runtime.data.order import Last, Order, Sampler
from runtime.data.padding import Buckets, KnownLengths, Padding, read_padding
from runtime.data.permutation import random_key
from runtime.data.reading import Collate, Reader, SampleStream, warn_of_dropped, warn_of_repeats

#: Options of torch's loader that say the order of samples, which is ours to say.
_OURS = ("sampler", "batch_sampler", "generator")


class DataRanks(Protocol):
    """The interface of a parallel module that a loader uses.

    It may also have ``needed_inputs``: names of the inputs that this rank uses, or None for all.
    """

    @property
    def data_rank(self) -> int: ...

    @property
    def num_data_ranks(self) -> int: ...


class DataLoader:
    """Batches for ``parallel.train_step(**batch, local_inputs=True)``: this rank's part of every global batch.

    Ranks of one data-parallel group read the same samples, other groups read others. Global batch i of an epoch is the
    same samples in the same order under every plan: a loaded state continues under any other plan, and so does an
    iteration during which ``parallel.replan`` changes the plan. Every iteration
    that comes to its end begins the next epoch; one that is left early starts again at the epoch's beginning.

    A dataset with ``__getitem__`` and ``__len__`` is shuffled anew each epoch, in memory and time that do not grow with
    its length, as resuming in the middle of one does not. A dataset with a method ``select_fields(names)`` that returns
    a dataset of less fields is asked for those that are needed. An ``IterableDataset`` is read whole by every rank (and
    every worker), which keeps its part: it must give the same stream everywhere (do not split it by rank or worker),
    and resuming reads on from its beginning, which takes as long as reading did. It is told the epoch if it has
    ``set_epoch``.

    Args:
        dataset: a torch dataset (or sequence) of samples.
        parallel: the parallel module; None: one process.
        batch_size: samples in a global batch, over all ranks and micro-batches.
        shuffle: default: yes, but not a stream.
        seed: of the order, and of random numbers that a sample draws while it is read.
        collate_fn: list of samples → batch. Default: torch's, which stacks the values of each field.
        num_workers: processes that read ahead; 0: this process reads.
        drop_last: the same as ``last="drop"``.
        last: what becomes of samples that do not fill the last batch of an epoch. ``"pad"``: the batch is filled with
            repeats whose labels are ``ignore_index``, so that a loss that leaves those out has the value and gradients
            of the samples alone; sums over samples, penalties on outputs and statistics over a batch, as batch norm's,
            do see the repeats. It is the default, and says so by a warning where nothing was chosen. ``"short"``: the
            batch is smaller. ``"whole"``: it is smaller, and every group reads all of it, so that any number of samples
            will do; pass ``local_inputs=loader.local_inputs``. ``"drop"``: left out; a warning says how many samples.
        label_fields: names of integer labels in a batch, one row a sample.
        ignore_index: the label that the loss leaves out.
        pad_to: lengths that batches are padded to, so that a few programs serve samples of any length (from
            ``planner.length_buckets``); by pattern of field names where fields have lengths of their own
            (``{"labels": (16, 32), "*": (64, 128)}``). Dim 1 of integer fields is filled at its end: labels with
            ``ignore_index``, masks with 0, tokens beside an attention mask with 0; anything else is refused unless
            ``pad_values`` names it. Samples of different lengths need no ``collate_fn`` then.
        pad_values: what further fields are filled with, by name.
        lengths: tokens of each sample (by pattern as ``pad_to`` if that is), which several data groups need to pad
            their parts of a batch alike.
        fields: names of what is kept of samples that are mappings. Default: with torch's ``collate_fn`` what
            ``parallel`` needs on this rank, with another one all.
        **options: of ``torch.utils.data.DataLoader``: ``pin_memory``, ``prefetch_factor``, ``persistent_workers``, …

    Raises:
        ValueError: if the groups cannot share a batch equally, no batch is full under ``last="drop"``, the dataset is
            empty, an option contradicts another, or (at the first batch) padding is needed and there are no labels.
    """

    def __init__(
        self,
        dataset: Any,
        parallel: DataRanks | None = None,
        *,
        batch_size: int,
        shuffle: bool | None = None,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        drop_last: bool = False,
        last: Last | None = None,
        label_fields: Collection[str] = ("labels",),
        ignore_index: int = -100,
        pad_to: Buckets | None = None,
        pad_values: Mapping[str, float] | None = None,
        lengths: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        fields: Collection[str] | None = None,
        **options: Any,
    ) -> None:
        group, num_groups = (parallel.data_rank, parallel.num_data_ranks) if parallel is not None else (0, 1)
        self.dataset = dataset
        self.batch_size = batch_size
        self._order = Order(batch_size, group, num_groups, _read_last(last, drop_last))
        self._tells_of_repeats = last is None and not drop_last
        self._parallel = parallel
        self._layout = self._layout_now()
        self._collate_fn = collate_fn
        self._fields = fields
        self._label_fields = (label_fields,) if isinstance(label_fields, str) else tuple(label_fields)
        self._ignore_index = ignore_index
        self._options = {"num_workers": num_workers, **_read_options(options)}
        self._generator = torch.Generator()
        self._loader: TorchLoader[Any] | None = None
        num_samples = _count(dataset)
        self._sampler: Sampler | None = None
        if num_samples is None and shuffle:
            raise ValueError("a stream (IterableDataset) cannot be shuffled here: shuffle it in the dataset itself")
        if num_samples is not None:
            self._sampler = Sampler(self._order, num_samples, shuffle is not False, seed)
            _check_last(self._order, num_samples)
        self._padding: Padding | None = None
        if pad_to is not None:
            self._padding = read_padding(
                pad_to, label_fields=self._label_fields, ignore_index=ignore_index, pad_values=pad_values
            )
            told_lengths = None if lengths is None else KnownLengths.of(lengths, self._padding, num_samples)
            if self._sampler is not None and told_lengths is not None:
                self._sampler.lengths_of = told_lengths
            elif num_groups > 1:
                raise ValueError(
                    f"pad_to: {num_groups} data groups must pad their parts of a batch alike, so each has to know how "
                    "long the samples of the others are: give lengths= (planner.sample_lengths counts them once)"
                )
        if self._order.last == "pad" and not self._label_fields:
            raise ValueError("last='pad' needs to know what the labels are called: label_fields is empty")
        self._seed = seed
        self._resume_at = 0
        self.epoch = 0
        #: Samples of this epoch that have been handed out, over all ranks.
        self.position = 0
        #: Whether the batch that was handed out last is this group's part, not the whole global batch.
        self.local_inputs = True

    @property
    def num_samples(self) -> int | None:
        """Samples in an epoch; None for a stream."""
        return None if self._sampler is None else self._sampler.num_samples

    def __len__(self) -> int:
        """Batches in a whole epoch.

        Raises:
            TypeError: for a stream without a length.
        """
        return self._order.num_batches(len(self.dataset) if self._sampler is None else self._sampler.num_samples)

    def __iter__(self) -> Iterator[Any]:
        self.position, self._resume_at = self._resume_at, 0
        epoch, ended = self.epoch, False
        while not ended:
            self._follow_plan()
            # Where training went back, this iteration goes on from there: perhaps from the end of the last epoch.
            epoch, ended, self._resume_at = self.epoch, True, 0
            for num_samples, batch in self._batches(epoch, self.position):
                self.position += num_samples
                self.local_inputs = not self._order.is_read_whole(num_samples)
                if self._tells_of_repeats and num_samples < self.batch_size:
                    self._tells_of_repeats = False
                    warn_of_repeats(num_samples, self.batch_size, group=self._order.group)
                yield batch
                if self._layout is not self._layout_now():
                    ended = False  # another plan: what was read ahead is of other data groups
                    break
        self.epoch, self.position = epoch + 1, 0

    def _layout_now(self) -> Any:
        return getattr(self._parallel, "layout", None)

    def _follow_plan(self) -> None:
        """Read the samples of this rank's data group under the present plan, which ``replan`` may have changed."""
        if self._parallel is None or self._layout is self._layout_now():
            return
        self._layout, self._loader = self._layout_now(), None
        self._order = dataclasses.replace(
            self._order, group=self._parallel.data_rank, num_groups=self._parallel.num_data_ranks
        )
        if self._sampler is not None:
            self._sampler.order = self._order

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; no effect if it is the present one."""
        if epoch != self.epoch:
            self.epoch, self.position, self._resume_at = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the last batch that was handed out ends, as plain numbers; the same on every rank."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self._seed,
            "shuffle": self._sampler is not None and self._sampler.shuffle,
            "num_samples": self.num_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` says, with its seed, under any plan and any ``batch_size``.

        Raises:
            ValueError: if the state is of another dataset or order, or no state of a loader.
        """
        expected = self.state_dict()
        missing = sorted(set(expected) - set(state))
        if missing:
            raise ValueError(f"this is not a loader's state: {', '.join(missing)} missing")
        if state["num_samples"] != self.num_samples:
            raise ValueError(
                f"the dataset has changed: the state is of {_samples(state['num_samples'])}, this one has "
                f"{_samples(self.num_samples)}; the order of the rest of the epoch would be another (start a new epoch "
                "with set_epoch instead)"
            )
        if state["shuffle"] != expected["shuffle"]:
            raise ValueError(f"the state is of shuffle={state['shuffle']}, the loader of shuffle={expected['shuffle']}")
        epoch, position, seed = (state[name] for name in ("epoch", "position", "seed"))
        most = self.num_samples
        if not all(isinstance(number, int) for number in (epoch, position, seed)) or min(epoch, position) < 0:
            raise ValueError(f"epoch, position and seed must be whole numbers, got {epoch!r}, {position!r}, {seed!r}")
        if most is not None and position > most:
            raise ValueError(f"position {position} lies beyond the end of the dataset, {most}")
        self.epoch, self.position, self._resume_at, self._seed = epoch, position, position, seed
        if self._sampler is not None:
            self._sampler.seed = seed

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[int, Any]]:
        self._generator.manual_seed(random_key(self._seed, epoch, start) >> 1)  # of the workers
        if self._sampler is None:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            stream = SampleStream(self._selected(), self._read_fields(), self._order, start=start)
            yield from TorchLoader(stream, batch_size=None, **self._torch_options())
            return
        self._sampler.epoch, self._sampler.start = epoch, start
        if self._loader is None and self._needed() == frozenset():
            yield from ((part.num_samples, {}) for part in self._sampler)
            return
        if self._loader is None:
            reader = Reader(self._selected(), self._read_fields())
            self._loader = TorchLoader(reader, batch_sampler=self._sampler, **self._torch_options())  # type: ignore[arg-type]
        yield from self._loader

    def _needed(self) -> frozenset[str] | None:
        """Names of the batch fields that this rank's programs use; None: all."""
        needed = getattr(self._parallel, "needed_inputs", None)
        return None if needed is None else frozenset(needed)

    def _read_fields(self) -> frozenset[str] | None:
        """Names of what is read of a sample; None: all. What another collate_fn makes a batch of is not known."""
        if self._fields is not None:
            return frozenset(self._fields)
        return self._needed() if self._collate_fn is None and self._padding is None else None

    def _selected(self) -> Any:
        fields = self._read_fields()
        if fields is None or not hasattr(self.dataset, "select_fields"):
            return self.dataset
        return self.dataset.select_fields(fields)

    def _torch_options(self) -> dict[str, Any]:
        needed_fields = self._needed()
        available = (names for names in (needed_fields, self._read_fields()) if names is not None)
        labels = frozenset(self._label_fields).intersection(*available)
        # A stream does not say before its end whether the last batch is full.
        checked = self._sampler is None and self._order.last == "pad"
        collate = Collate(
            self._collate_fn,
            needed_fields,
            tuple(name for name in self._label_fields if name in labels),
            self._ignore_index,
            checked,
            self._padding,
        )
        return {**self._options, "collate_fn": collate, "generator": self._generator}


def _count(dataset: Any) -> int | None:
    if isinstance(dataset, IterableDataset):
        return None
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"a dataset has __getitem__ and __len__, or is an IterableDataset; {type(dataset).__name__} is neither"
        )
    if not len(dataset):
        raise ValueError("the dataset is empty")
    return len(dataset)


def _read_last(last: Last | None, drop_last: bool) -> Last:
    if drop_last and last not in (None, "drop"):
        raise ValueError(f"drop_last=True contradicts last={last!r}: leave one of them out")
    return "drop" if drop_last else last or "pad"


def _read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    clash = [name for name in _OURS if name in options]
    if clash:
        raise ValueError(
            f"{', '.join(clash)}: the order of samples is the loader's own (it must not depend on the plan); put "
            "another order into the dataset"
        )
    return dict(options)


def _check_last(order: Order, num_samples: int) -> None:
    """Raise or warn now about what the epoch's last batch would raise or leave out."""
    dropped = order.num_dropped(num_samples)
    if dropped == num_samples:
        raise ValueError(
            f"last='drop' would leave out all {num_samples} samples, which do not fill one batch of {order.batch_size}"
        )
    if dropped:
        warn_of_dropped(dropped, group=order.group)
    if order.last == "short" and num_samples % order.batch_size:
        order.part(num_samples % order.batch_size)


def _samples(number: int | None) -> str:
    return "a stream" if number is None else f"{number} samples"
