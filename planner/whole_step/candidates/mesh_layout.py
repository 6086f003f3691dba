"""Mesh shapes: how many ways of pipeline, data, context and tensor parallelism, and in which order they lie on ranks.

The order says which link level an axis runs on: ranks are numbered node after node, and the last axis joins
neighbours. Two orders in which every axis crosses the same links are one layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from cost_models import Cluster, CostModel
from cost_models.hardware import placement
from planner.whole_step.costs.step_prices import CONTEXT, DATA, EXPERT, PIPELINE, TENSOR

AXES = (PIPELINE, DATA, EXPERT, CONTEXT, TENSOR)
#: Axes that tensors are typed on.
TENSOR_AXES = AXES[1:]
#: The axis of groups that hold the same pieces, in the prices of hybrid sharding.
REPLICAS = "replicas"
#: Orders that are tried, outermost axis first. The tensor axis, which talks most and must be waited for, is innermost;
#: data and context stay together, since gradients are reduced over both; a context axis is tried in the first only.
#: An axis of experts lies just inside of the context axis, so that tokens are exchanged between neighbours.
ORDERS = (
    (PIPELINE, DATA, CONTEXT, TENSOR),
    (DATA, CONTEXT, PIPELINE, TENSOR),
)


@dataclass(frozen=True)
class MeshLayout:
    """Sizes of the axes and their order, outermost first.

    ``zero_ranks``: over how many neighbours of ``group`` ZeRO divides (``StepPlan.zero_ranks``); 0: over all. Those of
    one place on the axis of experts are as many neighbours of ``expert_group``.
    """

    pipeline: int
    data: int
    context: int
    tensor: int
    order: tuple[str, ...] = field(default=ORDERS[0])
    expert: int = 1
    zero_ranks: int = 0

    @classmethod
    def of_sizes(cls, sizes: Mapping[str, int], *, zero_ranks: int = 0) -> MeshLayout:
        """The layout whose ``sizes`` these are, as a plan has them."""
        order = tuple(axis for axis in sizes if axis != EXPERT)
        pipeline, data, context, tensor = (sizes[axis] for axis in (PIPELINE, DATA, CONTEXT, TENSOR))
        return cls(pipeline, data, context, tensor, order, sizes.get(EXPERT, 1), zero_ranks)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Worked out once: a search looks up by its layouts a hundred thousand times. Of numbers alone, as texts hash
        differently in every process."""
        return hash((self.pipeline, self.data, self.context, self.tensor, self.expert, self.zero_ranks))

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Axis → size, in mesh order; that of experts only where it has several devices."""
        by_name = {PIPELINE: self.pipeline, DATA: self.data, CONTEXT: self.context, TENSOR: self.tensor}
        sizes: dict[str, int] = {}
        for axis in self.order:
            sizes[axis] = by_name[axis]
            if axis == CONTEXT and self.expert > 1:
                sizes[EXPERT] = self.expert
        return sizes

    @property
    def dense_sizes(self) -> tuple[int, int, int]:
        """Sizes of the axes beside those of data and experts."""
        return self.pipeline, self.context, self.tensor

    @property
    def num_parts(self) -> int:
        """Parts that an operator can be cut into, beside the batch."""
        return self.context * self.tensor * self.expert

    @property
    def num_devices(self) -> int:
        return self.pipeline * self.group * self.tensor

    @property
    def group(self) -> int:
        """Devices that hold the same parameters, experts apart: data, context and expert axes together."""
        return self.expert_group * self.expert

    @property
    def expert_group(self) -> int:
        """Devices that hold the same experts: data and context together."""
        return self.data * self.context

    def group_of(self, *, expert: bool) -> int:
        """Devices that hold the same parameters, of experts or of the rest."""
        return self.expert_group if expert else self.group

    def piece_ranks(self, *, expert: bool) -> int:
        """Over how many of those ZeRO divides their state."""
        return self.zero_ranks // (self.expert if expert else 1) or self.group_of(expert=expert)

    @property
    def num_replicas(self) -> int:
        """How many devices hold the same pieces of it."""
        return self.group // self.zero_ranks if self.zero_ranks else 1

    @property
    def sample_groups(self) -> int:
        """Into how many parts the samples of a micro-batch are divided."""
        return self.data * self.expert

    def stride(self, axis: str) -> int:
        sizes = self.sizes
        names = list(sizes)
        return math.prod(sizes[name] for name in names[names.index(axis) + 1 :])

    def __str__(self) -> str:
        axes = " × ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "one device"
        return f"{axes}, ZeRO over {self.zero_ranks}" if self.zero_ranks else axes


@dataclass(frozen=True)
class Links:
    """Prices of one layout.

    Attributes:
        axes: of every axis by itself.
        group: of data, context and expert axes as one axis (``dp``).
        expert_group: of data and context as one axis.
        pieces: of ``group`` as two axes: ``dp``, over which ZeRO divides, and around it ``REPLICAS``.
        expert_pieces: of ``expert_group`` in the same way.
        samples: (latency, bandwidth) of what is summed over all samples (a loss, statistics): the outermost links,
            wherever the data axis lies, so that shardings found for one layout serve others; free where nothing is
            divided.
    """

    axes: CostModel
    group: CostModel
    samples: tuple[float, float]
    expert_group: CostModel
    pieces: CostModel
    expert_pieces: CostModel

    @staticmethod
    def of(cluster: Cluster, layout: MeshLayout) -> Links:
        return Links.made_by(functools.partial(CostModel, cluster), sample_link(cluster), layout)

    @staticmethod
    def made_by(
        cost_model: Callable[[dict[str, int]], CostModel], sample_link: tuple[float, float], layout: MeshLayout
    ) -> Links:
        """The links with the prices that ``cost_model`` makes for axis sizes; ``sample_link``: see ``samples``."""
        samples = sample_link if layout.group > 1 else (0.0, math.inf)
        merged = _merged(layout, (DATA, CONTEXT, EXPERT))
        group = cost_model(merged)
        pieces = cost_model(_in_replicas(merged, layout.zero_ranks)) if layout.zero_ranks else group
        if layout.expert == 1:
            return Links(cost_model(layout.sizes), group, samples, group, pieces, pieces)
        merged = _merged(layout, (DATA, CONTEXT))
        of_experts = expert_pieces = cost_model(merged)
        if layout.zero_ranks:
            expert_pieces = cost_model(_in_replicas(merged, layout.piece_ranks(expert=True)))
        return Links(cost_model(layout.sizes), group, samples, of_experts, pieces, expert_pieces)


def sample_link(cluster: Cluster) -> tuple[float, float]:
    """(latency, bandwidth) of the outermost links."""
    return cluster.levels[-1].slowest_link(cluster.num_devices)


def _merged(layout: MeshLayout, axes: Collection[str]) -> dict[str, int]:
    """Axis → size, with ``axes`` (which stand side by side) as one, ``dp``."""
    merged: dict[str, int] = {}
    for axis, size in layout.sizes.items():
        name = DATA if axis in axes else axis
        merged[name] = merged.get(name, 1) * size
    return merged


def _in_replicas(merged: Mapping[str, int], zero_ranks: int) -> dict[str, int]:
    """``merged`` with its data axis as one of ``zero_ranks`` neighbours inside one of replicas."""
    split: dict[str, int] = {}
    for axis, size in merged.items():
        split.update({REPLICAS: size // zero_ranks, DATA: zero_ranks} if axis == DATA else {axis: size})
    return split


def zero_groups(cluster: Cluster, layout: MeshLayout) -> tuple[int, ...]:
    """Over how many neighbours of the data ranks ZeRO may divide beside all: those within each level of links."""
    if layout.expert > 1:
        return ()  # those that experts divide over too, a user may name
    stride = layout.stride(CONTEXT)
    inner = [level.group_size // stride for level in cluster.levels[:-1] if level.group_size % stride == 0]
    return tuple(dict.fromkeys(size for size in inner if 1 < size < layout.group and layout.group % size == 0))


def layouts(cluster: Cluster, allowed: Mapping[str, frozenset[int] | None]) -> Iterator[MeshLayout]:
    """Every layout over all devices of ``cluster`` whose axis sizes are allowed (None: any), one per set of links."""
    total = cluster.num_devices
    seen: set[tuple[object, ...]] = set()
    for pipeline, data, expert, context, tensor in _factorings(total, [allowed.get(axis) for axis in AXES]):
        for order in ORDERS[:1] if context > 1 else ORDERS:
            layout = MeshLayout(pipeline, data, context, tensor, order, expert)
            key = (pipeline, data, expert, context, tensor, *_crossings(cluster, layout))
            if key not in seen:
                seen.add(key)
                yield layout


def _factorings(total: int, allowed: list[frozenset[int] | None]) -> Iterator[tuple[int, ...]]:
    """Ways to write ``total`` as a product of allowed sizes, one per axis."""
    if len(allowed) == 1:
        if allowed[0] is None or total in allowed[0]:
            yield (total,)
        return
    for size in divisors(total):
        if allowed[0] is None or size in allowed[0]:
            for rest in _factorings(total // size, allowed[1:]):
                yield (size, *rest)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _crossings(cluster: Cluster, layout: MeshLayout) -> Iterator[tuple[object, ...]]:
    """For every axis, the levels it crosses and how it lies on them: what its prices depend on."""
    sizes = layout.sizes
    for axis in (PIPELINE, TENSOR, DATA, CONTEXT, EXPERT):
        if sizes.get(axis, 1) == 1:
            yield (axis,)
            continue
        stride = layout.stride(axis)
        places = placement(cluster.levels, stride=stride, size=sizes[axis])
        yield (axis, *((name, min(sizes[axis], max(1, count)), step) for name, count, step in places))
