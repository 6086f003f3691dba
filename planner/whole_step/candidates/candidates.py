"""The candidates of the search: layout × micro-batch × schedule, each with a bound that is cheap to compute."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cost_models import Cluster
from cost_models.schedules import SCHEDULES, Schedule, reason_not
from cost_models.simulator import MOST_PLAYED
from cost_models.text import counted
from planner.whole_step.candidates.demands import CHUNKS_PER_RANK, ZERO_RANKS, Demands
from planner.whole_step.candidates.mesh_layout import AXES, MeshLayout, divisors, layouts, zero_groups
from planner.whole_step.candidates.training_options import ZERO_STAGES
from planner.whole_step.costs.sharding import Cut
from planner.whole_step.costs.step_prices import EXPERT, PIPELINE

#: Micro-batches for each pipeline rank with which a schedule reaches its steady state; below that delayed weight
#: gradients fill no bubbles and interleaved chunks wait for one another, and the closed form of the step's time
#: (``cost_models.step_time``) promises too much.
STEADY: Mapping[str, float] = {
    "interleaved_1f1b": 1.0, "zb_h1": 1.0, "zb_h2": 2.0, "zbv": 1.5, "v_half": 1.0, "dualpipev": 1.0,
}  # fmt: skip

#: Times the mean of all chunks that the longest must be at most if units are dealt out as evenly as can be. Chunks of
#: one and of two layers on the way down and up wait for each other, which the closed form does not see.
EVEN: Mapping[str, float] = {"zbv": 1.25, "v_half": 1.25, "dualpipev": 1.25}

#: Fewest pipeline ranks: on two V-Half holds as much as ZBV, whose ranks wait less.
FEWEST_RANKS: Mapping[str, int] = {"v_half": 3}

#: Schedules that are left out where another one can be tried: where gradients of inputs take no longer than two
#: forwards, ZBV's bubble of (p − 1)·I/2 is no longer than ZB-H2's of (p − 1)·F, in half of the memory.
INSTEAD: Mapping[str, str] = {"zb_h2": "zbv"}

#: Names of choices that are not those of a candidate's fields.
_FIELDS = {"micro_batch": "local_batch"}


@dataclass(frozen=True)
class Candidate:
    """One layout, micro-batch and schedule of a step; shardings, cuts, recompute and ZeRO are searched for each.

    Until its sharding is found, a candidate stands for all that differ in ``layout.zero_ranks`` alone.
    ``local_batch``: samples of one micro-batch on one device; ``chunks_per_rank``: chunks of the model a device holds.
    """

    layout: MeshLayout
    local_batch: int
    num_microbatches: int
    schedule: str
    chunks_per_rank: int

    @functools.cached_property
    def cut(self) -> Cut:
        pieces = self.layout.data * self.num_microbatches
        return Cut(pieces, self.layout.context, self.layout.tensor, self.layout.expert)

    @property
    def num_chunks(self) -> int:
        return self.layout.pipeline * self.chunks_per_rank

    @property
    def undivided(self) -> Candidate:
        """The same before it is said over how many data ranks ZeRO divides."""
        return replace(self, layout=replace(self.layout, zero_ranks=0)) if self.layout.zero_ranks else self

    def value_of(self, name: str) -> Any:
        """The candidate's value of one of the choices in ``demands.CHOICES`` (those that it decides)."""
        sizes = {EXPERT: 1, ZERO_RANKS: self.layout.zero_ranks, **self.layout.sizes}
        return sizes[name] if name in sizes else getattr(self, _FIELDS.get(name, name))

    def bound(self, seconds: float) -> float:
        """Lower bound of the step if one micro-batch takes ``seconds``, summed over the ranks of one pipeline.

        The busiest rank has at least its share, and where fill and drain are those of one-forward-one-backward the
        first micro-batch passes all ranks (see ``cost_models.step_time``).
        """
        ranks, m = self.layout.pipeline, self.num_microbatches
        row = SCHEDULES[self.schedule]
        if row.splits_backward:
            return seconds * m / ranks
        divisor = self.chunks_per_rank if row.divided else 1
        return seconds * ((m - 1 / divisor) / ranks + 1 / divisor)

    def __str__(self) -> str:
        pipeline = f", {self.schedule}" if self.layout.pipeline > 1 else ""
        if self.chunks_per_rank > 1:
            pipeline += f" with {self.chunks_per_rank} chunks a rank"
        return f"{self.layout}, {counted(self.num_microbatches, 'micro-batch')} of {self.local_batch}{pipeline}"


@dataclass(frozen=True)
class Family:
    """The candidates of one layout and micro-batch: they differ in schedule and chunks."""

    layout: MeshLayout
    local_batch: int
    num_microbatches: int
    num_units: int
    demands: Demands

    @property
    def plainest(self) -> Candidate:
        """A member in place of all; maybe none that the demands allow."""
        return Candidate(self.layout, self.local_batch, self.num_microbatches, "1f1b", 1)

    def bound(self, seconds: float) -> float:
        """Lower bound of the step of every member if one micro-batch takes ``seconds``."""
        return seconds * self.num_microbatches / self.layout.pipeline

    def __iter__(self) -> Iterator[Candidate]:
        yield from _schedules(self.layout, self.local_batch, self.num_microbatches, self.num_units, self.demands)


