"""Several samples in one row, each seeing itself alone: rows of one length with hardly any filling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

#: The token and label of what fills up a row, and the label of what no token predicts.
_FILL, _IGNORED = 0, -100


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """A dataset of token sequences as rows of ``length`` tokens, for causal language models.

    Samples are put into rows by first-fit decreasing (longest first, each into the first row with room): at most 11/9
    of the fewest rows possible, plus one (D. S. Johnson, 1973). A row has

    * ``input_ids`` [length]: its samples one after the other, then filling;
    * ``position_ids`` [length]: counted from 0 in every sample;
    * ``attention_mask`` [1, length, length]: True where a token may see another: the same sample, not later. Stacked to
      a batch it is the mask [rows, 1, queries, keys] that scaled dot-product attention takes;
    * ``labels`` [length]: those of the samples (or their tokens); −100 for filling and for the first token of a
      sample, which nothing predicts (a model that shifts labels would predict it from the sample before).

    The mean loss over labels of all rows is that of the samples one by one, weighed by their predicted tokens.

    Args:
        dataset: samples are mappings with ``input_ids``, and ``labels`` if those are others.
        length: of a row.
        lengths: of each sample's tokens; None: every sample is read once to count.

    Raises:
        ValueError: for an empty dataset, and for a sample that is empty or longer than a row.
    """

    def __init__(self, dataset: Any, length: int, *, lengths: Sequence[int] | None = None) -> None:
        self.dataset = dataset
        self.length = length
        counts = sample_lengths(dataset) if lengths is None else [int(count) for count in lengths]
        if len(counts) != len(dataset) or not counts:
            raise ValueError(f"{len(counts)} lengths for a dataset of {len(dataset)} samples: give one for each")
        wrong = next((index for index, count in enumerate(counts) if not 0 < count <= length), None)
        if wrong is not None:
            raise ValueError(
                f"sample {wrong} has {counts[wrong]} tokens, a row {length}: cut samples to that, and leave out empty "
                "ones"
            )
        self.rows = first_fit_decreasing(counts, length)
        #: Filling over all tokens of all rows.
        self.filling = 1.0 - sum(counts) / (len(self.rows) * length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        samples = [self.dataset[number] for number in self.rows[index]]
        tokens = [torch.as_tensor(sample["input_ids"]).reshape(-1) for sample in samples]
        labels = [
            torch.as_tensor(sample.get("labels", own)).reshape(-1).clone() for sample, own in zip(samples, tokens)
        ]
        for of_sample in labels:
            of_sample[:1] = _IGNORED
        rest = self.length - sum(map(len, tokens))
        sizes = [*map(len, tokens), *([rest] if rest else [])]
        sample_of = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        return {
            "input_ids": torch.cat([*tokens, tokens[0].new_full((rest,), _FILL)]),
            "position_ids": torch.cat([torch.arange(size) for size in sizes]),
            "attention_mask": ((sample_of[:, None] == sample_of[None, :]).tril())[None],
            "labels": torch.cat([*labels, labels[0].new_full((rest,), _IGNORED)]),
        }


def sample_lengths(dataset: Any, field: str = "input_ids") -> list[int]:
    """How long a field is in each sample; reads the whole dataset once."""
    return [len(dataset[index][field]) for index in range(len(dataset))]


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of numbers of items: each item, largest first, is in the first bin with room. O(n log n)."""
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    room = _FirstWithRoom(len(sizes), capacity)
    bins: list[list[int]] = []
    for index in order:
        place = room.take(sizes[index])
        if place == len(bins):
            bins.append([])
        bins[place].append(index)
    return bins


class _FirstWithRoom:
    """A tree over bins that knows the most room in each half."""

    def __init__(self, num_bins: int, capacity: int) -> None:
        self.leaves = 1 << max(0, (num_bins - 1).bit_length())
        self.most = [capacity] * (2 * self.leaves)

    def take(self, size: int) -> int:
        """Put an item of ``size`` into the first bin that has room for it; its number."""
        node = 1
        while node < self.leaves:
            node = 2 * node if self.most[2 * node] >= size else 2 * node + 1
        place = node - self.leaves
        self.most[node] -= size
        while node > 1:
            node //= 2
            self.most[node] = max(self.most[2 * node], self.most[2 * node + 1])
        return place
