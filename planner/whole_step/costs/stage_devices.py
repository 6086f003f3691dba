r"""Level 1 on unequal devices: one sharding for all stages, priced on the devices of each; and bounds for all layouts.

A stage computes with the figures of its ranks' kind of device (of several: of the slowest) on the links of that kind
(``cost_models.unequal_devices``). All stages run the same sharding, which ``repriced`` prices on each.

Bounds and the choice of the sharding take *weighted* seconds. Let f(d) be the share of the devices that are of kind d,
t(u,d) the seconds of operator u there, and μ(d) ≥ 0 weights with

    Σ_d f(d)·μ(d) = 1

Let rank r of p have the share w(r,d) of its devices of kind d; stages are equally large, so Σ_r w(r,d) = p·f(d). All
its devices wait for the slowest: load(r) ≥ Σ_{u on r} t(u,d) for every d with w(r,d) > 0, so

    p·L = Σ_r Σ_d w(r,d)·μ(d)·L ≥ Σ_r Σ_d w(r,d)·μ(d)·load(r) ≥ Σ_u min_d μ(d)·t(u,d)                      (weighted)

So with every operator and collective at the least of its weighted seconds, the seconds of a micro-batch bound p times
the largest load as they do where devices are alike, whatever the cuts and wherever the kinds lie. The sum of loads,
which fills the pipeline, is at least Σ_u min_d t(u,d), no less than that divided by max_d μ(d). Any weights are right;
those in proportion to the kinds' speeds (``WeightedLevelOne``) make all kinds equally busy, where the bound is best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from cost_models import Cluster, CostModel
from cost_models.efficiency import ANY_ROWS, MatmulShape
from cost_models.unequal_devices import device_kinds, kinds_of_stages, view
from passes.rules.rule import pieces_of_work
from planner.sharding_ilp.assignment import Conversion
from planner.sharding_ilp.options import Option
from planner.sharding_ilp.sharding_prices import Pricing
from planner.sharding_ilp.sharding_problem import Element, ValueStream
from planner.sharding_ilp.shared_rows import share_rows
from planner.whole_step.candidates.mesh_layout import Links, MeshLayout, sample_link
from planner.whole_step.costs.batch_prices import BatchPrices
from planner.whole_step.costs.level_one import LevelOne, Sharded
from planner.whole_step.costs.sharding import Cut, ShardingSpace
from planner.whole_step.costs.step_prices import PIPELINE, StepPricing
from planner.whole_step.costs.unit_costs import StepUnits


class StageDevices:
    """The kinds of a cluster's devices, and prices as stages on them see them; a stage is a set of indices of kinds."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.kinds = cluster, device_kinds(cluster)
        self._views: dict[frozenset[int], Cluster] = {}
        self._links: dict[tuple[MeshLayout, frozenset[int]], Links] = {}

    def of_stages(self, layout: MeshLayout) -> tuple[frozenset[int], ...]:
        """The kinds that each pipeline rank's devices are of."""
        return kinds_of_stages(self.kinds, num_stages=layout.pipeline, stride=layout.stride(PIPELINE))

    def seen_from(self, stage: frozenset[int]) -> Cluster:
        """The cluster as devices of these kinds see it."""
        if stage not in self._views:
            self._views[stage] = view(self.cluster, self.kinds, stage)
        return self._views[stage]

    def links(self, layout: MeshLayout, stage: frozenset[int]) -> Links:
        """Prices of a layout on a stage of these kinds."""
        if (layout, stage) not in self._links:
            self._links[layout, stage] = Links.of(self.seen_from(stage), layout)
        return self._links[layout, stage]

    def usable_bytes(self, stage: Collection[int]) -> float:
        """Memory that tensors can use on each device of a stage of these kinds."""
        return min(self.kinds[index].device.usable_bytes for index in stage)

    def name(self, stage: Collection[int]) -> str:
        """The devices of a stage, for people."""
        return " + ".join(dict.fromkeys(self.kinds[index].device.name for index in sorted(stage)))