def families(
    cluster: Cluster,
    *,
    global_batch: int,
    num_units: int,
    demands: Demands,
    micro_batches: bool = True,
    num_experts: int = 1,
) -> Iterator[Family]:
    """All candidates that the demands allow, by layout and micro-batch; ``micro_batches`` False: only whole batches
    (samples are mixed).

    ``num_experts``: what an axis of experts must divide.
    """
    sizes = {axis: _allowed(axis, cluster.num_devices, demands) for axis in AXES}
    sizes[EXPERT] = frozenset(size for size in divisors(num_experts) if demands.allows(EXPERT, size))
    for layout in layouts(cluster, sizes):
        if (
            global_batch % layout.sample_groups
            or layout.pipeline > num_units
            or not demands.allows("order", layout.order)
            or not zero_sizes(cluster, layout, demands)
        ):
            continue
        for local_batch in divisors(global_batch // layout.sample_groups):
            m = global_batch // layout.sample_groups // local_batch
            if (m > 1 and not micro_batches) or not demands.allows("micro_batch", local_batch):
                continue
            if demands.allows("num_microbatches", m):
                yield Family(layout, local_batch, m, num_units, demands)


def zero_sizes(cluster: Cluster, layout: MeshLayout, demands: Demands) -> tuple[int, ...]:
    """Over how many neighbours of the data ranks ZeRO may divide in a layout: 0 (all of them) first, if allowed.

    Unless the user says, those within each level of links. With an axis of experts, neighbours of all its places, so
    that what one place holds is divided over as many groups as the rest.
    """
    group, fixed = layout.group, demands.fixed.get(ZERO_RANKS)
    is_all_allowed = (fixed is None or not fixed.isdisjoint((0, group))) and (
        demands.forbidden.get(ZERO_RANKS, frozenset()).isdisjoint((0, group))
    )
    everyone = (0,) if is_all_allowed else ()
    if not any(demands.among("zero", ZERO_STAGES)):
        return everyone  # ZeRO 0 divides nothing
    sizes = zero_groups(cluster, layout) if fixed is None else sorted(fixed)
    experts = layout.expert
    within = (size for size in sizes if experts < size < group and group % size == 0 and size % experts == 0)
    return (*everyone, *demands.among(ZERO_RANKS, within))


def candidates(cluster: Cluster, **options: Any) -> Iterator[Candidate]:
    """The members of all ``families``."""
    for family in families(cluster, **options):
        yield from family


def _allowed(axis: str, num_devices: int, demands: Demands) -> frozenset[int] | None:
    if axis not in demands.fixed and axis not in demands.forbidden:
        return None
    return frozenset(size for size in divisors(num_devices) if demands.allows(axis, size))


def _schedules(layout: MeshLayout, local_batch: int, m: int, num_units: int, demands: Demands) -> Iterator[Candidate]:
    if layout.pipeline == 1:
        if demands.left_out or _wants_pipeline(demands):
            return
        yield Candidate(layout, local_batch, m, "1f1b", 1)
        return
    for name in demands.among("schedule", SCHEDULES):
        row = SCHEDULES[name]
        counts = CHUNKS_PER_RANK if row.chunks_per_rank is None else (row.chunks_per_rank,)
        if "chunks_per_rank" in demands.fixed:
            counts = tuple(sorted(demands.fixed["chunks_per_rank"]))
        for chunks in demands.among("chunks_per_rank", counts):
            total = layout.pipeline * chunks
            if total > num_units or m < STEADY.get(name, 0.0) * layout.pipeline:
                continue
            if m > MOST_PLAYED and _plays_all(row):
                continue
            shape = {"num_ranks": layout.pipeline, "num_units": num_units, "num_chunks": total}
            if "schedule" not in demands.fixed and is_offered(name, **shape) == demands.left_out:
                continue
            if reason_not(name, num_ranks=layout.pipeline, num_microbatches=m, num_chunks=total) is None:
                yield Candidate(layout, local_batch, m, name, chunks)


def is_offered(schedule: str, *, num_ranks: int, num_units: int, num_chunks: int) -> bool:
    """Whether ``schedule`` is tried unasked: there are ranks enough, units divide evenly enough over the chunks, and no
    other one stands in its place."""
    if num_ranks < FEWEST_RANKS.get(schedule, 2):
        return False
    if schedule in INSTEAD:
        other = INSTEAD[schedule]
        others = num_ranks * (SCHEDULES[other].chunks_per_rank or 1)
        if others <= num_units and is_offered(other, num_ranks=num_ranks, num_units=num_units, num_chunks=others):
            return False
    return math.ceil(num_units / num_chunks) * num_chunks <= EVEN.get(schedule, math.inf) * num_units


def _plays_all(row: Schedule) -> bool:
    """Whether a schedule's price needs the order of every micro-batch; others have closed forms."""
    return row.played == math.inf or row.order is not None


def _wants_pipeline(demands: Demands) -> bool:
    """Whether the user fixes pp=1 together with what only a pipeline has."""
    fixed = demands.fixed
    if fixed.get(PIPELINE) != {1}:
        return False  # a schedule is meant for the plans that have a pipeline
    return "1f1b" not in fixed.get("schedule", ("1f1b",)) or 1 not in fixed.get("chunks_per_rank", (1,))
