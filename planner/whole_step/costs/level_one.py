"""Shardings and their figures for any cut, computed on demand and cached."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

from cost_models import Cluster
from cost_models.cost_model import BestPlacedCostModel
from cost_models.hardware import placement
from cost_models.routes import Span, route
from planner.sharding_ilp.lattice import Lattice, LatticePool
from planner.sharding_ilp.model_figures import batch_size_of
from planner.whole_step.candidates.mesh_layout import Links, MeshLayout
from planner.whole_step.costs.batch_prices import BatchPrices
from planner.whole_step.costs.least_units import least_of_units
from planner.whole_step.costs.sharding import Cut, Shardings, ShardingSpace, Variant, least_of_experts
from planner.whole_step.costs.split_fills import PhaseSeconds, sharded_seconds
from planner.whole_step.costs.step_prices import CONTEXT, DATA, EXPERT, TENSOR, ComputeTable
from planner.whole_step.costs.unit_costs import StepUnits, unit_figures
from planner.whole_step.costs.unit_figures import UnitFigures


@dataclass(frozen=True)
class Sharded:
    """One variant with what every unit costs under it."""

    space: ShardingSpace
    step_units: StepUnits
    variant: Variant

    @property
    def seconds(self) -> float:
        """Of one micro-batch, forward and backward, all units."""
        return self.variant.assignment.seconds

    @property
    def least_seconds(self) -> float:
        """Of one micro-batch under any sharding of the same cut."""
        return self.seconds - self.variant.slack

    @functools.cached_property
    def without_samples(self) -> float:
        """``least_seconds`` without sums over all samples, which layouts without data parallelism do not have."""
        trees, problem = self.variant.assignment.trees, self.variant.problem
        axis = problem.mesh.names.index(DATA)
        return self.least_seconds - sum(
            item.copies * item.arc.forward + item.backward_copies * item.arc.backward
            for tree in trees.values()
            for item in tree
            if item.arc.step.axis == axis
        )

    @functools.cached_property
    def communication(self) -> float:
        """The part of ``seconds`` that is spent on collectives."""
        return self.seconds - sum(
            element.copies * sum(self.variant.assignment.options[name].compute)
            for name, element in self.variant.problem.elements.items()
        )

    @property
    def between(self) -> float:
        """Seconds of collectives without sums over all samples."""
        return self.communication - (self.seconds - self.without_samples)

    @functools.cached_property
    def figures(self) -> tuple[UnitFigures, ...]:
        """Of every unit, in model order."""
        return unit_figures(self.space, self.step_units, self.variant)

    @functools.cached_property
    def has_tied_weights(self) -> bool:
        """Whether several units use one parameter."""
        return any(len(weight.uses) > 1 for figures in self.figures for weight in figures.weights)

    def is_same(self, other: Sharded) -> bool:
        """Whether every unit costs the same under another sharding of the same cut; equal assignments tell sooner."""
        if self.seconds != other.seconds:
            return False
        one, two = self.variant, other.variant
        return (one.assignment == two.assignment and one.along is two.along) or self.figures == other.figures

    @functools.cached_property
    def by_phase(self) -> PhaseSeconds:
        """Seconds of one micro-batch in all units, by phase."""
        return sharded_seconds(self.figures)


def batch_prices(links: Links, *, mixes: bool) -> BatchPrices:
    """Prices of one micro-batch on these links; ``mixes``: the whole batch is there at once."""
    latency, bandwidth = links.samples
    several = [axis for axis, size in links.axes.axes.items() if size > 1]
    return BatchPrices(links.axes, sample_latency=latency, sample_bandwidth=bandwidth, mixes=mixes, axes=several)


@dataclass
class LevelOne:
    """Level 1 of one model on one cluster. ``solved`` counts the sharding ILPs, but those of ``without_experts``."""

    cluster: Cluster
    space: ShardingSpace
    step_units: StepUnits
    solved: int = 0
    _shardings: dict[tuple[object, ...], Shardings | None] = field(default_factory=dict)
    _sharded: dict[tuple[object, ...], Sharded | None] = field(default_factory=dict)
    _alone: dict[Cut, Sharded | None] = field(default_factory=dict)
    _beside: dict[tuple[object, ...], float] = field(default_factory=dict)
    _links: dict[MeshLayout, Links] = field(default_factory=dict)
    _of_units: dict[tuple[object, ...], tuple[float, ...] | None] = field(default_factory=dict)
    #: Lattices of parameters, by all of a cut but into how many pieces the batch is cut.
    _of_states: dict[tuple[object, ...], dict[tuple[object, ...], Lattice]] = field(default_factory=dict)
    #: Seconds of operators on the cluster's devices, which are the same on all layouts.
    _computed: ComputeTable = field(default_factory=dict)
    #: Lattices of values whose steps cost the same, whatever the cut.
    _pool: LatticePool = field(default_factory=LatticePool)
    _places: dict[tuple[int, int], tuple[object, ...]] = field(default_factory=dict)
    #: Routes of axes, numbered: axes on equal routes are priced alike, however far apart their devices are.
    _routes: dict[tuple[Span, ...], int] = field(default_factory=dict)

    @property
    def global_batch(self) -> int:
        return batch_size_of(self.space.graph)

    @property
    def micro_batches(self) -> bool:
        """Whether the model can be run in micro-batches: outputs for a loss of the caller's are of a whole batch."""
        return not self.space.followed.mixing and self.space.graph.loss is not None

    def forward_passes(self, num_microbatches: int) -> int:
        """How often a step computes forward: see ``StepPlan.forward_passes``."""
        return 2 if num_microbatches > 1 and self.space.followed.counted_ahead else 1

    @functools.cached_property
    def without_experts(self) -> LevelOne:
        """The same at no cost for all that an axis of experts divides otherwise than a data axis."""
        space = replace(self.space, without_experts=True)
        return LevelOne(
            self.cluster, space, self.step_units,
            _of_states=self._of_states, _computed=self._computed, _pool=self._pool,
        )  # fmt: skip

    @property
    def num_programs(self) -> int:
        """Sharding ILPs that were solved."""
        return self.solved + (self.without_experts.solved if self.num_experts > 1 else 0)

    @property
    def num_experts(self) -> int:
        """What an axis of experts must divide."""
        return self.space.num_experts

    def sharded(self, cut: Cut, layout: MeshLayout, links: Links, *, weight: float = 0.0) -> Sharded | None:
        """The sharding for ``cut`` on the links of ``layout``, None if nothing divides; ``weight``: of bytes."""
        return self._sharded_at(self._key(cut, layout), cut, layout, links, weight=weight)

    def sharded_with_host(self, cut: Cut, layout: MeshLayout, links: Links, *, weight: float = 0.0) -> Sharded | None:
        """The sharding whose units are launched and run the fastest, see ``Shardings.variant_with_host``; where hosts
        are not priced that of ``sharded``."""
        if not links.axes.host_seconds:
            return self.sharded(cut, layout, links, weight=weight)
        key = self._key(cut, layout)
        if (*key, weight, "with host") not in self._sharded:
            self.solved += 1
            shardings = self._shardings_at(key, cut, layout, links)
            variant = None if shardings is None else shardings.variant_with_host(weight=weight)
            sharded = None if variant is None else Sharded(self.space, self.step_units, variant)
            self._sharded[*key, weight, "with host"] = sharded
        return self._sharded[*key, weight, "with host"]

    def least_of_operators(self, cut: Cut, layout: MeshLayout, links: Links) -> float:
        """Seconds of one micro-batch that no sharding for ``cut`` beats, since each operator takes so long under its
        fastest choice; infinite if nothing divides. No program is solved."""
        shardings = self._shardings_at(self._key(cut, layout), cut, layout, links)
        return math.inf if shardings is None else shardings.least_of_operators

    def least_of_units(self, cut: Cut, layout: MeshLayout, links: Links) -> tuple[float, ...] | None:
        """Seconds of one micro-batch in a copy of each unit that no sharding for ``cut`` beats, each unit by itself;
        None if nothing divides."""
        key = self._key(cut, layout)
        if key not in self._of_units:
            shardings = self._shardings_at(key, cut, layout, links)
            self._of_units[key] = None
            if shardings is not None and shardings.divides:
                self._of_units[key] = least_of_units(shardings, self.step_units.units)
                self.solved += len(self.step_units.units)
        return self._of_units[key]

    def _key(self, cut: Cut, layout: MeshLayout) -> tuple[object, ...]:
        """What the prices of ``cut`` depend on."""
        places = tuple(
            self._place(layout.sizes[axis], layout.stride(axis))
            for axis in (CONTEXT, TENSOR, EXPERT)
            if axis in layout.sizes
        )
        return (cut, *places, layout.group > 1)

    def _shardings_at(self, key: tuple[object, ...], cut: Cut, layout: MeshLayout, links: Links) -> Shardings | None:
        """The programs of ``cut``, remembered by a ``key`` that says what prices depend on."""
        if key not in self._shardings:
            mixes = cut.pieces == layout.data or not self.micro_batches
            beside_data = (cut.pieces > 1, cut.context, cut.tensor, cut.expert, *key[1:])
            of_states = self._of_states.setdefault(beside_data, {})
            self._shardings[key] = self._programs(cut, batch_prices(links, mixes=mixes), of_states)
        return self._shardings[key]

    def _sharded_at(
        self, key: tuple[object, ...], cut: Cut, layout: MeshLayout, links: Links, *, weight: float
    ) -> Sharded | None:
        """The same, remembered by such a ``key``."""
        if (*key, weight) not in self._sharded:
            self.solved += 1
            shardings = self._shardings_at(key, cut, layout, links)
            variant = None if shardings is None else shardings.variant(weight=weight)
            self._sharded[*key, weight] = None if variant is None else Sharded(self.space, self.step_units, variant)
        return self._sharded[*key, weight]

    def alone(self, cut: Cut) -> Sharded | None:
        """The fastest sharding for a cut of the batch, maybe of experts, and at most one other axis, on the best links.

        Those are neighbours' links; of a context axis on a torus, for each collective those that suit it best.
        """
        if cut not in self._alone:
            self._alone[cut] = self._sharded_alone(cut)
        return self._alone[cut]

    def _sharded_alone(self, cut: Cut) -> Sharded | None:
        size = cut.context * cut.tensor
        if self.cluster.num_devices % (size * cut.expert):
            return None
        context, tensor = (size, 1) if cut.context > 1 else (1, size)
        layout = MeshLayout(1, self.cluster.num_devices // size // cut.expert, context, tensor, expert=cut.expert)
        links = self.links_on(layout)
        if self.may_be_better_elsewhere(cut):
            links = replace(links, axes=BestPlacedCostModel(self.cluster, layout.sizes))
            return self._sharded_at((cut, "best", layout.group > 1), cut, layout, links, weight=0.0)
        return self.sharded(cut, layout, links)

    def links_on(self, layout: MeshLayout) -> Links:
        """The prices of a layout."""
        if layout not in self._links:
            self._links[layout] = self._priced(layout)
        return self._links[layout]

    def _priced(self, layout: MeshLayout) -> Links:
        return Links.of(self.cluster, layout)

    def least_of_experts(self, cut: Cut) -> float:
        """Least seconds of one micro-batch in experts and the exchange of their tokens, on the best links there are;
        infinite if they cannot be cut so."""
        devices = cut.expert * cut.context * cut.tensor
        if self.cluster.num_devices % devices:
            return math.inf
        layout = MeshLayout(1, self.cluster.num_devices // devices, cut.context, cut.tensor, expert=cut.expert)
        links = self.links_on(layout)
        if self.cluster.has_direct_links:
            links = replace(links, axes=BestPlacedCostModel(self.cluster, layout.sizes))
        return least_of_experts(self.space, cut, batch_prices(links, mixes=True), computed=self._computed)

    def may_be_better_elsewhere(self, cut: Cut) -> bool:
        """Whether a context axis may be faster beside a tensor axis than among neighbours."""
        return cut.context > 1 and self.cluster.has_direct_links

    def has_one_place(self, cut: Cut) -> bool:
        """Whether the context axis of ``cut`` has the same links under all layouts: around those that lie inside."""
        return not self.may_be_better_elsewhere(cut) and not self.cluster.has_unequal_devices

    def apart(self, cut: Cut, inside: int) -> Sharded | None:
        """The fastest sharding for a cut of the batch and the context axis, on the links that this has where ``inside``
        neighbours lie between two of its places."""
        layout = MeshLayout(1, self.cluster.num_devices // cut.context // inside, cut.context, inside)
        key = (cut, self._place(cut.context, inside), self._place(1, 1), layout.group > 1)
        return self._sharded_at(key, cut, layout, self.links_on(layout), weight=0.0)

    def beside(self, cut: Cut, tensor: int) -> float:
        """Seconds of the conversions of a context axis alone, on the links that it has beside ``tensor`` devices.

        ``cut`` has no tensor axis; what every operator does is what ``alone`` found. Zero if there is no sharding.
        """
        along = self.alone(cut)
        if along is None or self.cluster.num_devices % (cut.context * tensor):
            return 0.0
        place = self._place(cut.context, tensor)
        if place == self._place(cut.context, 1) or self.may_be_better_elsewhere(cut):
            return along.between
        key = (cut, place)
        if key not in self._beside:
            spread = MeshLayout(1, self.cluster.num_devices // cut.context // tensor, cut.context, tensor)
            prices = batch_prices(self.links_on(spread), mixes=True)
            variant = self._shardings_of(cut, prices, along=along.variant).variant()
            self.solved += 1
            self._beside[key] = 0.0 if variant is None else Sharded(self.space, self.step_units, variant).between
        return self._beside[key]

    def _programs(
        self, cut: Cut, prices: BatchPrices, of_states: dict[tuple[object, ...], Lattice]
    ) -> Shardings | None:
        """The sharding ILP of ``cut``; with both axes, the context axis is fixed to what it does alone."""
        along = None
        if cut.context > 1 and cut.tensor > 1:
            sharded = self._along(cut)
            if sharded is None:
                return None
            along = sharded.variant
        return self._shardings_of(cut, prices, along=along, of_states=of_states)

    def _shardings_of(
        self,
        cut: Cut,
        prices: BatchPrices,
        *,
        along: Variant | None,
        of_states: dict[tuple[object, ...], Lattice] | None = None,
    ) -> Shardings:
        """The program of ``cut``, which shares what other cuts have worked out of the cluster's prices."""
        return Shardings(
            self.space, cut, prices, along=along, of_states=of_states, computed=self._computed, pool=self._pool
        )

    def _along(self, cut: Cut) -> Sharded | None:
        """What the context axis of ``cut`` does alone."""
        return self.alone(cut._replace(tensor=1))

    def _place(self, size: int, stride: int) -> tuple[object, ...]:
        """The cache key of an axis: what its prices depend on beside its size."""
        if size == 1:
            return ()
        if (size, stride) not in self._places:
            levels = self.cluster.levels
            if self.cluster.has_unequal_devices:  # each kind of them has its own prices there
                self._places[size, stride] = placement(levels, stride=stride, size=size)
            else:
                number = self._routes.setdefault(route(levels, stride=stride, size=size), len(self._routes))
                self._places[size, stride] = (number,)
        return self._places[size, stride]
