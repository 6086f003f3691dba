"""Price a saved plan of a whole training step again from scratch: a check that the search lost no cost.

Only the graph, the data of the plan and the cluster are looked at. Seconds of operators and conversions come from a
walk of the unfolded graph (``planner.step.price_units``); parameters are counted state by state, and their collectives
priced over the devices of ``dp`` and ``cp``; the stages are put together from the chunks of the plan and priced by the
closed form of ``cost_models.step_time``, which is tested against the simulator by itself. Shared with the search are
besides that only unit prices: of one operator, one collective, one pass through memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cost_models import Cluster, CostModel
from cost_models.dtypes import item_size
from cost_models.memory import OPTIMIZER_MOMENTS, zero_state_bytes
from cost_models.schedules import SCHEDULES
from cost_models.simulator import StepReport, simulate
from cost_models.step import Chunk, LayerCosts, PipelineStep
from cost_models.step_time import StepSeconds, step_memory, step_seconds
from passes.fuse import as_planned
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Plan
from passes.plan_data import Costs
from passes.step_plan import ChunkPlan, GroupPlan, StepPlan
from planner.search.price import itemise
from planner.step.fusion import fuse
from planner.step.layout import Layout, Links
from planner.step.price_units import StateOfUnit, UnitPrices
from planner.step.pricing import CONTEXT, DATA, PIPELINE, TENSOR, BatchPrices, Fusion, StepPricing, state_derived
from planner.step.training import Training


@dataclass(frozen=True)
class PricedStep:
    """What a plan costs: seconds of the step by part, bytes by pipeline rank, and the step itself.

    ``microbatch`` are the costs of one micro-batch through the whole model as ``Plan.costs`` has them.
    """

    seconds: StepSeconds
    memory: tuple[float, ...]
    step: PipelineStep
    microbatch: Costs

    def simulated(self) -> StepReport:
        """The same step played by the simulator."""
        return simulate(self.step)


def price_step(graph: Graph, plan: Plan, cluster: Cluster) -> PricedStep:
    """Price ``plan`` for ``graph`` (captured at the plan's global batch) on ``cluster``.

    Raises:
        ValueError: if the plan is not of a whole step or does not hold together: units that the graph does not have,
            or what ``planner.search.price`` finds.
    """
    if not plan.step.decides_units:
        raise ValueError(f"the plan of {plan.model!r} is not of a whole step: price it with planner.search.price")
    return _Pricer(as_planned(graph, plan), plan, plan.step, cluster).run()


class _Pricer:
    def __init__(self, graph: Graph, plan: Plan, step: StepPlan, cluster: Cluster) -> None:
        self.step = step
        sizes = step.axes
        self.layout = Layout(sizes[PIPELINE], sizes[DATA], sizes[CONTEXT], sizes[TENSOR], order=tuple(sizes))
        self.links = Links.of(cluster, self.layout)
        self.group = self.layout.data * self.layout.context
        self.schedule = "1f1b" if self.layout.pipeline == 1 else step.schedule
        self.training = Training(step.optimizer, step.gradient_dtype or None)
        pieces = self.layout.data * step.num_microbatches
        mesh = MeshShape((DATA, CONTEXT, TENSOR), (pieces, self.layout.context, self.layout.tensor))
        pricing = StepPricing(
            self._prices(), mesh, states=state_derived(graph), fusion=fuse(graph) if step.compiled else Fusion()
        )
        self.walked = itemise(graph, dataclasses.replace(plan, mesh=mesh), pricing)
        self.units = UnitPrices(graph, plan, pricing, self.walked, compiled=step.compiled)
        apart = self.layout.pipeline > 1 and SCHEDULES[self.schedule].placement != "vee"
        self.tied_apart = apart
        self.states = self.units.states(tied_apart=apart)
        self.layers: dict[tuple[int, str, int], LayerCosts] = {}

    def _prices(self) -> BatchPrices:
        latency, bandwidth = self.links.samples
        whole_batch = self.step.num_microbatches == 1
        return BatchPrices(self.links.axes, sample_latency=latency, sample_bandwidth=bandwidth, mixes=whole_batch)

    def run(self) -> PricedStep:
        chunks = self._with_transfers(list(self._chunks()))
        step = PipelineStep(
            schedule=self.schedule,
            num_microbatches=self.step.num_microbatches,
            num_ranks=self.layout.pipeline,
            chunks=tuple(chunks),
        )
        return PricedStep(step_seconds(step), step_memory(step), step, self.walked.costs)

    # -- stages -------------------------------------------------------------------------------------------------

    def _chunks(self) -> Iterator[tuple[int, Chunk]]:
        """The unit that each chunk begins with, and the chunk."""
        unit, done = 0, 0
        for planned in self.step.chunks:
            first = unit
            layers: list[tuple[LayerCosts, int]] = []
            for group in planned.groups:
                if unit < len(self.units.units) and done == self.units.units[unit].count:
                    unit, done = unit + 1, 0
                self._check(group, unit, done)
                first = unit if not layers else first
                layers.append((self._layer(unit, group), group.count))
                done += group.count
            yield first, Chunk(layers=tuple(layers))
        if unit != len(self.units.units) - 1 or done != self.units.units[unit].count:
            raise ValueError(f"the plan's chunks end at unit {unit}, the graph has {len(self.units.units)}")

    def _check(self, group: GroupPlan, unit: int, done: int) -> None:
        if unit >= len(self.units.units):
            raise ValueError(f"the graph has no unit for {group.unit!r}")
        found = self.units.units[unit]
        name = found.name if found.run is None else " ".join(self.walked.runs[found.run].roots[done])
        if name != group.unit or done != group.first or done + group.count > found.count:
            raise ValueError(
                f"the plan has {group.count} of {group.unit!r} from copy {group.first}, the graph {name!r} from {done}"
            )

    def _with_transfers(self, chunks: list[tuple[int, Chunk]]) -> list[Chunk]:
        """Chunks that take activations from another rank, and gradients back over the same cut."""
        planned: Sequence[ChunkPlan] = self.step.chunks
        found = [chunk for _, chunk in chunks]
        for index in range(1, len(found)):
            if planned[index].rank != planned[index - 1].rank:
                num_bytes = self.units.entering_bytes(chunks[index][0])
                seconds = self.links.axes.p2p_seconds(num_bytes=num_bytes, axis=PIPELINE)
                found[index] = dataclasses.replace(found[index], receive_forward=seconds)
                found[index - 1] = dataclasses.replace(found[index - 1], receive_backward=seconds)
        return found

    # -- one unit -----------------------------------------------------------------------------------------------

    def _layer(self, unit: int, group: GroupPlan) -> LayerCosts:
        key = (unit, group.recompute, group.zero)
        if key not in self.layers:
            self.layers[key] = self._priced_layer(*key)
        return self.layers[key]

    def _priced_layer(self, unit: int, recompute: str, zero: int) -> LayerCosts:
        states, policy = _Parameters(self, unit, zero), self.units.policy(unit, recompute)
        forward, backward = self.units.seconds(unit)
        adding = states.accumulation()
        backward += policy.seconds + adding
        gather, scatter = states.gather(), states.scatter()
        early_gather = gather if zero == 3 else 0.0
        early_scatter = scatter if zero >= 2 else 0.0
        slowdown = self.links.axes.device.overlap_slowdown
        return LayerCosts(
            forward=forward + slowdown * min(forward, early_gather),
            backward=backward + slowdown * min(backward, early_gather + early_scatter),
            backward_weight=self.units.weight_seconds(unit) + adding,
            gather_forward=early_gather,
            gather_backward=early_gather,
            reduce_backward=early_scatter,
            reduce_step=states.reduction_each_step() + states.tied_exchange(),
            update_step=states.update(),
            gather_step=gather if zero in (1, 2) else 0.0,
            state_bytes=states.held_bytes(),
            saved_bytes=policy.saved_bytes,
            peak_bytes=policy.peak_bytes + states.transient_bytes(),
        )


class _Parameters:
    """The parameters of one copy of a unit under one ZeRO stage (Rajbhandari et al. 2020)."""

    def __init__(self, pricer: _Pricer, unit: int, zero: int) -> None:
        self.pricer, self.zero, self.group = pricer, zero, pricer.group
        self.states = pricer.states[unit]
        self.trained = [state for state in self.states if state.value.requires_grad]
        self.whole = sum(self.share(s) * s.elements * item_size(s.value.dtype) for s in self.trained)
        self.gradients = sum(self.share(s) * s.elements * self.gradient_size(s) for s in self.trained)

    def share(self, state: StateOfUnit) -> float:
        """All of a parameter that is the unit's own; one that copies have in common is held once on each rank."""
        if state.copies == 1:
            return 1.0
        return min(1.0, self.pricer.layout.pipeline / state.copies)

    def gradient_size(self, state: StateOfUnit) -> int:
        return item_size(self.pricer.training.gradients(state.value.dtype))

    def over_group(self, collective: str, num_bytes: float) -> float:
        if self.group == 1:
            return 0.0
        return self.pricer.links.group.collective_seconds(collective, num_bytes=num_bytes, axis=DATA)

    def gather(self) -> float:
        return self.over_group("all_gather", self.whole)

    def scatter(self) -> float:
        return self.over_group("reduce_scatter", self.gradients)

    def reduction_each_step(self) -> float:
        """Stage 0 and 1 reduce gradients once a step; stages 2 and 3 do it for every micro-batch."""
        return (self.over_group("all_reduce", self.gradients), self.scatter(), 0.0, 0.0)[self.zero]

    def tied_exchange(self) -> float:
        """Ranks at both ends of a pipeline bring their gradients of a shared parameter together."""
        if not self.pricer.tied_apart:
            return 0.0
        num_bytes = sum(self.share(s) * s.elements * self.gradient_size(s) for s in self.trained if s.tied)
        return self.pricer.links.axes.p2p_seconds(num_bytes=num_bytes, axis=PIPELINE) if num_bytes else 0.0

    def accumulation(self) -> float:
        """Adding a micro-batch's gradients to the sum: read, read, written; with ZeRO 2 and 3 the reduction does it."""
        if self.pricer.step.num_microbatches == 1 or self.zero >= 2:
            return 0.0
        return self.memory_pass(2 * self.gradients + self.whole)

    def update(self) -> float:
        """4 bytes of gradient read; parameter and moments read and written in float32; 2 bytes of copy written."""
        elements = sum(self.share(state) * state.elements for state in self.trained)
        moments = OPTIMIZER_MOMENTS[self.pricer.step.optimizer]
        elements /= self.group if self.zero else 1
        return self.memory_pass(elements * (6 + 8 * (1 + moments))) if elements else 0.0

    def memory_pass(self, num_bytes: float) -> float:
        axes: CostModel = self.pricer.links.axes
        return axes.compute_seconds(flops=0.0, num_bytes=num_bytes, dtype="float32", kind="elementwise")

    def held_bytes(self) -> float:
        parts = [0.0, 0.0, 0.0]
        buffers = 0.0
        for state in self.states:
            if state.value.kind == "buffer":
                buffers += state.elements * item_size(state.value.dtype)
            elif not state.value.requires_grad:
                parts[0] += self.share(state) * state.elements * item_size(state.value.dtype)
            else:
                held = zero_state_bytes(
                    state.elements,
                    state.value.dtype,
                    stage=self.zero,
                    group_size=self.group,
                    gradient_dtype=self.pricer.training.gradients(state.value.dtype),
                    optimizer=self.pricer.step.optimizer,
                )
                for index, part in enumerate((held.parameters, held.gradients, held.optimizer)):
                    parts[index] += self.share(state) * part
        return sum(map(round, parts)) + buffers

    def transient_bytes(self) -> float:
        """Whole gradients before they are scattered; whole parameters of this layer and the one gathered ahead."""
        if self.group == 1:
            return 0.0
        return (0.0, 0.0, self.gradients, 2 * self.whole + self.gradients)[self.zero]
