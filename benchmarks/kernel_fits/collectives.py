"""Protocols of ``cost_models.collectives`` fitted to measured collectives of NCCL inside one node."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.kernel_fits.tables import Array, Chip, Measured, read_table
from cost_models.collectives import seconds_over
from cost_models.efficiency import Curve
from cost_models.hardware import Protocol
from cost_models.routes import Span

#: The table's names of collectives by ours.
NAMES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "alltoall",
}
#: Parameters: name, least, first guess, most. Two protocols: one quick to start, one of high bandwidth.
PARAMETERS = (
    ("quick_latency", 1e-6, 6e-6, 30e-6),
    ("quick_hop", 0.0, 0.7e-6, 5e-6),
    ("quick_share", 0.01, 0.1, 1.0),
    ("latency", 1e-6, 9e-6, 60e-6),
    ("hop", 0.0, 1e-6, 10e-6),
    ("share", 0.1, 0.8, 1.0),
    ("own_bandwidth", 5e10, 7e11, 1e14),
    ("ramp", 0.0, 1.5e-3, 12e-3),
)
#: Where switches add up: the third protocol, of all-reduce.
IN_NETWORK = (
    ("network_latency", 5e-6, 20e-6, 80e-6),
    ("network_share", 0.1, 0.6, 1.0),
)
QUICK_SHARES = (0.03, 0.1, 0.3)


@dataclass(frozen=True)
class Links:
    """A node's links: the preset that has them, bytes per second of a rank in one direction by the data sheet, and from
    how many ranks switches add up."""

    preset: str
    bandwidth: float
    in_network_from: int | None


LINKS = {
    "a100_sxm": Links("dgx-a100-80g", 300e9, None),
    "h100_sxm": Links("dgx-h100", 450e9, 8),
    "h200_sxm": Links("dgx-h200", 450e9, 8),
    "b200_sxm": Links("dgx-b200", 900e9, 8),
}


def read_collectives(folder: Path, chip: Chip) -> dict[str, Measured]:
    """The measured calls by collective."""
    rows = read_table(folder, f"{chip.table}_nccl", numbers=("num_gpus", "message_bytes"), labels=("collective",))
    names = np.array(rows.labels["collective"])
    return {name: rows.of(names == label) for name, label in NAMES.items()}


def fit(collective: str, rows: Measured, links: Links) -> tuple[Protocol, ...]:
    """The protocols of least logarithmic error (soft L1) over the rows that may be fitted."""
    sample = rows.of(rows.fitted)
    adds_up = collective == "all_reduce" and links.in_network_from is not None
    names, low, first, high = zip(*PARAMETERS, *(IN_NETWORK if adds_up else ()))
    scale = np.array(first)

    def errors(values: Array) -> Array:
        protocols = protocols_of(collective, dict(zip(names, map(float, values))), links)
        return np.log(predict(collective, protocols, sample, links) / sample.seconds)

    results = []
    for quick in QUICK_SHARES:
        start = scale.copy()
        start[names.index("quick_share")] = quick
        results.append(least_squares(errors, start, bounds=(low, high), loss="soft_l1", f_scale=0.05, x_scale=scale))
    best = min(results, key=lambda result: float(result.cost)).x
    return protocols_of(collective, dict(zip(names, map(float, best))), links)


def protocols_of(collective: str, numbers: dict[str, float], links: Links) -> tuple[Protocol, ...]:
    """Protocols of one collective with these parameters."""
    quick = Protocol(
        "quick",
        numbers["quick_latency"],
        numbers["quick_hop"],
        Curve.constant(numbers["quick_share"]),
        collectives=(collective,),
    )
    wide = Protocol(
        "simple",
        numbers["latency"],
        numbers["hop"],
        Curve.constant(numbers["share"]),
        collectives=(collective,),
        own_bandwidth=numbers["own_bandwidth"],
        ramp=numbers["ramp"],
    )
    if "network_share" not in numbers or links.in_network_from is None:
        return quick, wide
    adding = replace(
        wide,
        name="nvls",
        latency=numbers["network_latency"],
        bandwidth_efficiency=Curve.constant(numbers["network_share"]),
        own_bandwidth=math.inf,
        least_group=links.in_network_from,
        in_network=True,
    )
    return quick, wide, adding


def predict(collective: str, protocols: tuple[Protocol, ...], rows: Measured, links: Links) -> Array:
    """Seconds of each call; the table counts the whole tensor, of an all-to-all one rank's."""
    seconds = []
    for ranks, size in zip(rows.columns["num_gpus"], rows.columns["message_bytes"]):
        span = Span.of_link(int(ranks), latency=0.0, bandwidth=links.bandwidth)
        whole = size * ranks if collective == "all_to_all" else size
        seconds.append(seconds_over(collective, num_bytes=whole, spans=(replace(span, protocols=protocols),)))
    return np.array(seconds)