class CombinedCostModel(CostModel):
    """The weighted seconds of several kinds of stages together: the least of them, see (weighted), or their sum."""

    def __init__(
        self,
        cluster: Cluster,
        axes: Mapping[str, int],
        views: Sequence[Cluster],
        weights: Sequence[float],
        *,
        together: Callable[[Iterable[float]], float],
    ) -> None:
        super().__init__(cluster, axes)
        self._kinds = [(CostModel(seen, axes), weight) for seen, weight in zip(views, weights, strict=True)]
        self._together = together

    @property
    def host_seconds(self) -> float:
        """None: weighted seconds are of the devices alone."""
        return 0.0

    def compute_seconds(
        self,
        *,
        flops: float,
        num_bytes: float,
        dtype: str,
        kind: str | None = None,
        shape: MatmulShape | None = None,
        row_step: int = ANY_ROWS,
    ) -> float:
        """The weighted seconds of one operator."""
        return self._together(
            weight
            * prices.compute_seconds(
                flops=flops, num_bytes=num_bytes, dtype=dtype, kind=kind, shape=shape, row_step=row_step
            )
            for prices, weight in self._kinds
        )

    def collective_seconds(
        self, collective: str, *, num_bytes: float, axis: str, algorithm: str | None = None
    ) -> float:
        """The weighted seconds of one collective."""
        return self._together(
            weight * prices.collective_seconds(collective, num_bytes=num_bytes, axis=axis, algorithm=algorithm)
            for prices, weight in self._kinds
        )


class WeightedLevelOne(LevelOne):
    """Level 1 in weighted seconds. ``weights`` are μ by kind: in proportion to how fast each computes one sample."""

    def __init__(
        self,
        cluster: Cluster,
        space: ShardingSpace,
        step_units: StepUnits,
        *,
        devices: StageDevices | None = None,
        weights: tuple[float, ...] = (),
    ) -> None:
        super().__init__(cluster, space, step_units)
        self.devices = StageDevices(cluster) if devices is None else devices
        self._views = [self.devices.seen_from(frozenset((index,))) for index in range(len(self.devices.kinds))]
        self.weights = weights or self._weights()
        self._mixed: dict[tuple[object, ...], LevelOne] = {}

    def _weights(self) -> tuple[float, ...]:
        seconds = [self._sample_seconds(seen) for seen in self._views]
        if not all(0.0 < each < math.inf for each in seconds):
            return (1.0,) * len(seconds)
        shares = [kind.count / self.cluster.num_devices for kind in self.devices.kinds]
        total = sum(share / each for share, each in zip(shares, seconds))
        return tuple(1.0 / each / total for each in seconds)

    def _sample_seconds(self, seen: Cluster) -> float:
        level_one = LevelOne(seen, self.space, self.step_units)
        sharded = level_one.alone(Cut(self.global_batch))
        self.solved += level_one.solved
        return math.inf if sharded is None else sharded.without_samples

    @cached_property
    def without_experts(self) -> LevelOne:
        """The same at no cost for all that an axis of experts divides otherwise than a data axis."""
        space = replace(self.space, without_experts=True)
        return WeightedLevelOne(self.cluster, space, self.step_units, devices=self.devices, weights=self.weights)

    def _priced(self, layout: MeshLayout) -> Links:
        samples = [sample_link(seen) for seen in self._views]
        weighted = [(weight * link[0], link[1] / weight) for link, weight in zip(samples, self.weights)]
        least = min(latency for latency, _ in weighted), max(bandwidth for _, bandwidth in weighted)
        return Links.made_by(
            lambda axes: CombinedCostModel(self.cluster, axes, self._views, self.weights, together=min), least, layout
        )

    def mixed(self, weights: Mapping[frozenset[int], float]) -> LevelOne:
        """Level 1 in the sum of the seconds of stages of these kinds, so often as ``weights`` says."""
        key = tuple(sorted((tuple(sorted(stage)), weight) for stage, weight in weights.items()))
        if key not in self._mixed:
            self._mixed[key] = MixedLevelOne(self, weights)
        return self._mixed[key]

    @property
    def num_programs(self) -> int:
        """Sharding ILPs that were solved, in all seconds."""
        return super().num_programs + sum(mixed.solved for mixed in self._mixed.values())


