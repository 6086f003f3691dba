"""The objective of a plan as a sum of prices: of every operator, every conversion, and of the step around them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cost_models import Cluster
from passes.ir.graph import Graph
from passes.plan import Plan
from planner.auditing.graph_walk import Charge
from planner.auditing.repriced_step import RepricedStep, reprice
from planner.inspection.objective_shares import objective_shares, seconds_at
from planner.whole_step.costs.step_prices import weight_share

#: How far the priced objective may be from the one that the plan states, relative.
TOLERANCE = 1e-6
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
_CARRY = "activations on their way to the host and back"
#: What else the backward pass of a layer takes: fields of ``LayerSeconds`` that a plan tells apart.
_BACKWARD_CAUSES: Mapping[str, str] = {
    "recompute": "computed again for the backward pass",
    "recommunicate": "collectives issued again for the backward pass",
    "accumulate": "gradients added over micro-batches",
    "carry_backward": _CARRY,
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
class ObjectiveLedger:
    """The objective as a sum.

    Attributes:
        objective: seconds, as priced here.
        charges: every operator and conversion with its part of the objective; ``rest``: all else, by cause.
        shares: by name of an operator, how often its seconds count; ``conversion_shares``: the same of conversions, by
            the name of the value.
        priced: the plan's step, priced.
    """

    objective: float
    charges: tuple[tuple[Charge, float], ...]
    rest: Mapping[str, float]
    shares: Mapping[str, UnitShares]
    priced: RepricedStep
    conversion_shares: Callable[[str], UnitShares]

    @property
    def total(self) -> float:
        """All prices together."""
        return sum(seconds for _, seconds in self.charges) + sum(self.rest.values())


def objective_ledger(graph: Graph, plan: Plan, cluster: Cluster) -> ObjectiveLedger:
    """Price ``plan`` on its ``graph``.

    Raises:
        ValueError: if the plan does not hold together, or has another objective than it states.
    """
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
        self.graph, self.plan, self.priced = graph, plan, priced
        self.nodes = {node.name: node for node in graph.nodes}
        self.values = graph.values
        self.rest: dict[str, float] = defaultdict(float)
        self.unit_shares: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for part, share in objective_shares(priced.step).items():
            if part.field in ("forward", "backward", "backward_weight"):
                self._layer(part.chunk, part.layer, part.field, share)
            else:
                self.rest[STEP_CAUSES[part.field]] += share * seconds_at(priced.step, part)

    def _layer(self, chunk: int, layer: int, field: str, share: float) -> None:
        """Give the seconds of a layer to its operators, and what is beside them to its causes."""
        costs = self.priced.step.chunks[chunk].layers[layer][0]
        units = self.priced.units
        if units is None:
            self.unit_shares[0][field == "backward"] += share
            return
        unit = self.priced.unit_of_layer[chunk][layer]
        parts = self.plan.step.chunks[chunk].parts[layer]
        forward, backward = units.seconds(unit)
        if field == "forward":
            self.unit_shares[unit][0] += share
            self.rest[_CARRY] += share * parts.carry_forward
            self.rest[_CONTENTION] += share * (costs.forward - forward - parts.carry_forward)
        elif field == "backward":
            self.unit_shares[unit][1] += share
            beside = {cause: getattr(parts, name) for name, cause in _BACKWARD_CAUSES.items()}
            for cause, seconds in beside.items():
                self.rest[cause] += share * seconds
            self.rest[_CONTENTION] += share * (costs.backward - backward - sum(beside.values()))
        else:
            self.unit_shares[unit][2] += share
            adding = costs.backward_weight - units.weight_seconds(unit)
            self.rest[_BACKWARD_CAUSES["accumulate"]] += share * adding

    def ledger(self) -> ObjectiveLedger:
        shares = {name: self._shares(self._unit_of(name)) for name in self.nodes}
        charges = tuple((charge, self._price(charge)) for charge in self.priced.walk.charges)
        rest = {cause: seconds for cause, seconds in self.rest.items() if seconds}
        return ObjectiveLedger(self.priced.seconds.total, charges, rest, shares, self.priced, self._conversion_shares)

    def _unit_of(self, name: str) -> int | None:
        units = self.priced.units
        return 0 if units is None else units.place.get(name, (None, 0))[0]

    def _shares(self, unit: int | None) -> UnitShares:
        """Of one of the unit's copies: what all copies count, by how many there are."""
        if unit is None:
            return UnitShares(0.0, 0.0, 0.0)
        copies = 1 if self.priced.units is None else self.priced.units.units[unit].count
        return UnitShares(*(share / copies for share in self.unit_shares[unit]))

    def _conversion_shares(self, value: str) -> UnitShares:
        """Of what a conversion of a value costs one copy of the unit that pays for it."""
        units = self.priced.units
        return self._shares(0 if units is None else units.payer(Charge(value)))

    def _price(self, charge: Charge) -> float:
        seconds = (charge.compute[0] + charge.communication[0], charge.compute[1] + charge.communication[1])
        units = self.priced.units
        if units is None:
            return self._shares(0).of(seconds)
        if charge.step is not None:
            return self._shares(units.payer(charge)).of(seconds)
        return self._shares(self._unit_of(charge.name)).of(seconds, weight_seconds=self.weight_seconds(charge))

    def weight_seconds(self, charge: Charge) -> float:
        """The part of an operator's backward that only makes gradients of parameters."""
        units = self.priced.units
        assert units is not None
        return charge.compute[1] * weight_share(self.nodes[charge.name], self.values, units.pricing.states)
