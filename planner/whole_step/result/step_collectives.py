"""Every collective of a training step, counted in the programs that the ranks will run.

Counted is what the ranks of one pipeline issue together (one rank of every stage; without a pipeline: one rank):

* in its programs, for every micro-batch: activations, recomputation included (``unit_collectives``);
* by its units: weights gathered and gradients reduced over the data ranks, under ZeRO 0 to 3;
* from one stage to the next (``send``), and what runs once a step: totals of the batch (in the forward phase),
  gradients of tied weights and the loss (``after`` the backward passes).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from cost_models.dtypes import item_size
from passes.autograd.recompute_policies import Activations
from passes.ir.conversions import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from passes.ir.graph import Graph
from passes.ir.types import P, Placement, R, local_shape, shard_dim, uneven_dims
from passes.pipeline_cut import BATCH_AXIS, StageGraph, StepPrograms, deferral_of, step_programs
from passes.pipeline_cut.step_programs import StageUnit
from passes.plan import CollectivePlan, Plan
from passes.plan.plan_data import OVER_PIECES, OVER_REPLICAS
from passes.shard import Compute, Repeat
from passes.shard.operations import Operation
from planner.sharding_ilp.liveness import live_nodes
from planner.sharding_ilp.plan_of_assignment import Tally, add_to_tally, collectives_of
from planner.whole_step.result.gradient_flow import GradientFlow
from planner.whole_step.result.unit_collectives import (
    AFTER,
    BACKWARD,
    FORWARD,
    Axes,
    Below,
    SavedLocals,
    Sent,
    gathers_in_backward,
    local_bytes,
    sent_again,
    sent_once,
    weights_below,
)
from runtime.execution.unit_table import GATHERED_PER_USE, UnitTable, sharded_paths, stages_of, weight_groups
from runtime.zero.flat_places import FlatPlaces, FlatTensor
from runtime.zero.precision import DtypeNames, precision_of
from runtime.zero.state_pieces import piece_dim, piece_ranks, piece_shape

PIPELINE = "pp"
SEND, BROADCAST = "send", "broadcast"


def step_collectives(graph: Graph, plan: Plan) -> tuple[CollectivePlan, ...]:
    """The collectives of one step of ``plan``; ``graph`` is the one that it was made of.

    Raises:
        ValueError: as ``passes.pipeline_cut.step_programs``.
    """
    has_loss = graph.loss is not None
    programs = step_programs(
        graph,
        plan,
        num_microbatches=None if has_loss else 1,
        outputs=None if has_loss else tuple(graph.outputs),
    )
    # On a given mesh a model without a loss may be trained by whoever calls it.
    return _Counter(programs, plan, trains=graph.training and (has_loss or not plan.step.decides_units)).count()


class _Use(NamedTuple):
    """What one unit does with weights: whether the backward pass gathers them again, and which get a gradient."""

    gathers_again: bool
    with_gradient: frozenset[str]


class _Counter:
    def __init__(
        self, programs: StepPrograms, plan: Plan, *, trains: bool, trained: StepPrograms | None = None
    ) -> None:
        """``trained``: the programs of the training step, whose units these use, if they are others."""
        self.programs, self.plan, self.step, self.trains = programs, plan, plan.step, trains
        self.trained = trained
        self.times = programs.num_microbatches
        self.axes = Axes(programs.stages[0].sharded.mesh, BATCH_AXIS, self.times)
        self.sizes = plan.mesh.as_dict()
        self.deferral = deferral_of(plan)
        self.saved_by_autograd = _SavedByAutograd(programs.graph)
        self.tally: Tally = {}

    def count(self) -> tuple[CollectivePlan, ...]:
        self.add_stages()
        num_ranks = len({chunk.rank for chunk in self.step.chunks})
        if self.trains and self.programs.counting:
            self._counting(num_ranks)
        if self.trains and self.programs.graph.loss is not None:
            self._tied_gradients()
            self._loss(num_ranks)
        return collectives_of(self.tally)

    def add_stages(self) -> None:
        """Count what the chunks, their units and the transfers between them send."""
        for rank in sorted({chunk.rank for chunk in self.step.chunks}):
            stages = [stage for stage, chunk in zip(self.programs.stages, self.step.chunks) if chunk.rank == rank]
            for stage in stages:
                self._stage(stage)
            self._weights(stages)
            if self.programs.totals is not None and any(self._takes_totals(stage) for stage in stages):
                self._totals()
        self._sends()

    def _add(self, sent: Sent, count: int = 1) -> None:
        """Count a collective, unless it is on an axis of one rank."""
        if self.sizes.get(sent.axis, self.step.axes.get(sent.axis, 2)) > 1 and count:
            add_to_tally(self.tally, (sent.collective, sent.axis, sent.phase), count, sent.num_bytes)

    # -- programs ---------------------------------------------------------------------------------------------------

    def _stage(self, stage: StageGraph) -> None:
        self._operations(stage.sharded.main.body, self.times)
        for operation in stage.sharded.main.body:
            if isinstance(operation, Repeat):
                copies = len(operation.block.roots)
                self._operations(operation.block.section.body, copies * self.times)
                self._operations(operation.between, (copies - 1) * self.times)
                policy = operation.policy.recompute if operation.policy is not None else "none"
                if self.trains and policy != "none":
                    saved = self.saved_by_autograd.of_unit(operation)
                    for sent in sent_again(operation.block.section.body, self.axes, saved, policy):
                        self._add(sent, copies * self.times)

    def _operations(self, operations: Sequence[Operation], count: int) -> None:
        for sent in sent_once(operations, self.axes, self.saved_by_autograd.live):
            if self.trains or sent.phase == FORWARD:
                self._add(sent, count)

    def _takes_totals(self, stage: StageGraph) -> bool:
        """Whether a chunk takes totals that are computed from the inputs."""
        assert self.programs.totals is not None
        names = self.programs.totals.graph.outputs
        return any(path[0] == "total" and path[1] in names for path in stage.sharded.graph.input_paths)

    def _totals(self) -> None:
        totals = self.programs.totals
        assert totals is not None
        self._operations(totals.main.body, self.times)
        for local in totals.main.results:
            self._add(Sent(ALL_REDUCE, BATCH_AXIS, FORWARD, local_bytes(local)))

    def _counting(self, num_ranks: int) -> None:
        """Count what the pass that counts totals sends; all ranks of a pipeline add up the totals."""
        programs = dataclasses.replace(self.programs, stages=self.programs.counting, totals=None, counting=())
        ahead = _Counter(programs, self.plan, trains=False, trained=self.programs)
        ahead.tally = self.tally
        ahead.add_stages()
        for local in programs.stages[-1].sharded.main.results:
            if num_ranks > 1:
                self._add(Sent(BROADCAST, PIPELINE, FORWARD, local_bytes(local)), num_ranks)
            self._add(Sent(ALL_REDUCE, BATCH_AXIS, FORWARD, local_bytes(local)), num_ranks)

    # -- weights ----------------------------------------------------------------------------------------------------

    def _weights(self, stages: Sequence[StageGraph]) -> None:
        """What the units of one rank send over the data ranks."""
        table = UnitTable()
        first = stages if self.trained is None else [self.trained.stages[stage.index] for stage in stages]
        table.hold_together(first)
        uses: dict[tuple[int | None, int, tuple[str, ...]], list[_Use]] = {}
        for stage in stages:
            for (unit, block), with_gradient in zip(self._units(stage), self._with_gradient(stage), strict=True):
                below = {name: (root, path) for root, path, name in unit.states}
                for names, zero in self._groups(unit, first, table):
                    key = (None if len(names) == 1 and names[0] in table.held_together else stage.index, zero, names)
                    own = {below[name] for name in names if name in below}
                    again = zero == GATHERED_PER_USE and self._gathers_again(block, own)
                    uses.setdefault(key, []).append(_Use(again, with_gradient))
        sharded = self._sharded()
        for (_, zero, names), in_units in uses.items():
            zero = max(zero, int(any(name in sharded for name in names)))
            for bundle in self._bundles(names, table.gathered_apart):
                self._bundle(bundle, zero, in_units)

    def _groups(
        self, unit: StageUnit, stages: Sequence[StageGraph], table: UnitTable
    ) -> list[tuple[tuple[str, ...], int]]:
        """The weights that are gathered for a unit, by group: those of the units of ``stages`` that hold its own."""
        if self.trained is None:
            return weight_groups(unit, self._trained(unit), table.held_together)
        own = set(self._trained(unit))
        units = (each for stage in stages for each in stage.all_units)
        groups = (group for each in units for group in weight_groups(each, self._trained(each), table.held_together))
        return [group for group in dict.fromkeys(groups) if own.intersection(group[0])]

    def _units(self, stage: StageGraph) -> Iterator[tuple[StageUnit, Repeat | None]]:
        """The units of a chunk with the blocks that use them; weights used outside of blocks have None."""
        repeats = [operation for operation in stage.sharded.main.body if isinstance(operation, Repeat)]
        blocks = [repeat for repeat in repeats for _ in repeat.block.roots]
        yield from itertools.zip_longest(stage.all_units, blocks)

    def _gathers_again(self, block: Repeat | None, weights: Collection[Below]) -> bool:
        if not self.trains or block is None or block.policy is None:
            return False
        return gathers_in_backward(self.saved_by_autograd.of_unit(block), block.policy.recompute, weights)

    def _with_gradient(self, stage: StageGraph) -> Iterator[frozenset[str]]:
        """Paths of the weights that get a gradient by each unit's use of them, in the order of ``_units``."""
        flow = GradientFlow(self.saved_by_autograd.live)
        outside = flow.through(stage.sharded.main.body)
        repeats = [operation for operation in stage.sharded.main.body if isinstance(operation, Repeat)]
        copies = (copy for repeat in repeats for copy in flow.of_copies[id(repeat)])
        for unit in stage.all_units:
            below = weights_below(next(copies, outside))
            yield frozenset(name for root, path, name in unit.states if (root, path) in below)

    def _trained(self, unit: StageUnit) -> dict[str, tuple[str, ...]]:
        """The trained weights of a unit, with the axes over which their gradients are summed."""
        states = self.plan.states
        return {path: self._data_axes(path) for _, _, path in unit.states if path in states and states[path].trainable}

    def _data_axes(self, path: str) -> tuple[str, ...]:
        return tuple(axis for axis in self.deferral.get(path, ()) if self.sizes[axis] > 1)

    def _replica_axes(self, path: str) -> str:
        """What the groups that hold the same pieces are called: those of experts are those of the rest."""
        axes = {*self._data_axes(path), *(axis for axis in ("ep",) if self.sizes.get(axis, 1) > 1)}
        return "_".join(axis for axis in self.plan.mesh.names if axis in axes)

    def _num_data_ranks(self, path: str) -> int:
        return math.prod(self.sizes[axis] for axis in self._data_axes(path))

    def _num_piece_ranks(self, path: str) -> int:
        """Over how many of its data ranks ZeRO divides a weight."""
        return piece_ranks(self._num_data_ranks(path), self.step.zero_ranks_along(self._data_axes(path)))

    def _bundles(self, names: Sequence[str], apart: Collection[str]) -> Iterator[tuple[str, ...]]:
        """Group weights that are sent together: those of equal dtypes."""
        bundles: dict[tuple[str, bool], list[str]] = {}
        for name in names:
            bundles.setdefault((self.plan.states[name].dtype, name in apart), []).append(name)
        yield from map(tuple, bundles.values())

    def _bundle(self, names: Sequence[str], zero: int, uses: Sequence[_Use]) -> None:
        ranks, axis = self._num_data_ranks(names[0]), "_".join(self._data_axes(names[0]))
        if ranks == 1:
            return
        group = self._num_piece_ranks(names[0]) if zero else ranks
        over_replicas = Sent(ALL_REDUCE, f"{self._replica_axes(names[0])}{OVER_REPLICAS}", BACKWARD, 0)
        axis = axis if group == ranks else f"{axis}{OVER_PIECES}"
        tensors = [FlatTensor(self._local_shape(name), dim=self._piece_dim(name, group)) for name in names]
        layout = FlatPlaces(tensors, group if zero else 1)
        compute, _, gradient = self._dtypes(names[0])
        elements = layout.row * group if zero else layout.total
        gather = Sent(ALL_GATHER, axis, FORWARD, elements * item_size(compute))
        reduce = Sent(REDUCE_SCATTER if zero else ALL_REDUCE, axis, BACKWARD, elements * item_size(gradient))
        if zero == GATHERED_PER_USE:
            self._add(gather, len(uses) * self.times)
        elif zero and self.trained is None:
            self._add(gather)
        if not self.trains:
            return
        if zero == GATHERED_PER_USE:
            self._add(gather._replace(phase=BACKWARD), sum(use.gathers_again for use in uses) * self.times)
        reducing = sum(not use.with_gradient.isdisjoint(names) for use in uses)
        if reducing == 0:
            return  # no gradient comes to any of them
        self._add(reduce, reducing * self.times if zero > 1 else 1)
        if group < ranks:
            self._add(over_replicas._replace(num_bytes=layout.row * item_size(gradient)))

    def _dtypes(self, name: str) -> DtypeNames:
        """Of a trained weight: of the working copy, of what the optimizer updates, of the gradient that is reduced."""
        return precision_of(self.plan).of_name(self.plan.states[name].dtype)

    def _local_shape(self, name: str) -> tuple[int, ...]:
        """Of a weight as programs use it on the first rank: whole on the data axes."""
        return local_shape(self.plan.states[name].shape, self._placement(name), self.plan.mesh)

    def _piece_dim(self, name: str, group: int) -> int:
        """The dim in which ZeRO cuts a weight."""
        uneven = uneven_dims(self.plan.states[name].shape, self._placement(name), self.plan.mesh)
        return piece_dim(self._local_shape(name), group, uneven)

    def _placement(self, name: str) -> Placement:
        """Of a weight as programs use it."""
        deferred = self.deferral.get(name, ())
        states, names = self.plan.states, self.plan.mesh.names
        return tuple(R if axis in deferred else where for axis, where in zip(names, states[name].placement))

    def _sharded(self) -> frozenset[str]:
        """Weights of which a data rank owns a piece."""
        paths = sharded_paths(self.programs)
        return frozenset(path for path in paths if path in self.plan.states and self.plan.states[path].shape)

    # -- between stages ---------------------------------------------------------------------------------------------

    def _sends(self) -> None:
        chunks = self.step.chunks
        for stage, chunk, following in zip(self.programs.stages, chunks, chunks[1:]):
            if chunk.rank == following.rank:
                continue
            for local in stage.sent:
                self._add(Sent(SEND, PIPELINE, FORWARD, local_bytes(local)), self.times)
                if self.trains and local.value.requires_grad:
                    self._add(Sent(SEND, PIPELINE, BACKWARD, local_bytes(local)), self.times)

    def _tied_gradients(self) -> None:
        """Gradients of weights that several stages hold copies of."""
        sharded = self._sharded()
        for path, ranks in stages_of(self.plan, self.programs).items():
            if len(ranks) == 1 or path not in self.plan.states or not self.plan.states[path].trainable:
                continue
            shape, group = self._local_shape(path), self._num_piece_ranks(path)
            num_bytes = item_size(self._dtypes(path)[1])
            cut = path in sharded and group > 1
            for size in piece_shape(shape, group, 0, self._piece_dim(path, group)) if cut else shape:
                num_bytes *= size
            self._add(Sent(ALL_REDUCE, PIPELINE, AFTER, num_bytes), len(ranks))

    def _loss(self, num_ranks: int) -> None:
        """Count the collectives that assemble the loss on the last chunk's ranks and broadcast it to the pipeline."""
        last = self.programs.stages[-1]
        local = last.sharded.main.results[0]
        whole = local_bytes(local)
        for axis, spmd_type in reversed(list(zip(self.plan.mesh.names, local.placement))):
            if spmd_type == P:
                self._add(Sent(ALL_REDUCE, axis, AFTER, whole))
            elif shard_dim(spmd_type) is not None:
                whole *= self.sizes[axis]
                self._add(Sent(ALL_GATHER, axis, AFTER, whole))
        if num_ranks > 1:
            self._add(Sent(BROADCAST, PIPELINE, AFTER, whole), num_ranks)


class _SavedByAutograd:
    """Where gradients go in a step, and what autograd saves of its operators, computed on demand."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.live = live_nodes(graph)
        #: Also what no gradient comes to in the end: autograd saves for it before that is known.
        self.recorded = frozenset(node.name for node in graph.nodes if any(each.requires_grad for each in node.outputs))
        self._saved_by_unit: dict[tuple[str, ...], SavedLocals] = {}

    def of_unit(self, repeat: Repeat) -> SavedLocals:
        """What autograd saves of one copy of a unit."""
        body = repeat.block.section.body
        names = tuple(operation.node.name for operation in body if isinstance(operation, Compute))
        if names not in self._saved_by_unit:
            saved = SavedLocals.of(body, Activations.of(self.graph, self.live, names))
            if saved.last >= 0 and not self.live.issuperset(self.recorded.intersection(names)):
                recorded = Activations.of(self.graph, self.live | self.recorded, names)
                saved = dataclasses.replace(saved, last=SavedLocals.of(body, recorded).last)
            self._saved_by_unit[names] = saved
        return self._saved_by_unit[names]
