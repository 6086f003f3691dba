"""The objective of a plan as a sum of prices: of every operator, every conversion, and of the step around them.

On unequal devices an operator is priced on each kind that runs a copy of it, as often as these copies count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cost_models import Cluster
from passes.ir.graph import Graph
from passes.plan import Plan
from planner.auditing.graph_walk import Charge, GraphWalk
from planner.auditing.repriced_step import RepricedStep, reprice
from planner.auditing.unit_prices import PricedStage
from planner.inspection.objective_shares import objective_shares, seconds_at
from planner.inspection.simulated_step import check_parts
from planner.sharding_ilp.sharding_prices import Pricing
from planner.whole_step.costs.step_prices import weight_share

#: How far the priced objective may be from the one that the plan states, relative.
TOLERANCE = 1e-6
#: A cause of less than this share of the objective is what rounding leaves of a difference.
ROUNDING = 1e-12
#: What seconds of a layer or chunk are that belong to no operator, by field.
STEP_CAUSES: Mapping[str, str] = {
    "gather_forward": "gathers that compute does not hide",
    "gather_backward": "gathers that compute does not hide",
    "reduce_backward": "gradient reductions that compute does not hide",
    "reduce_step": "gradient reductions at the end of the step",
    "update_step": "optimizer",
    "gather_step": "updated parameters gathered",
    "receive_forward": "received from other stages",
    "receive_backward": "received from other stages",
}
_CONTENTION = "compute slowed by communication beside it"
_UNPACK = "gathered weights laid out whole"
_CARRY = "activations on their way to the host and back"
_HOST = "waiting for the host to launch operators"
#: What else the backward pass of a layer takes: fields of ``LayerSeconds`` that a plan tells apart.
_BACKWARD_CAUSES: Mapping[str, str] = {
    "recompute": "computed again for the backward pass",
    "recommunicate": "collectives issued again for the backward pass",
    "accumulate": "gradients copied and added up",
    "unpack_backward": _UNPACK,
    "carry_backward": _CARRY,
    "host_backward": _HOST,
}


@dataclass(frozen=True)
class UnitShares:
    """How often a second of an operator counts in the objective: forward, backward, and of weight gradients again."""

    forward: float
    backward: float
    weight: float

    def of(self, seconds: tuple[float, float], *, weight_seconds: float = 0.0) -> float:
        """The part of the objective that is these seconds, forward and backward."""
        return self.forward * seconds[0] + self.backward * seconds[1] + self.weight * weight_seconds


@dataclass(frozen=True)
class StageShares:
    """Of devices that are alike: their pipeline ranks, the prices on them, and how often those count.

    Attributes:
        ranks: pipeline ranks; ``name``: of the devices, empty where all are alike.
        walk, pricing: of the whole model on such devices.
        shares: by name of an operator, how often its seconds count; ``conversion_shares``: the same of conversions, by
            the name of the value.
        copies: by name of an operator, the share of its unit's copies that run here.
    """

    ranks: tuple[int, ...]
    name: str
    walk: GraphWalk
    pricing: Pricing | None
    shares: Mapping[str, UnitShares]
    conversion_shares: Callable[[str], UnitShares]
    copies: Mapping[str, float]


@dataclass(frozen=True)
class ObjectiveLedger:
    """The objective as a sum.

    Attributes:
        objective: seconds, as priced here.
        charges: every operator and conversion with its part of the objective; ``by_stage``: the same parts on each of
            ``stages``; ``rest``: all else, by cause.
        stages: one for each kind of devices that pipeline ranks have.
        priced: the plan's step, priced.
    """

    objective: float
    charges: tuple[tuple[Charge, float], ...]
    by_stage: tuple[tuple[float, ...], ...]
    rest: Mapping[str, float]
    stages: tuple[StageShares, ...]
    priced: RepricedStep

    @property
    def total(self) -> float:
        """All prices together."""
        return sum(seconds for _, seconds in self.charges) + sum(self.rest.values())


def objective_ledger(graph: Graph, plan: Plan, cluster: Cluster) -> ObjectiveLedger:
    """Price ``plan`` on its ``graph``.

    Raises:
        ValueError: if the plan does not hold together, or has another objective than it states.
    """
    check_parts(plan)
    priced = reprice(graph, plan, cluster)
    stated = plan.certificate.objective
    if abs(priced.seconds.total - stated) > TOLERANCE * max(stated, priced.seconds.total):
        raise ValueError(
            f"the plan states an objective of {stated:.9g} s, its parts take {priced.seconds.total:.9g} s: the file "
            "was changed, or written by another version; plan again"
        )
    return _Ledger(graph, plan, priced).ledger()


class _Ledger:
    def __init__(self, graph: Graph, plan: Plan, priced: RepricedStep) -> None:
        self.plan, self.priced = plan, priced
        on_ranks = priced.on_ranks or (PricedStage(priced.walk, priced.units),) * priced.step.num_ranks
        #: One for each kind of devices; the index of a rank's among them.
        self.stages = [_StageLedger(graph, stage) for stage in dict.fromkeys(on_ranks)]
        self.stage_of = [list(dict.fromkeys(on_ranks)).index(stage) for stage in on_ranks]
        self.rest: dict[str, float] = defaultdict(float)
        for part, share in objective_shares(priced.step).items():
            if part.field in ("forward", "backward", "backward_weight"):
                self._layer(part.chunk, part.layer, part.field, share)
            else:
                self.rest[STEP_CAUSES[part.field]] += share * seconds_at(priced.step, part)
        if priced.units is not None:
            self._count_copies()

    def _stage(self, chunk: int) -> _StageLedger:
        """Of the devices that run a chunk."""
        return self.stages[self.stage_of[self.plan.step.chunks[chunk].rank]]

    def _layer(self, chunk: int, layer: int, field: str, share: float) -> None:
        """Give the seconds of a layer to its operators, and what is beside them to its causes."""
        costs = self.priced.step.chunks[chunk].layers[layer][0]
        stage = self._stage(chunk)
        if stage.units is None:
            stage.unit_shares[0][field == "backward"] += share
            return
        unit = self.priced.unit_of_layer[chunk][layer]
        parts = self.plan.step.chunks[chunk].parts[layer]
        forward, backward = stage.units.seconds(unit)
        if field == "forward":
            stage.unit_shares[unit][0] += share
            beside = {_CARRY: parts.carry_forward, _UNPACK: parts.unpack_forward, _HOST: parts.host_forward}
            for cause, seconds in beside.items():
                self.rest[cause] += share * seconds
            self.rest[_CONTENTION] += share * (costs.forward - forward - sum(beside.values()))
        elif field == "backward":
            stage.unit_shares[unit][1] += share
            beside = {cause: getattr(parts, name) for name, cause in _BACKWARD_CAUSES.items()}
            for cause, seconds in beside.items():
                self.rest[cause] += share * seconds
            self.rest[_CONTENTION] += share * (costs.backward - backward - sum(beside.values()))
        else:
            stage.unit_shares[unit][2] += share
            adding = costs.backward_weight - stage.units.weight_seconds(unit)
            self.rest[_BACKWARD_CAUSES["accumulate"]] += share * adding

    def _count_copies(self) -> None:
        for chunk, units in enumerate(self.priced.unit_of_layer):
            for layer, unit in enumerate(units):
                self._stage(chunk).unit_copies[unit] += self.priced.step.chunks[chunk].layers[layer][1]

    def ledger(self) -> ObjectiveLedger:
        by_stage = tuple(zip(*(map(stage.price, stage.walk.charges) for stage in self.stages), strict=True))
        charges = tuple((charge, sum(parts)) for charge, parts in zip(self.priced.walk.charges, by_stage, strict=True))
        least = ROUNDING * self.priced.seconds.total
        rest = {cause: seconds for cause, seconds in self.rest.items() if abs(seconds) > least}
        stages = tuple(stage.result(*self._devices(index)) for index, stage in enumerate(self.stages))
        return ObjectiveLedger(self.priced.seconds.total, charges, by_stage, rest, stages, self.priced)

    def _devices(self, stage: int) -> tuple[tuple[int, ...], str]:
        """The pipeline ranks of a stage, and the name of their devices where not all are alike."""
        ranks = tuple(rank for rank, index in enumerate(self.stage_of) if index == stage)
        named = self.plan.step.stage_devices
        return ranks, named[ranks[0]].name if named else ""


class _StageLedger:
    """What counts on devices that are alike."""

    def __init__(self, graph: Graph, stage: PricedStage) -> None:
        self.nodes, self.values = {node.name: node for node in graph.nodes}, graph.values
        self.walk, self.units = stage.walk, stage.units
        self.unit_shares: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.unit_copies: dict[int, int] = defaultdict(int)

    def result(self, ranks: tuple[int, ...], name: str) -> StageShares:
        shares = {node: self._shares(self._unit_of(node)) for node in self.nodes}
        copies = {node: self._share_of_copies(self._unit_of(node)) for node in self.nodes}
        pricing = None if self.units is None else self.units.pricing
        return StageShares(ranks, name, self.walk, pricing, shares, self._conversion_shares, copies)

    def _unit_of(self, name: str) -> int | None:
        return 0 if self.units is None else self.units.place.get(name, (None, 0))[0]

    def _share_of_copies(self, unit: int | None) -> float:
        if self.units is None:
            return 1.0
        return 0.0 if unit is None else self.unit_copies[unit] / self.units.units[unit].count

    def _shares(self, unit: int | None) -> UnitShares:
        """Of one of the unit's copies: what all copies count, by how many there are."""
        if unit is None:
            return UnitShares(0.0, 0.0, 0.0)
        copies = 1 if self.units is None else self.units.units[unit].count
        return UnitShares(*(share / copies for share in self.unit_shares[unit]))

    def _conversion_shares(self, value: str) -> UnitShares:
        """Of what a conversion of a value costs one copy of the unit that pays for it."""
        return self._shares(0 if self.units is None else self.units.payer(Charge(value)))

    def price(self, charge: Charge) -> float:
        """The part of the objective that an operator or conversion is on these devices."""
        seconds = (charge.compute[0] + charge.communication[0], charge.compute[1] + charge.communication[1])
        if self.units is None:
            return self._shares(0).of(seconds)
        if charge.step is not None:
            return self._shares(self.units.payer(charge)).of(seconds)
        return self._shares(self._unit_of(charge.name)).of(seconds, weight_seconds=self._weight_seconds(charge))

    def _weight_seconds(self, charge: Charge) -> float:
        """The part of an operator's backward that only makes gradients of parameters."""
        assert self.units is not None
        return charge.compute[1] * weight_share(self.nodes[charge.name], self.values, self.units.pricing.states)
