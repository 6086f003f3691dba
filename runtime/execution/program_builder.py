"""Making the programs of a step: from a call of the model to this rank's chunks, ready to run."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import nn

from passes.capture import capture, trace_shapes
from passes.capture.stand_in import autocast_dtype
from passes.chains import chain_up
from passes.emit import Program, emit
from passes.fuse import as_planned, pair_rotaries
from passes.ir.graph import Graph
from passes.pipeline_cut import BATCH_AXIS, StageGraph, StepPrograms, deferral_of
from passes.pipeline_cut.early_stores import with_early_stores
from passes.plan import Plan
from passes.plan.plan_data import TensorPlan
from passes.plan.step_plan import StepPlan
from passes.shard import PlanMismatch, UndividedError, input_key
from passes.shard.in_place_writes import with_in_place_writes
from runtime.agreement.captured_alike import captured_alike
from runtime.agreement.ranks_together import Ranks
from runtime.calls.content_keys import state_key
from runtime.calls.frozen_prefix import asks_for_prefix
from runtime.calls.model_call import ModelCall, Path, read_call
from runtime.calls.model_watch import ModelWatch
from runtime.execution.batch_split import BatchSplit, cut_batch, in_pieces, split_of
from runtime.execution.binding import UnitTable, make_units
from runtime.execution.call_effects import CallEffects
from runtime.execution.chunk import ChunkRunner, InputOf, ProgramRunner, in_turn
from runtime.execution.chunk_order import execution_of
from runtime.execution.inputs_of_calls import refuse_other_cuts, sample_dim, with_inputs_of_samples
from runtime.execution.prepared_programs import Prepared
from runtime.execution.rank_mapping import Places, local_axes
from runtime.execution.replanning import Planner, as_seen_by
from runtime.execution.shape_captures import ShapeCaptures, announced
from runtime.execution.state_info import Placing
from runtime.execution.step_state import StepState
from runtime.execution.totals_ahead import counting_of, totals_of
from runtime.execution.value_cases import CallValues, ValueCases, with_values_gathered
from runtime.execution.weights_of_calls import (
    StagesOf,
    cut_like,
    cut_with_weights,
    stages_beside_step,
    with_unused_weights,
)
from runtime.program_tools.typecheck import typecheck
from runtime.programs.program_cache import ProgramCache
from runtime.zero.unit import chained


class Maker:
    """Makes programs, each kind of call's once. The plan fixes what this rank owns.

    Args:
        model: without data, in the dtype that is computed in; its training mode counts.
        state: what this rank owns; it is cut here, once there is a plan.
        plan: None to plan at the first call.
        example: a call with a global batch, from which first programs are made; a plan of a whole step needs one.
        planner: called for the first plan, and when a call needs nodes that the plan does not know, with the plan whose
            decisions are pinned.
        input_of: gives a program's inputs when it runs; it is handed the program too.
        ranks: of the step, which make the same programs.
        buffers: the original's, with values.
    """

    def __init__(
        self,
        model: nn.Module,
        state: StepState,
        plan: Plan | None,
        *,
        watch: ModelWatch,
        example: ModelCall | None,
        loss_fn: Callable[..., Any] | None,
        planner: Planner | None,
        input_of: Callable[[Program], InputOf],
        ranks: Ranks,
        buffers: Mapping[str, torch.Tensor],
        dynamic: bool = False,
    ) -> None:
        self.ranks = ranks
        self.model = model
        self.state = state
        self.places: Places = state.places
        self.plan: Plan | None = None
        self.watch = watch
        self.loss_fn = loss_fn
        self.planner = planner
        self.input_of = input_of
        self.latest: Prepared | None = None
        self.captures = ShapeCaptures(dynamic=dynamic)
        self._graphs: ProgramCache[Graph] = ProgramCache(max_programs=8, announces=False)
        self._prepared: ProgramCache[Prepared] = ProgramCache()
        self._made: ProgramCache[Prepared] = ProgramCache()
        self._units = UnitTable()
        #: Programs of a whole step's own graph, in whose chunks other calls use their weights.
        self._first: StepPrograms | None = None
        #: Pipeline ranks of weights that other calls use and the step does not, by path.
        self._beside: StagesOf = {}
        self._inputs_read: frozenset[str] = frozenset()
        self._cases = ValueCases(ranks, buffers)
        self._values = CallValues({} if example is None else example.tensors)
        self._example = None if example is None else example.with_shapes({})
        #: The example or, if there is none, the first call.
        self.example = self._example
        self._scratch: Mapping[str, torch.Tensor] = {}
        self._inputs_of_call: Mapping[Path, torch.Tensor] = {}
        if plan is not None:
            self._start(plan)
        if example is not None:
            self._make_first(example)
        self._values = CallValues({})

    def for_model(
        self,
        model: nn.Module,
        *,
        input_of: Callable[[Program], InputOf],
        scratch: Mapping[str, torch.Tensor],
        planned: Mapping[str, TensorPlan],
    ) -> Maker:
        """What makes programs of calls of another model with the same weights, as this one's plan places them.

        Args:
            scratch: buffers that it has beside them, this rank's parts by path, placed as ``planned`` says.
        """
        assert self.plan is not None
        maker = copy.copy(self)
        maker.model, maker.input_of, maker._scratch = model, input_of, scratch
        maker.loss_fn = maker.latest = maker._example = None
        maker.plan = dataclasses.replace(self.plan, states={**self.plan.states, **planned})
        maker._graphs, maker.captures = ProgramCache(max_programs=1, announces=False), ShapeCaptures()
        maker._prepared, maker._made = ProgramCache(), ProgramCache()
        maker._cases = ValueCases(self.ranks, self._cases.buffers)
        return maker

    def _start(self, plan: Plan) -> None:
        """Take up the plan: cut the weights as it says."""
        self.plan = plan
        if not plan.step.decides_units:
            self.state.place(Placing.on_mesh(plan, deferral_of(plan)))
            return
        assert self._example is not None, "a plan that decides units needs an example"
        with self.places.layout.plain():
            graph = self._example_graph()
            training = graph.loss is not None
            split = split_of(graph, plan, training=training)
            first, _ = cut_batch(plan, split, lambda tried: self._cut(graph, training=training, split=tried))
            self._beside = stages_beside_step(plan, self._for_call(graph), graph, first, self.state.infos)
        self._first = first
        self.state.place(Placing.of_step(plan, deferral_of(plan), first, self._beside))

    def _make_first(self, example: ModelCall) -> None:
        """The programs of a training step, or of the outputs where there is no loss."""
        with self.places.layout.plain():
            graph = self._example_graph()
        self._inputs_read = frozenset(str(path[0]) for path in graph.input_paths)
        self.prepare(example, training=graph.loss is not None, local_inputs=False)

    def graph_of(self, call: ModelCall) -> Graph:
        """The graph of a call of the model, all of whose ranks ask for it."""
        with self.places.layout.plain():
            return self._capture(call)

    def _example_graph(self) -> Graph:
        assert self._example is not None
        return self._capture(self._example)

    @property
    def step(self) -> StepPlan:
        """How the plan runs a step."""
        assert self.plan is not None
        return self.plan.step

    @property
    def _is_whole_step(self) -> bool:
        """Whether chunks of the plan's own graph say where weights are used."""
        return self._first is not None

    @property
    def all_made(self) -> tuple[Prepared, ...]:
        """The programs of every kind of call made so far."""
        return tuple(self._made.values())

    @property
    def cases(self) -> ValueCases:
        """What decides between the programs of calls that are alike but for their values."""
        return self._cases

    @property
    def needed_inputs(self) -> frozenset[str] | None:
        """Names of the inputs that this rank's programs read; None before the first was made."""
        names = {str(path[0]) for prepared in self._made.values() for path in prepared.reads}
        return frozenset(names) | self._cases.inputs_read if self._made else None

    def prepare(
        self,
        call: ModelCall,
        *,
        training: bool | None,
        local_inputs: bool,
        values: Mapping[Path, torch.Tensor] | None = None,
    ) -> Prepared:
        """The programs for a call: of a training step, or of the model's outputs; made if it is the first of its kind.

        Args:
            training: whether they are of a step; None: if the model returns a loss.
            values: the inputs of this rank by path, where ``call`` has none.

        Raises:
            ValueError: if the plan cannot divide the inputs.
        """
        self._values = CallValues(
            call.tensors if values is None else values,
            functools.partial(self._gathered, call) if local_inputs else None,
        )
        graph_mode = self._graph_mode()
        call = self._with_case(call, graph_mode, local_inputs=local_inputs)
        mode = (training, graph_mode)

        def make() -> Prepared:
            whole = self._completed(self._whole_call(call) if local_inputs else call)
            self.example = self.example or whole.with_shapes({})
            return self._made.get(
                (whole.signature, mode),
                lambda: self.ranks.together(lambda: self._make(whole, training=training)),
                announces=not call.case,
            )

        is_trained = self.model.training, self._is_differentiated()
        shapes = None if call.case else (call.shapes, local_inputs, is_trained, training)
        key = (call.signature, local_inputs, mode)
        self.latest = self._prepared.get(key, make, shapes=shapes, announces=not call.case)
        self.latest.follow_literals()
        return self.latest

    def _with_case(self, call: ModelCall, mode: Hashable, *, local_inputs: bool) -> ModelCall:
        """``call`` with the number of the case that its values belong to."""
        spelling = (call.signature, local_inputs, mode)
        number = self._cases.plain_case(spelling)
        if number is not None:
            return dataclasses.replace(call, case=number) if number else call
        with self.places.layout.plain():
            whole = self._completed(self._whole_call(call) if local_inputs else call)
            kind = self._cases.note(spelling, (whole.signature, mode))
            number = self._cases.case_of(kind, self._values)
            if number is None:
                number = self._cases.next_number(kind)
                graph = self._capture(dataclasses.replace(whole, case=number))
                self._cases.add(kind, number, graph.guards)
        return dataclasses.replace(call, case=number) if number else call

    def _graph_mode(self) -> Hashable:
        """What a captured graph depends on beside its call."""
        return self.model.training, self._is_differentiated(), autocast_dtype(), self.watch.key, state_key(self.loss_fn)

    def _is_differentiated(self) -> bool:
        """Whether a call in evaluation mode may be differentiated, as a plan of a training step can."""
        of_step = self.plan is not None and self.plan.step.decides_units
        return of_step and not self.model.training and torch.is_grad_enabled()

    def _gathered(self, call: ModelCall, path: Path) -> torch.Tensor:
        """An input of the whole batch from each data rank's samples."""
        own = self._values.own[path]
        assert self.plan is not None
        dim = sample_dim(self.plan, call.tensors, path) if BATCH_AXIS in self.places.layout.mesh.names else None
        return own if dim is None else self.places.join_batch(own, dim)

    def refresh_buffers(self) -> None:
        """Take up values of buffers that were loaded; every rank must call this."""
        for name in self._cases.buffers_read:
            self._cases.buffers[name] = self.state.whole(name)

    def _completed(self, call: ModelCall) -> ModelCall:
        """``call`` with arguments of the example that no rank passed because no program reads them."""
        example, parameters = self._example, inspect.signature(self.model.forward).parameters
        if example is None or not self._is_whole_step:
            return call
        left_out = {name for name in example.kwargs if name not in call.kwargs and name not in self._inputs_read}
        specs = {path: (tuple(tensor.shape), tensor.dtype) for path, tensor in example.tensors.items()}
        if any(specs.get(path) != (tuple(tensor.shape), tensor.dtype) for path, tensor in call.tensors.items()):
            # The shapes differ from the example's: complete only the arguments that the model requires.
            left_out = {
                name for name in left_out if name in parameters and parameters[name].default is inspect.Parameter.empty
            }
        if not left_out:
            return call
        kwargs = {n: call.kwargs.get(n, v) for n, v in example.kwargs.items() if n in left_out or n in call.kwargs}
        return read_call(self.model.forward, call.args, {**kwargs, **call.kwargs}, positional=None)

    def _make(self, whole: ModelCall, *, training: bool | None) -> Prepared:
        # A script draws after a call that makes a program what it draws without one.
        with torch.random.fork_rng(devices=[]), announced(whole) as say, self.places.layout.plain():
            graph = self._capture(whole)
            assert self.plan is not None
            self._inputs_of_call = whole.tensors
            training = graph.loss is not None if training is None else training
            split = split_of(graph, self.plan, training=training)
            programs, split = cut_batch(
                self.plan, split, lambda tried: self._cut(graph, training=training, split=tried)
            )
            stages = [stage for stage in programs.stages if self._wants(stage.index)]
            written = with_in_place_writes if self._scratch else lambda sharded: sharded
            emitted = {stage.index: emit(chain_up(pair_rotaries(written(stage.sharded)))) for stage in stages}
            for stage in programs.stages:
                if self._is_mine(stage.index):
                    typecheck(emitted[stage.index])
            say(f"a new program of {graph.model_name}")
        return self._assemble(programs, emitted, graph, training=training, split=split)

    def _capture(self, call: ModelCall) -> Graph:
        """The graph of a call and its case."""
        return self._graphs.get((call.signature, self._graph_mode()), lambda: self._captured(call))

    def _captured(self, call: ModelCall) -> Graph:
        values = self._values

        def capture_call() -> Graph:
            loss_fn = None if asks_for_prefix(call) else self.loss_fn
            options: dict[str, Any] = {"args": call.args, "kwargs": call.kwargs, "loss_fn": loss_fn}
            options |= {"gradients": self._is_differentiated()}
            options |= {"copy_repeats": True, "values": values.tensors, "buffer_values": self._cases.buffers}
            static = functools.partial(
                self._cases.captured, self._graph_mode(), functools.partial(capture, self.model, **options)
            )
            with_open_sizes = functools.partial(trace_shapes, self.model, **options)
            with self.watch.unwritten():
                return self.captures.graph(call, self._graph_mode(), capture=static, trace=with_open_sizes)

        graph = with_values_gathered(values, lambda: captured_alike(self.ranks, capture_call))
        if self._scratch:
            graph = with_early_stores(graph)
        if self.plan is None:
            assert self.planner is not None
            self._start(self.planner(graph, None))
        assert self.plan is not None
        return as_planned(graph, self.plan)

    def _cut(self, graph: Graph, *, training: bool, split: BatchSplit) -> StepPrograms:
        assert self.plan is not None
        outputs = None if training else tuple(graph.outputs)
        own_plan = self.plan
        whole_step = own_plan.step.decides_units
        deferral = None if whole_step else self.state.deferral

        def cut(plan: Plan) -> StepPrograms:
            return cut_with_weights(
                lambda like: cut_like(graph, plan, like, split, outputs=outputs, deferral=deferral),
                own_plan,
                self._first,
                follows_plan=training,
                stages=self._beside,
                names=self.state.infos,
            )

        try:
            return cut(self._for_call(graph))
        except PlanMismatch as mismatch:
            undivided = mismatch.axes if isinstance(mismatch, UndividedError) else ()
            if self.planner is None or (whole_step and (self._first is None or BATCH_AXIS in undivided)):
                raise  # a batch that ranks cannot share is ``cut_batch``'s
            return cut(self._planned_again(graph, split, samples_divide=whole_step and bool(undivided)))

    def _for_call(self, graph: Graph) -> Plan:
        """The plan with what the call of ``graph`` has beside the step's: weights, and inputs."""
        assert self.plan is not None
        plan = with_unused_weights(self.plan, graph, self.state.infos, self.state.trains)
        return plan if self._scratch else with_inputs_of_samples(plan, self._inputs_of_call)

    def _planned_again(self, graph: Graph, split: BatchSplit, *, samples_divide: bool) -> Plan:
        """A plan for a graph with nodes or shapes that the current plan does not know; its decisions stay."""
        assert self.plan is not None and self.planner is not None
        whole_batch = in_pieces(self._for_call(graph), split)
        plan = self.planner(graph, as_seen_by(graph, whole_batch, samples_divide=samples_divide))
        if self.plan.step.decides_units:
            return dataclasses.replace(plan, mesh=self.plan.mesh, step=self.plan.step)
        self.state.adopt(Placing.on_mesh(plan, deferral_of(plan)))
        return plan

    def _is_mine(self, chunk: int) -> bool:
        return self.places.stage is None or self.step.chunks[chunk].rank == self.places.stage

    def _wants(self, chunk: int) -> bool:
        return self._is_mine(chunk) or chunk == len(self.step.chunks) - 1

    def _whole_call(self, call: ModelCall) -> ModelCall:
        """The call with global shapes, from one with local parts."""
        if self.plan is None:
            raise ValueError("local_inputs=True needs a plan: give example_inputs (or batch_size) to compile()")
        mesh = self.places.layout.mesh
        live = [input_key(path) for path, tensor in call.tensors.items() if tensor.requires_grad]
        if live and torch.is_grad_enabled() and any(mesh.size(axis) > 1 for axis in local_axes(mesh)):
            raise ValueError(
                f"input {', '.join(live)} needs a gradient: pass the whole batch, without local_inputs=True"
            )
        shapes: dict[Path, tuple[int, ...]] = {}
        for path, tensor in call.tensors.items():
            shape = list(tensor.shape)
            for axis in local_axes(mesh):
                dim = sample_dim(self.plan, call.tensors, path)
                if dim is not None:
                    shape[dim] *= mesh.size(axis)
            shapes[path] = tuple(shape)
        refuse_other_cuts(self.plan, call.tensors)
        return call.with_shapes(shapes)

    def _assemble(
        self,
        programs: StepPrograms,
        emitted: dict[int, Program],
        graph: Graph,
        *,
        training: bool,
        split: BatchSplit,
    ) -> Prepared:
        own_stages = [stage for stage in programs.stages if self._is_mine(stage.index)]
        # A call of a whole step uses the units of its training step; on a mesh every program has units of its own.
        makes_units = training or not self._units or not self._is_whole_step
        if makes_units:
            self._units.hold_together(own_stages)
        stages = tuple(self._stage(stage, emitted[stage.index], split, makes_units=makes_units) for stage in own_stages)
        chained(in_turn(stages))
        run = functools.partial(
            execution_of, step=self.step, places=self.places, num_microbatches=split.num_microbatches
        )
        own_stage = functools.partial(self._stage, split=split, makes_units=False)
        with self.places.layout.plain():
            counting = counting_of(programs.counting, own_stage, run, is_mine=self._is_mine) if training else None
            totals = totals_of(programs.totals, (*stages, *(counting.stages if counting else ())), self.state, split)
        last = dataclasses.replace(emitted[len(programs.stages) - 1], unflatten=graph.unflatten)
        return Prepared(
            stages, totals, counting, last, split, run(stages, last=last), CallEffects.of(graph), trains=training
        )

    def _stage(self, stage: StageGraph, program: Program, split: BatchSplit, *, makes_units: bool) -> ChunkRunner:
        runner = ProgramRunner(program, self.state, split=split, scratch=self._scratch)
        units, shared = make_units(stage, self.state, runner.literals, self._units, training=makes_units)
        input_of = self.input_of(program)
        return ChunkRunner(stage, runner, units=units, shared=shared, input_of=input_of, compiled=self.step.compiled)
