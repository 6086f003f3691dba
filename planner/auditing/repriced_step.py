"""Price a saved plan again from scratch: seconds, bytes, and the step itself for the simulator.

Only the graph, the data of the plan and the cluster are looked at. Seconds of operators and conversions come from a
walk of the unfolded graph (``planner.auditing.graph_walk``); parameters are counted state by state, and their
collectives priced over the devices of ``dp`` and ``cp``; the stages are put together from the chunks of the plan and
priced by the closed form of ``cost_models.step_time``, which is tested against the simulator by itself. Shared with the
search are besides that only unit prices: of one operator, one collective, one pass through memory.

A plan on a given mesh is a step of one stage, one micro-batch and ZeRO 0, whose one chunk costs what the walk charged.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cost_models import Cluster, CostModel
from cost_models.measured_profile import Extrapolation
from cost_models.schedules import SCHEDULES, rank_of_chunk
from cost_models.simulator import StepReport, simulate
from cost_models.step import ChunkCosts, LayerCosts, PipelineStep
from cost_models.step_time import StepSeconds, chunks_of_ranks, layer_sum, peak_in_flight, step_memory, step_seconds
from cost_models.unequal_devices import device_kinds, kinds_of_stages, view
from passes.ir.derived_values import state_derived
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Plan
from passes.plan.step_plan import ChunkPlan, GroupPlan, RankMemory, StepPlan
from planner.auditing.graph_walk import GraphWalk, walk_graph
from planner.auditing.unit_parameters import UnitParameters
from planner.auditing.unit_prices import PricedPolicy, PricedStage, UnitPrices
from planner.sharding_ilp.bundles import bundles_of
from planner.sharding_ilp.sharding_prices import Pricing
from planner.whole_step.candidates.mesh_layout import Links, MeshLayout
from planner.whole_step.candidates.training_options import TrainingOptions
from planner.whole_step.costs.batch_prices import BatchPrices
from planner.whole_step.costs.fusion import fuse
from planner.whole_step.costs.operator_facts import Fusion
from planner.whole_step.costs.step_prices import (
    CONTEXT,
    DATA,
    EXPERT,
    PIPELINE,
    TENSOR,
    StepPricing,
)


@dataclass(frozen=True)
class RepricedStep:
    """The costs of a plan.

    Attributes:
        seconds: of the step, by part.
        memory: bytes by pipeline rank at its peak; ``parts``: the same by part.
        step: what the closed form and the simulator take.
        walk: every charge of one micro-batch through the whole model; ``walk.costs`` as ``Plan.costs`` has them.
        units: figures of the model's units, None on a given mesh; ``unit_of_layer``: by chunk and layer of ``step``,
            the place of its unit among them.
        extrapolation: how far prices reach beyond what was measured; None where nothing was.
        usable: of unequal devices, by pipeline rank the memory that tensors can use on each; ``on_ranks``: the walk and
            units at the prices of each rank's devices.
    """

    seconds: StepSeconds
    memory: tuple[float, ...]
    parts: tuple[RankMemory, ...]
    step: PipelineStep
    walk: GraphWalk
    units: UnitPrices | None = None
    unit_of_layer: tuple[tuple[int, ...], ...] = ()
    extrapolation: Extrapolation | None = None
    usable: tuple[float, ...] = ()
    on_ranks: tuple[PricedStage, ...] = ()

    def simulated(self) -> StepReport:
        """The same step played by the simulator."""
        return simulate(self.step)


def reprice(graph: Graph, plan: Plan, cluster: Cluster) -> RepricedStep:
    """Price ``plan`` on ``cluster``; ``graph`` is the one that it was made of: of the global batch, fused as it says.

    Raises:
        ValueError: if the plan does not hold together: units that the graph does not have, chunks on ranks where the
            schedule has others, or what ``walk_graph`` refuses.
    """
    if not plan.step.decides_units:
        return _on_mesh(graph, plan, cluster)
    pricer = StepPricer(graph, plan, plan.step, cluster)
    if plan.step.stage_devices:
        kinds, layout = device_kinds(cluster), pricer.layout
        stages = kinds_of_stages(kinds, num_stages=layout.pipeline, stride=layout.stride(PIPELINE))
        seen = {stage: StepPricer(graph, plan, plan.step, view(cluster, kinds, stage)) for stage in set(stages)}
        pricer.on_ranks = [seen[stage] for stage in stages]
    return pricer.run()


def _on_mesh(graph: Graph, plan: Plan, cluster: Cluster) -> RepricedStep:
    """One chunk, one micro-batch: the closed form and the simulator add nothing to what the walk charged."""
    prices = CostModel(cluster, plan.mesh.as_dict())
    prices.extrapolation = None if cluster.profile is None else Extrapolation(cluster.profile)
    walk = walk_graph(graph, plan, Pricing(prices, plan.mesh, bundles_of(graph)))
    costs, num_bytes = walk.costs, walk.costs.memory
    saved = num_bytes["activations"] + num_bytes["converted"]
    parts = RankMemory(num_bytes["parameters"], num_bytes["gradients"], num_bytes["optimizer"], saved, 0.0)
    layer = LayerCosts(
        forward=costs.compute_forward + costs.communication_forward,
        backward=costs.compute_backward + costs.communication_backward,
        state_bytes=parts.parameters + parts.gradients + parts.optimizer,
        saved_bytes=saved,
    )
    chunk = ChunkCosts(layers=((layer, 1),))
    step = PipelineStep(schedule="gpipe", num_microbatches=1, num_ranks=1, chunks=(chunk,))
    return RepricedStep(
        step_seconds(step), step_memory(step), (parts,), step, walk, extrapolation=prices.extrapolation
    )  # fmt: skip


class StepPricer:
    def __init__(self, graph: Graph, plan: Plan, step: StepPlan, cluster: Cluster) -> None:
        self.step = step
        self.layout = MeshLayout.of_sizes(step.axes, zero_ranks=step.zero_ranks)
        self.links = Links.of(cluster, self.layout)
        self.extrapolation = None if cluster.profile is None else Extrapolation(cluster.profile)
        self.links.axes.extrapolation = self.extrapolation
        self.schedule = "1f1b" if self.layout.pipeline == 1 else step.schedule
        self.training = TrainingOptions(step.optimizer, step.gradient_dtype or None, step.optimizer_on_host)
        pieces = self.layout.data * step.num_microbatches
        exchanging = {EXPERT: self.layout.expert} if self.layout.expert > 1 else {}
        cuts = {DATA: pieces, **exchanging, CONTEXT: self.layout.context, TENSOR: self.layout.tensor}
        mesh = MeshShape.from_dict(cuts)
        pricing = StepPricing(
            self._prices(), mesh, states=state_derived(graph), fusion=fuse(graph) if step.compiled else Fusion()
        )
        self.walked = walk_graph(graph, dataclasses.replace(plan, mesh=mesh), pricing)
        self.units = UnitPrices(graph, plan, pricing, self.walked, compiled=step.compiled)
        self.as_stage = PricedStage(self.walked, self.units)
        self.tied_apart = self.layout.pipeline > 1
        joins_ends = SCHEDULES[self.schedule].placement == "vee"
        self.states = self.units.states(tied_apart=self.tied_apart, joins_ends=joins_ends)
        self.layers: dict[tuple[int, str, int], LayerCosts] = {}
        self.usable_bytes = cluster.device.usable_bytes
        #: By pipeline rank of unequal devices, what prices units there; else this does.
        self.on_ranks: list[StepPricer] = []
        self._groups: dict[int, list[tuple[int, GroupPlan]]] = defaultdict(list)

    def _prices(self) -> BatchPrices:
        latency, bandwidth = self.links.samples
        whole_batch = self.step.num_microbatches == 1
        return BatchPrices(self.links.axes, sample_latency=latency, sample_bandwidth=bandwidth, mixes=whole_batch)

    def run(self) -> RepricedStep:
        chunks = self._with_transfers(list(self._chunks()))
        step = PipelineStep(
            schedule=self.schedule,
            num_microbatches=self.step.num_microbatches,
            num_ranks=self.layout.pipeline,
            chunks=tuple(chunks),
        )
        memory = step_memory(step)
        placed = tuple(tuple(unit for unit, _ in self._groups[index]) for index in range(len(chunks)))
        parts = tuple(self._parts(step, memory))
        return RepricedStep(
            step_seconds(step), memory, parts, step, self.walked, self.units, placed, self.extrapolation,
            usable=tuple(each.usable_bytes for each in self.on_ranks),
            on_ranks=tuple(each.as_stage for each in self.on_ranks),
        )  # fmt: skip

    # -- memory by part -----------------------------------------------------------------------------------------

    def _parts(self, step: PipelineStep, totals: Sequence[float]) -> Iterator[RankMemory]:
        """Bytes of each rank by part; a parameter that several of its units use is on a rank once."""
        states = self.units.states(tied_apart=True)
        held, held_on_host = peak_in_flight(step), peak_in_flight(step, "host_bytes")
        for total, chunks_of_rank in zip(totals, chunks_of_ranks(step)):
            parts, tied = [0.0, 0.0, 0.0, 0.0], set[str]()
            for index in chunks_of_rank:
                for unit, group in self._groups[index]:
                    untied_states = [state for state in states[unit] if state.value.name not in tied]
                    tied.update(state.value.name for state in untied_states if state.tied)
                    num_bytes = UnitParameters(self, untied_states, group.zero).state_parts()
                    parts = [part + group.count * more for part, more in zip(parts, num_bytes)]
            saved = sum(held[index] * layer_sum(step.chunks[index], "saved_bytes") for index in chunks_of_rank)
            parameters, gradients, optimizer, on_host = parts
            on_host += sum(
                held_on_host[index] * layer_sum(step.chunks[index], "host_bytes") for index in chunks_of_rank
            )
            transient = max(0.0, total - (parameters + gradients + optimizer) - saved)
            yield RankMemory(parameters, gradients, optimizer, saved, transient, on_host)

    # -- stages -------------------------------------------------------------------------------------------------

    def _chunks(self) -> Iterator[tuple[int, ChunkCosts]]:
        """The unit that each chunk begins with, and the chunk."""
        unit, copy = 0, 0
        for index, planned in enumerate(self.step.chunks):
            self._check_rank(index, planned)
            first = unit
            layers: list[tuple[LayerCosts, int]] = []
            for group in planned.groups:
                if unit < len(self.units.units) and copy == self.units.units[unit].count:
                    unit, copy = unit + 1, 0
                self._check(group, unit, copy)
                first = unit if not layers else first
                pricer = self.on_ranks[planned.rank] if self.on_ranks else self
                layers.append((pricer._layer(unit, group), group.count))
                self._groups[index].append((unit, group))
                copy += group.count
            rows = tuple(unit for unit, _ in self._groups[index])
            yield first, ChunkCosts(layers=tuple(layers), rows=rows)
        if unit != len(self.units.units) - 1 or copy != self.units.units[unit].count:
            raise ValueError(f"the plan's chunks end at unit {unit}, the graph has {len(self.units.units)}")

    def _check_rank(self, index: int, chunk: ChunkPlan) -> None:
        ranks, chunks = self.layout.pipeline, len(self.step.chunks)
        rank = rank_of_chunk(self.schedule, index, num_ranks=ranks, num_chunks=chunks)
        if chunk.rank != rank:
            raise ValueError(f"the plan has chunk {index} on rank {chunk.rank}, schedule {self.schedule!r} on {rank}")

    def _check(self, group: GroupPlan, unit: int, copy: int) -> None:
        if unit >= len(self.units.units):
            raise ValueError(f"the graph has no unit for {group.unit!r}")
        planned = self.units.units[unit]
        name = planned.name if planned.run is None else " ".join(self.walked.runs[planned.run].roots[copy])
        if name != group.unit or copy != group.first or copy + group.count > planned.count:
            raise ValueError(
                f"the plan has {group.count} of {group.unit!r} from copy {group.first}, the graph {name!r} from {copy}"
            )

    def _with_transfers(self, chunks: list[tuple[int, ChunkCosts]]) -> list[ChunkCosts]:
        """Chunks that take activations from another rank, and gradients back over the same cut."""
        planned: Sequence[ChunkPlan] = self.step.chunks
        linked = [chunk for _, chunk in chunks]
        for index in range(1, len(linked)):
            if planned[index].rank != planned[index - 1].rank:
                ends = [self.on_ranks[planned[end].rank] for end in (index, index - 1)] if self.on_ranks else [self]
                forward, backward = (
                    max(end.links.axes.p2p_seconds(num_bytes=num_bytes, axis=PIPELINE) for end in ends)
                    if num_bytes
                    else 0.0
                    for num_bytes in self.units.crossing_bytes(chunks[index][0])
                )
                forward *= self.step.forward_passes
                linked[index] = dataclasses.replace(linked[index], receive_forward=forward)
                linked[index - 1] = dataclasses.replace(linked[index - 1], receive_backward=backward)
        return linked

    # -- one unit -----------------------------------------------------------------------------------------------

    def _layer(self, unit: int, group: GroupPlan) -> LayerCosts:
        key = (unit, group.recompute, group.zero)
        if key not in self.layers:
            self.layers[key] = self._priced_layer(*key)
        return self.layers[key]

    def _priced_layer(self, unit: int, recompute: str, zero: int) -> LayerCosts:
        states, policy = UnitParameters(self, self.states[unit], zero), self.units.policy(unit, recompute)
        forward, backward = self.units.seconds(unit)
        forward *= self.step.forward_passes
        adding, unpacking = states.accumulation(), states.unpacking() if zero == 3 else 0.0
        forward += unpacking * self.step.forward_passes
        backward += policy.seconds + adding + unpacking
        gather, scatter = states.gather(), states.scatter()
        early_gather = gather if zero == 3 else 0.0
        early_scatter = scatter if zero >= 2 else 0.0
        reduced_once = states.reduction_each_step() + states.tied_exchange()
        slowdown = self.links.axes.device.overlap_slowdown
        beside = min(backward, early_gather + early_scatter)
        beside += min(backward - beside, reduced_once) / self.step.num_microbatches
        forward += slowdown * min(forward, early_gather * self.step.forward_passes)
        backward += slowdown * beside
        carried, launching = self._carried(policy.host_bytes), self._launching(unit, policy, states)
        return LayerCosts(
            forward=max(forward, carried, launching[0]),
            backward=max(backward, carried, launching[1]),
            backward_weight=self.units.weight_seconds(unit) + adding,
            gather_forward=early_gather * self.step.forward_passes,
            gather_backward=early_gather,
            reduce_backward=early_scatter,
            reduce_step=reduced_once,
            update_step=states.update(),
            gather_step=gather if zero in (1, 2) else 0.0,
            state_bytes=states.held_bytes(),
            saved_bytes=policy.saved_bytes,
            peak_bytes=policy.peak_bytes + states.transient_bytes(),
            host_bytes=policy.host_bytes,
        )

    def _launching(self, unit: int, policy: PricedPolicy, states: UnitParameters) -> tuple[float, float]:
        """Seconds in which the host launches a copy of a unit, forward and backward."""
        each = self.links.axes.device.host_seconds
        (forward, backward), (forward_of_states, backward_of_states) = self.units.launches(unit), states.launches()
        again = backward + policy.launches + backward_of_states
        return each * (forward + forward_of_states) * self.step.forward_passes, each * again

    def _carried(self, num_bytes: float) -> float:
        """Seconds of activations to the host, or back, while all devices of a node move as many."""
        if not num_bytes:
            return 0.0
        cluster = self.links.axes.cluster
        if cluster.host is None:
            raise ValueError("the plan offloads activations, but its cluster has no [host]")
        node_size = cluster.host.num_devices(cluster.levels)
        link = cluster.host.link_bandwidth / min(cluster.host.link_shared_by, node_size)
        return num_bytes * (1 / link + node_size / cluster.host.memory_bandwidth)
