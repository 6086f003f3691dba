"""Batches padded to a few lengths, so that a few programs serve samples of any length.

Filling must change nothing: the loss leaves it out (labels are ``ignore_index`` there), and what is computed of real
tokens does not see it (an attention mask is 0 there). Anything else is refused, unless ``pad_values`` names it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import default_collate

from runtime.data.length_buckets import bucket_of

#: Lengths to pad to; by pattern of field names where fields have lengths of their own.
Buckets = Sequence[int] | Mapping[str, Sequence[int]]

#: What fields are filled with, by name: those that may be filled because they say what counts, or where a token is.
_FILLS = {"*attention_mask": 0, "*_mask": 0, "token_type_ids": 0, "position_ids": 0}
_MASK = "*attention_mask"


@dataclass(frozen=True)
class Padding:
    """Pads fields of batches along dim 1, at its end.

    Args:
        buckets: ascending lengths, by pattern of field names; of several patterns the first that fits counts.
        label_fields: integer labels, one a token, of which the loss leaves ``ignore_index`` out.
        values: what other fields are filled with, by name; naming a field says that its filling changes nothing.
    """

    buckets: Mapping[str, tuple[int, ...]]
    label_fields: tuple[str, ...] = ("labels",)
    ignore_index: int = -100
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def longest(self) -> dict[str, int]:
        """The largest bucket of every pattern."""
        return {pattern: sizes[-1] for pattern, sizes in self.buckets.items()}

    def pattern_of(self, name: str) -> str | None:
        """The pattern whose buckets a field is padded to."""
        return next((pattern for pattern in self.buckets if fnmatchcase(name, pattern)), None)

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """A batch of samples (mappings) whose fields may be of different lengths.

        Raises:
            ValueError: for samples that are no mappings, and for what may not be filled.
        """
        if not all(isinstance(sample, Mapping) for sample in samples):
            raise ValueError(
                "pad_to pads samples that are mappings from names to tensors: give a collate_fn for others"
            )
        columns = {name: [sample[name] for sample in samples] for name in samples[0]}
        ragged = {name for name, column in columns.items() if _lengths(column)[1:]}
        batch = {}
        for name, column in columns.items():
            tensors = [torch.as_tensor(entry) for entry in column] if _lengths(column) else column
            if name in ragged:
                fill, longest = self.fill_of(name, tensors[0].unsqueeze(0), columns), max(map(len, tensors))
                tensors = [_filled(tensor, 0, longest, fill) for tensor in tensors]
            batch[name] = default_collate(tensors)
        return batch

    def pad(self, batch: Any, to: Mapping[str, int] | None = None) -> dict[str, Any]:
        """The batch with every field that has a length as long as its bucket.

        Args:
            to: the length of every pattern's fields; None: the smallest bucket that each field fits in.

        Raises:
            ValueError: for a batch that is no mapping, what fits in no bucket, and what may not be filled.
        """
        if not isinstance(batch, Mapping):
            raise ValueError(f"pad_to pads batches that are mappings from names to tensors, got {type(batch).__name__}")
        padded = dict(batch)
        for name, value in batch.items():
            pattern = self.pattern_of(name)
            if pattern is None or not self._has_length(name, value):
                continue
            length = value.shape[1]
            size = bucket_of(length, self.buckets[pattern]) if to is None else to[pattern]
            if size < length:
                raise ValueError(
                    f"{name!r} is {length} long, but lengths= says that its batch has no sample of more than {size}: "
                    "give the length of each sample as the batch has it"
                )
            if size > length:
                padded[name] = _filled(value, 1, size, self.fill_of(name, value, batch))
        return padded

    def _has_length(self, name: str, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return False
        return name in self.values or not value.is_floating_point()

    def fill_of(self, name: str, value: torch.Tensor, batch: Mapping[str, Any]) -> float:
        """What a field is filled with.

        Raises:
            ValueError: if nothing says that its filling changes nothing.
        """
        if name in self.values:
            return self.values[name]
        if name in self.label_fields:
            if name in self.buckets or any(_is_beside(value, batch[other]) for other in batch if other != name):
                return self.ignore_index
            raise ValueError(
                f"{name!r} of shape {list(value.shape)} is as long as no other field: if it has one label a token, of "
                f"which the loss leaves {self.ignore_index} out, name it: pad_to={{{name!r}: […], '*': […]}}"
            )
        for pattern, fill in _FILLS.items():
            if fnmatchcase(name, pattern):
                if value.dim() > 2:
                    raise ValueError(f"{name!r} has {value.dim()} dims: pad_to fills masks of [samples, tokens] alone")
                return fill
        if any(fnmatchcase(other, _MASK) and _is_beside(value, batch[other]) for other in batch):
            return 0
        raise ValueError(
            f"nothing says that the filling of {name!r} changes nothing: give batches an attention_mask as long as it, "
            f"or, where the model does not look at what comes later (a causal one), pad_values={{{name!r}: 0}}"
        )


def read_padding(
    pad_to: Buckets,
    *,
    label_fields: Collection[str] = ("labels",),
    ignore_index: int = -100,
    pad_values: Mapping[str, float] | None = None,
) -> Padding:
    """The padding that these arguments of a loader ask for.

    Raises:
        ValueError: unless buckets are whole numbers from 1 on.
    """
    by_pattern = dict(pad_to) if isinstance(pad_to, Mapping) else {"*": pad_to}
    for pattern, sizes in by_pattern.items():
        if not isinstance(sizes, (list, tuple)) or not sizes or not all(type(s) is int and s > 0 for s in sizes):
            raise ValueError(
                f"pad_to of {pattern!r} must be a list of lengths, whole numbers from 1 on, got {sizes!r} "
                "(planner.length_buckets chooses them from a histogram of lengths)"
            )
    buckets = {pattern: tuple(sorted(set(sizes))) for pattern, sizes in by_pattern.items()}
    return Padding(buckets, tuple(label_fields), ignore_index, dict(pad_values or {}))


@dataclass(frozen=True)
class KnownLengths:
    """How long samples are, known before they are read: what a batch of them is padded to, on all ranks alike."""

    lengths: Mapping[str, Sequence[int]]
    padding: Padding

    @classmethod
    def of(
        cls, lengths: Sequence[int] | Mapping[str, Sequence[int]], padding: Padding, num_samples: int | None
    ) -> KnownLengths:
        """As a loader is told.

        Raises:
            ValueError: unless there is one length for each sample, of every pattern.
        """
        by_pattern = dict(lengths) if isinstance(lengths, Mapping) else dict.fromkeys(padding.buckets, lengths)
        if set(by_pattern) != set(padding.buckets):
            raise ValueError(
                f"lengths= is of {sorted(by_pattern)}, pad_to of {sorted(padding.buckets)}: give both alike"
            )
        wrong = [pattern for pattern, numbers in by_pattern.items() if len(numbers) != num_samples]
        if wrong:
            raise ValueError(
                f"lengths= has {len(by_pattern[wrong[0]])} numbers, the dataset {num_samples or 'no'} samples (a "
                "stream has no lengths): give one for each sample"
            )
        return cls(by_pattern, padding)

    def __call__(self, samples: Sequence[int]) -> dict[str, int]:
        """What fields of the global batch of these samples are padded to, by pattern.

        Raises:
            ValueError: for a sample that is longer than every bucket.
        """
        return {
            pattern: bucket_of(max(int(numbers[sample]) for sample in samples), self.padding.buckets[pattern])
            for pattern, numbers in self.lengths.items()
        }


@dataclass(frozen=True)
class PaddedCollator:
    """A collator whose batches are padded to buckets, for loaders other than ours.

    Args:
        collate_fn: list of samples → batch; None for one that stacks samples of different lengths.
        longest: pad everything to the largest bucket.
    """

    padding: Padding
    collate_fn: Any = None
    longest: bool = False

    @property
    def tokenizer(self) -> Any:
        """That of the collator inside; None if it has none."""
        return getattr(self.collate_fn, "tokenizer", None)

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        batch = self.padding.collate(samples) if self.collate_fn is None else self.collate_fn(samples)
        return self.padding.pad(batch, self.padding.longest if self.longest else None)


def gives_several_lengths(collator: Any) -> bool:
    """Whether a collator pads batches to lengths that differ: to one of several buckets, or (Hugging Face's
    ``padding=True``) each to its longest sample."""
    if isinstance(collator, PaddedCollator):
        return not collator.longest and any(len(sizes) > 1 for sizes in collator.padding.buckets.values())
    padding = getattr(collator, "padding", None)
    return padding is True or getattr(padding, "value", padding) == "longest"


def _lengths(column: Sequence[Any]) -> list[int]:
    """The different lengths of a field's entries; none if they are no sequences of numbers."""
    if not all(isinstance(entry, (torch.Tensor, list)) for entry in column):
        return []
    if any(isinstance(entry, torch.Tensor) and not entry.dim() for entry in column):
        return []
    return sorted({len(entry) for entry in column})


def _is_beside(value: torch.Tensor, other: Any) -> bool:
    """Whether another field has an entry for each of the tokens of ``value`` [samples, tokens, …]."""
    if isinstance(other, list):  # samples, not yet a batch
        return any(isinstance(entry, (torch.Tensor, list)) and len(entry) == value.shape[1] for entry in other[:1])
    return isinstance(other, torch.Tensor) and other.dim() > 1 and other.shape[1] == value.shape[1]


def _filled(tensor: torch.Tensor, dim: int, size: int, fill: float) -> torch.Tensor:
    after = [0, 0] * (tensor.dim() - dim - 1) + [0, size - tensor.shape[dim]]
    return functional.pad(tensor, after, value=fill)
