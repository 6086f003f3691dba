"""Stretches of a model's lists of modules in which the same entries come again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from passes.capture.likeness import alike
from passes.torch_compat.module_tables import children_of, tensors_of

#: Up to this many entries may differ before they come again (attention over a window in five layers of six).
MAX_PERIOD = 6
#: Fewer periods than this are not worth the trouble: the first, the second and the last are traced anyway.
MIN_PERIODS = 5


@dataclass(frozen=True)
class RepeatedEntries:
    """Entries ``start … start + period · count - 1`` of the list at ``path``: ``count`` times the same.

    Unit ``u`` is its ``u``-th period. Units 0, 1 and the last are traced, the others are copies of unit 1.
    """

    path: str
    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count

    @property
    def last(self) -> int:
        """The last unit."""
        return self.count - 1

    def unit(self, entry: int) -> int:
        return (entry - self.start) // self.period

    def is_copied(self, entry: int) -> bool:
        return 1 < self.unit(entry) < self.last

    def entry_path(self, entry: int) -> str:
        return f"{self.path}.{entry}" if self.path else str(entry)

    def entry_of(self, path: str) -> int | None:
        """The entry that the module or state at ``path`` is part of, or None if it is not in the repeat."""
        prefix = f"{self.path}." if self.path else ""
        if not path.startswith(prefix):
            return None
        number = path[len(prefix) :].partition(".")[0]
        inside = number.isdigit() and self.start <= int(number) < self.stop
        return int(number) if inside else None

    def moved(self, path: str, *, unit: int) -> str:
        """The path in ``unit`` that ``path`` has in its own."""
        entry = self.entry_of(path)
        assert entry is not None
        there = entry + (unit - self.unit(entry)) * self.period
        return self.entry_path(there) + path[len(self.entry_path(entry)) :]


def find_repeats(model: nn.Module) -> tuple[RepeatedEntries, ...]:
    """Repeats in the outermost lists that have any (``ModuleList``, ``Sequential``: children named by numbers)."""
    uses: Counter[int] = Counter()
    for _, module in model.named_modules(remove_duplicate=False):
        tensors = tensors_of(module).values()
        uses.update(id(tensor) for tensor in tensors if tensor is not None)
    return tuple(_repeats_below(model, "", uses))


def _repeats_below(module: nn.Module, path: str, uses: Counter[int]) -> list[RepeatedEntries]:
    children = children_of(module)
    names = list(children)
    entries = [child for child in children.values() if child is not None]
    if len(names) == len(entries) >= MIN_PERIODS and names == [str(index) for index in range(len(names))]:
        repeats = _repeats(_classes(entries, uses), path)
        if repeats:
            return repeats
    return [
        repeat
        for name, child in children.items()
        if child is not None
        for repeat in _repeats_below(child, f"{path}.{name}" if path else name, uses)
    ]


def _classes(entries: Sequence[nn.Module], uses: Counter[int]) -> list[int]:
    """A number for every entry, the same for entries that are alike; one that shares tensors is like no other."""
    firsts: list[int] = []
    classes = []
    for index, entry in enumerate(entries):
        shares = any(uses[id(tensor)] > 1 for tensor in (*entry.parameters(), *entry.buffers()))
        same = None
        if not shares:
            same = next((first for first in firsts if alike(entries[first], entry, shift=index - first)), None)
            if same is None:
                firsts.append(index)
        classes.append(index if same is None else same)
    return classes


def _repeats(classes: Sequence[int], path: str) -> list[RepeatedEntries]:
    """The stretches of ``classes`` that repeat, each with the period that leaves most to be copied."""
    repeats = []
    start = 0
    while start < len(classes):
        counted = [(_count(classes, start, period), period) for period in range(1, MAX_PERIOD + 1)]
        count, period = max(counted, key=lambda pair: ((pair[0] - 3) * pair[1], -pair[1]))
        if count >= MIN_PERIODS:
            repeats.append(RepeatedEntries(path, start, period, count))
            start = repeats[-1].stop
        else:
            start += 1
    return repeats


def _count(classes: Sequence[int], start: int, period: int) -> int:
    """How many times the ``period`` entries from ``start`` come one after the other."""
    first = list(classes[start : start + period])
    count = 0
    while list(classes[start + count * period : start + (count + 1) * period]) == first:
        count += 1
    return count if len(first) == period else 0
