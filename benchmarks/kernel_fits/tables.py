"""Tables of measured kernels: one gzipped CSV for each device and kind, times in microseconds."""

from __future__ import annotations

import csv
import gzip
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Chip:
    """What data sheets say of a measured device: bf16 peak, memory bandwidth, multiprocessors, second-level cache."""

    table: str
    efficiency: str
    peak: float
    bandwidth: float
    processors: int
    cache_bytes: float


CHIPS = (
    Chip("a100_sxm", "a100", 312e12, 2.039e12, 108, 40e6),
    Chip("h100_sxm", "h100", 989.5e12, 3.35e12, 132, 50e6),
    Chip("h200_sxm", "h100", 989.5e12, 4.8e12, 132, 50e6),
    Chip("b200_sxm", "b200", 2250e12, 8e12, 148, 126e6),
    Chip("l40s", "l40s", 362e12, 0.864e12, 142, 96e6),
)


@dataclass(frozen=True)
class Measured:
    """Rows of one table: what was measured, seconds, and which rows may be fitted."""

    columns: dict[str, Array]
    labels: dict[str, list[str]]
    seconds: Array
    fitted: Array

    def of(self, choose: Array) -> Measured:
        """Some of the rows."""
        return Measured(
            {name: column[choose] for name, column in self.columns.items()},
            {name: [text for text, chosen in zip(column, choose) if chosen] for name, column in self.labels.items()},
            self.seconds[choose],
            self.fitted[choose],
        )

    def __len__(self) -> int:
        return len(self.seconds)


def read_table(folder: Path, name: str, *, numbers: Sequence[str], labels: Sequence[str] = ()) -> Measured:
    """The rows of ``name.csv.gz``; of rows of one shape the fastest.

    A row may be fitted if the first bit of the SHA-256 of its shape, written with commas, is 0: half of the rows,
    the same for ever.
    """
    fastest: dict[tuple[str, ...], float] = {}
    with gzip.open(folder / f"{name}.csv.gz", "rt", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            key = (*(row[each] for each in numbers), *(row[each] for each in labels))
            seconds = float(row["microseconds"]) * 1e-6
            fastest[key] = min(seconds, fastest.get(key, seconds))
    keys = list(fastest)
    return Measured(
        {each: np.array([float(key[place]) for key in keys]) for place, each in enumerate(numbers)},
        {each: [key[len(numbers) + place] for key in keys] for place, each in enumerate(labels)},
        np.array([fastest[key] for key in keys]),
        np.array([hashlib.sha256(",".join(key).encode()).digest()[0] < 128 for key in keys]),
    )


@dataclass(frozen=True)
class Errors:
    """Predicted over measured: the median and the 10th and 90th percentile."""

    rows: int
    low: float
    median: float
    high: float

    @classmethod
    def of(cls, predicted: Array, measured: Array) -> Errors:
        low, median, high = np.percentile(predicted / measured, (10, 50, 90))
        return cls(len(measured), float(low), float(median), float(high))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.2f}–{self.high:.2f})"