class MixedLevelOne(LevelOne):
    """Level 1 in a sum of the seconds of several kinds of stages, or in those of one, whose weight is 1.

    With both axes the context axis does what it does alone in weighted seconds, so that all choose from the same.
    """

    def __init__(self, weighted: WeightedLevelOne, weights: Mapping[frozenset[int], float]) -> None:
        super().__init__(weighted.cluster, weighted.space, weighted.step_units)
        self._weighted, self._stages, self._weights = weighted, tuple(weights), tuple(weights.values())
        self._views = [weighted.devices.seen_from(stage) for stage in weights]

    def _along(self, cut: Cut) -> Sharded | None:
        return self._weighted.alone(cut._replace(tensor=1))

    def _priced(self, layout: MeshLayout) -> Links:
        if len(self._stages) == 1:
            return self._weighted.devices.links(layout, self._stages[0])
        samples = [sample_link(seen) for seen in self._views]
        latency = sum(weight * link[0] for link, weight in zip(samples, self._weights))
        bandwidth = 1.0 / sum(weight / link[1] for link, weight in zip(samples, self._weights))
        return Links.made_by(
            lambda axes: CombinedCostModel(self.cluster, axes, self._views, self._weights, together=sum),
            (latency, bandwidth),
            layout,
        )


def level_one_of(cluster: Cluster, space: ShardingSpace, step_units: StepUnits) -> LevelOne:
    """Level 1 of a model on a cluster, in weighted seconds if its devices are unequal."""
    kind = WeightedLevelOne if cluster.has_unequal_devices else LevelOne
    return kind(cluster, space, step_units)


def repriced(sharded: Sharded, prices: BatchPrices) -> Sharded:
    """The same sharding, its operators and conversions at other prices."""
    space, variant = sharded.space, sharded.variant
    pricing = StepPricing(
        prices, variant.cut.mesh, states=space.states, fusion=space.fusion, unconverted=space.unconverted,
        unpriced=space.unpriced,
    )  # fmt: skip
    elements, streams, assignment = variant.problem.elements, variant.problem.streams, variant.assignment
    alone = {name: option_at(space, pricing, elements[name], option) for name, option in assignment.options.items()}
    problem = replace(variant.problem, overlap_slowdown=pricing.overlap_slowdown)
    options = share_rows(problem, alone)
    trees = {
        name: tuple(conversion_at(pricing, streams[name], item) for item in tree)
        for name, tree in assignment.trees.items()
    }
    seconds = sum(elements[name].copies * option.seconds for name, option in options.items())
    seconds += sum(
        item.copies * item.arc.forward + item.backward_copies * item.arc.backward
        for tree in trees.values()
        for item in tree
    )
    assignment = replace(assignment, options=options, trees=trees, seconds=seconds)
    return replace(sharded, variant=replace(variant, pricing=pricing, assignment=assignment, slack=0.0))


def option_at(space: ShardingSpace, pricing: Pricing, element: Element, option: Option) -> Option:
    """An option at other prices; what it exchanges is its own."""
    node = element.node
    if element.kind != "op" or node is None:
        return option
    mesh, (rule, flops) = pricing.mesh, space.offers.facts(node)
    labels = {name: label for name, label, size in zip(mesh.names, option.labels, mesh.sizes) if size > 1}
    ways = space.offers.ways(node, mesh, fixed=labels)
    way = next(each for each in ways if (each.inputs, each.outputs) == (option.inputs, option.outputs))
    live = node.name in space.live
    cut = pieces_of_work(rule, way.joint, mesh.sizes)
    compute = pricing.compute(node, space.offers.values, option.inputs, option.outputs, flops=flops, cut=cut, live=live)
    return replace(
        option,
        compute=compute,
        collectives=pricing.reductions(rule, way.joint, beside=compute, live=live),
        sent=pricing.sent(rule, way.joint, live=live) if option.sent else (),
        shared=(),
    )


def conversion_at(pricing: Pricing, stream: ValueStream, item: Conversion) -> Conversion:
    """A conversion at other prices."""
    forward, backward = pricing.step(item.arc.step, stream.value)
    live = any(use.live for use in stream.uses)
    return replace(item, arc=item.arc._replace(forward=forward, backward=backward if live else 0.0))
