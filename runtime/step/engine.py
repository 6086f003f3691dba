"""Making and running the programs of a step: training steps, and calls as the original's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes.capture import capture
from passes.emit import Program, emit
from passes.emit.program import InputSpec
from passes.ir.graph import Graph
from passes.ir.types import MeshShape, shard_dim
from passes.plan import Plan
from passes.shard import PlanMismatch, input_key
from passes.stages import StageGraph, StepPrograms, step_programs
from passes.stages.build import BATCH_AXIS
from runtime.adapters import apply_adapters
from runtime.calls import Call, Path, read_call
from runtime.engine import Planner, as_seen_by, everyone_of, positional_of, skeleton
from runtime.outputs import wrap_outputs
from runtime.step.binding import UnitTable, make_units
from runtime.step.execution import Execution, execution_of
from runtime.step.narrow import cast_floats, computing_in
from runtime.step.places import Places
from runtime.step.stage import ProgramRunner, Stage, in_order_of_use
from runtime.step.state import StepState
from runtime.typecheck import typecheck
from runtime.units.group import DataGroup
from runtime.units.precision import Precision
from runtime.units.unit import Unit, chained


@dataclass
class Prepared:
    """The programs of one kind of call.

    Attributes:
        stages: this rank's chunks.
        totals: what computes the totals of a micro-batch; None if there are none.
        last: the program of the last chunk, wherever it runs: it says what comes out.
    """

    stages: tuple[Stage, ...]
    totals: ProgramRunner | None
    last: Program
    num_microbatches: int
    execution: Execution
    unflatten: Callable[[dict[str, Any]], Any] | None

    def forget_constants(self) -> None:
        for stage in self.stages:
            stage.runner.forget_constants()
        if self.totals is not None:
            self.totals.forget_constants()


class StepEngine:
    """Runs a plan of a whole step.

    Args:
        model: the original; only a copy without data is kept.
        example: a call of the model with a global batch, from which the first programs are made.
        loss_fn: as in ``planner.compile``.
        compute: dtype that the plan computes in, if it is not that of the model's parameters.
        planner: called when a call needs nodes that the plan does not know, with the plan whose decisions are pinned.

    Attributes:
        latest: the program of this rank that was made or run last.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        places: Places,
        *,
        example: tuple[tuple[Any, ...], dict[str, Any]],
        loss_fn: Callable[..., Any] | None = None,
        compute: torch.dtype | None = None,
        planner: Planner | None = None,
    ) -> None:
        apply_adapters()
        self.planner = planner
        self.model = skeleton(model) if compute is None else computing_in(model, compute)
        self.compute = compute
        self.plan = plan
        self.places = places
        self.layout = places.layout
        self.loss_fn = loss_fn
        assert plan.step is not None
        self.step = plan.step
        self.latest: Program | None = None
        self._prepared: dict[Any, Prepared] = {}
        self._units = UnitTable()
        self._inputs: dict[Path, torch.Tensor] = {}
        self._totals: dict[str, torch.Tensor] = {}
        self._local_inputs = False
        self._stale = True
        self._graphs: dict[Any, Graph] = {}
        self._first: StepPrograms | None = None
        self._made: dict[Any, Prepared] = {}
        self._example = call = self.read(*example)
        with self.layout.plain():
            graph = self._capture(call)
            training = graph.loss is not None
            self._first = self._cut(graph, training=training, num_microbatches=self._microbatches_of(graph))
        self.state = StepState(model, plan, self._first, places, precision=self._precision())
        self._prepare(call, training=training, local_inputs=False)

    def _precision(self) -> Precision:
        """As planned: the optimizer keeps float32 masters of narrow weights unless there is none to keep them."""
        master = "float32" if self.step.optimizer != "none" else None
        return Precision(master=master, gradient=self.step.gradient_dtype or "float32")

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call as the programs are made for."""
        if self.compute is not None:
            args, kwargs = cast_floats((args, kwargs), self.compute)
        return read_call(self.model.forward, args, kwargs, positional=positional_of(self.plan, self.loss_fn))

    @property
    def all_ranks(self) -> DataGroup:
        """Every rank of the step."""
        return everyone_of(self.places.device_mesh)

    @property
    def needed_inputs(self) -> frozenset[str] | None:
        """Names of the inputs that this rank's programs read; None before the first was made."""
        found: set[str] = set()
        for prepared in self._prepared.values():
            programs = [stage.program for stage in prepared.stages]
            programs += [prepared.totals.program] if prepared.totals is not None else []
            found.update(str(spec.path[0]) for program in programs for spec in program.inputs)
        return frozenset(found - {"received", "total"}) if self._prepared else None

    # -- running ------------------------------------------------------------------------------------------------------

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, local_inputs: bool = False) -> torch.Tensor:
        """Forward and backward of one global batch; see ``ParallelModule.train_step``."""
        call = self.read(args, kwargs)
        prepared = self._prepare(call, training=True, local_inputs=local_inputs)
        self.state.check()
        with self._given(call, local_inputs), torch.enable_grad():
            units = in_order_of_use(prepared.stages)
            for unit, uses in _uses(prepared.stages).items():
                unit.begin(uses * prepared.num_microbatches)
            self._totals = self._sum_totals(prepared)
            losses = prepared.execution.train()
            for unit in units:
                unit.finish()
            self.state.sum_tied_gradients()
        self._stale = True
        return self._loss(prepared, losses)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, local_inputs: bool = False) -> Any:
        """The model's outputs; with a pipeline, without gradients."""
        call = self.read(args, kwargs)
        prepared = self._prepare(call, training=False, local_inputs=local_inputs)
        self.state.check()
        with self._given(call, local_inputs):
            if self._stale:
                for unit in in_order_of_use(prepared.stages):
                    unit.refresh_needed()
            # Whoever computes gradients will change the weights.
            self._stale = torch.is_grad_enabled()
            outputs = prepared.execution.forward()
        return wrap_outputs(prepared.last, outputs, self.layout)

    def weights_changed(self) -> None:
        """What this rank owns was changed other than by training: gather and compute anew what depends on it."""
        self._stale = True
        for prepared in self._prepared.values():
            prepared.forget_constants()

    forget_constants = weights_changed

    @contextlib.contextmanager
    def _given(self, call: Call, local_inputs: bool) -> Any:
        self._inputs, self._local_inputs = dict(call.tensors), local_inputs
        try:
            yield
        finally:
            self._inputs, self._totals = {}, {}

    def _sum_totals(self, prepared: Prepared) -> dict[str, torch.Tensor]:
        """The totals of this batch: of all micro-batches and data ranks."""
        if prepared.totals is None:
            return {}
        runner, sums = prepared.totals, dict[str, torch.Tensor]()
        with torch.no_grad():
            for microbatch in range(prepared.num_microbatches):
                tensors = [self._input(spec, microbatch, runner.program.mesh) for spec in runner.program.inputs]
                for name, part in runner(tensors, microbatch).items():
                    sums[name] = sums[name] + part if name in sums else part
            return {name: self.places.sum_over_batch_ranks(part) for name, part in sums.items()}

    def _loss(self, prepared: Prepared, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The batch's loss on all ranks from the micro-batches' parts on those of the last chunk."""
        spec = prepared.last.outputs[0]
        local: torch.Tensor = (
            sum(losses[1:], losses[0])
            if losses
            else torch.zeros(spec.local_shape, dtype=getattr(torch, spec.dtype), device=self.layout.device)
        )
        whole = self.layout.join(local.detach(), spec.placement) if losses else local
        return self.places.from_stage(whole, self.step.chunks[-1].rank)

    def _input(self, spec: InputSpec, microbatch: int, mesh: MeshShape) -> torch.Tensor:
        """This rank's part of an input of a program for a micro-batch."""
        if spec.path[0] == "total":
            return self._totals[str(spec.path[1])]
        axis, count = mesh.names.index(BATCH_AXIS), mesh.size(BATCH_AXIS) // self.layout.mesh.size(BATCH_AXIS)

        def at(coordinate: tuple[int, ...]) -> tuple[int, ...]:
            rank = 0 if self._local_inputs else coordinate[axis]
            return (*coordinate[:axis], rank * count + microbatch, *coordinate[axis + 1 :])

        sizes = tuple(count if self._local_inputs and place == axis else size for place, size in enumerate(mesh.sizes))
        return self.places.input_part(self._inputs[spec.path], spec.placement, MeshShape(mesh.names, sizes), at)

    # -- making ----------------------------------------------------------------------------------------------------

    def _prepare(self, call: Call, *, training: bool, local_inputs: bool) -> Prepared:
        key = (call.signature, self.model.training, training, local_inputs)
        if key not in self._prepared:
            whole = self._completed(self._whole_call(call) if local_inputs else call)
            made = (whole.signature, self.model.training, training)
            if made not in self._made:
                self._made[made] = self._make(whole, training=training)
            self._prepared[key] = self._made[made]
        prepared = self._prepared[key]
        self.latest = prepared.stages[-1].program
        return prepared

    def _completed(self, call: Call) -> Call:
        """``call`` or, if it leaves out inputs that no program on this rank reads, the example that it is a part of.

        Raises:
            ValueError: if it is a part of no call that is known.
        """
        known = {path: (tuple(tensor.shape), tensor.dtype) for path, tensor in self._example.tensors.items()}
        given = {path: (tuple(tensor.shape), tensor.dtype) for path, tensor in call.tensors.items()}
        unread = {str(path[0]) for path in known} - (self.needed_inputs or frozenset())
        left_out = [path for path in known if path not in given]
        if not left_out or self.needed_inputs is None or not all(str(path[0]) in unread for path in left_out):
            return call
        if any(known.get(path) != spec for path, spec in given.items()):
            raise ValueError(
                f"this rank was given {sorted(str(path[0]) for path in given)} alone, of other shapes than compiled "
                "for: pass all inputs of the model, so that the shapes of all ranks' programs follow"
            )
        return self._example

    def _make(self, whole: Call, *, training: bool) -> Prepared:
        with self.layout.plain():
            graph = self._capture(whole)
            count = self._microbatches_of(graph) if training else 1
            programs = self._cut(graph, training=training, num_microbatches=count)
            emitted = {stage.index: emit(stage.sharded) for stage in programs.stages if self._wants(stage.index)}
            for stage in programs.stages:
                if self._is_mine(stage.index):
                    typecheck(emitted[stage.index])
        return self._assemble(programs, emitted, graph, training=training)

    def prepare(self, call: Call, *, training: bool = True) -> Prepared:
        """Make the programs of a call ahead of it."""
        return self._prepare(call, training=training, local_inputs=False)

    def _capture(self, call: Call) -> Graph:
        key = (call.signature, self.model.training)
        if key not in self._graphs:
            self._graphs[key] = capture(self.model, args=call.args, kwargs=call.kwargs, loss_fn=self.loss_fn)
        return self._graphs[key]

    def _cut(self, graph: Graph, *, training: bool, num_microbatches: int) -> StepPrograms:
        def cut(plan: Plan) -> StepPrograms:
            outputs = None if training else tuple(graph.outputs)
            like = None if training else self._first
            return step_programs(graph, plan, num_microbatches=num_microbatches, outputs=outputs, like=like)

        try:
            return cut(self.plan)
        except PlanMismatch:
            if self.planner is None or self._first is None:
                raise
            return cut(dataclasses.replace(self.planner(graph, as_seen_by(graph, self.plan)), step=self.step))

    def _is_mine(self, chunk: int) -> bool:
        return self.places.stage is None or self.step.chunks[chunk].rank == self.places.stage

    def _wants(self, chunk: int) -> bool:
        return self._is_mine(chunk) or chunk == len(self.step.chunks) - 1

    def _microbatches_of(self, graph: Graph) -> int:
        """How many micro-batches to cut this batch into: as planned, or the most below that divide it."""
        ranks = self.layout.mesh.size(BATCH_AXIS)
        sizes = [
            value.shape[dim]
            for path, value in zip(graph.input_paths, graph.inputs)
            for dim in [self._batch_dim(path)]
            if dim is not None
        ]
        count = self.step.num_microbatches
        while count > 1 and any(size % (ranks * count) for size in sizes):
            count -= 1
        return count

    def _batch_dim(self, path: Path) -> int | None:
        planned = self.plan.inputs.get(input_key(path))
        return None if planned is None else shard_dim(planned.placement[self.plan.mesh.names.index(BATCH_AXIS)])

    def _whole_call(self, call: Call) -> Call:
        """The call with global shapes, from one with a data group's samples."""
        shapes: dict[Path, tuple[int, ...]] = {}
        for path, tensor in call.tensors.items():
            dim, shape = self._batch_dim(path), list(tensor.shape)
            if dim is not None:
                shape[dim] *= self.layout.mesh.size(BATCH_AXIS)
            shapes[path] = tuple(shape)
        return call.with_shapes(shapes)

    def _assemble(
        self, programs: StepPrograms, emitted: dict[int, Program], graph: Graph, *, training: bool
    ) -> Prepared:
        stages = []
        for stage in programs.stages:
            if self._is_mine(stage.index):
                stages.append(self._stage(stage, emitted[stage.index], programs.num_microbatches, training=training))
        chained(in_order_of_use(stages))
        totals = None
        if programs.totals is not None and any(_takes_totals(stage.program) for stage in stages):
            with self.layout.plain():
                program = emit(programs.totals)
                typecheck(program)
            totals = ProgramRunner(program, self.state, num_microbatches=programs.num_microbatches)
        last = _with_unflatten(emitted[len(programs.stages) - 1], graph)
        execution = execution_of(stages, self.step, self.places, last, num_microbatches=programs.num_microbatches)
        return Prepared(tuple(stages), totals, last, programs.num_microbatches, execution, graph.unflatten)

    def _stage(self, stage: StageGraph, program: Program, num_microbatches: int, *, training: bool) -> Stage:
        runner = ProgramRunner(program, self.state, num_microbatches=num_microbatches)
        units, shared = make_units(
            stage, self.state, runner.literals, self._units, training=training or not self._units
        )

        def input_of(spec: InputSpec, microbatch: int) -> torch.Tensor:
            return self._input(spec, microbatch, program.mesh)

        return Stage(stage, runner, units=units, shared=shared, input_of=input_of, compiled=self.step.compiled)


def _uses(stages: Sequence[Stage]) -> dict[Unit, int]:
    found: dict[Unit, int] = {}
    for stage in stages:
        for unit, count in stage.uses().items():
            found[unit] = found.get(unit, 0) + count
    return found


def _takes_totals(program: Program) -> bool:
    return any(spec.path[0] == "total" for spec in program.inputs)


def _with_unflatten(program: Program, graph: Graph) -> Program:
    return dataclasses.replace(program, unflatten=graph.unflatten)
