"""Running a step: training steps, and calls as the original's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from passes.emit import Program
from passes.emit.emitted_program import InputSpec
from passes.ir.graph import Graph
from passes.ir.types import MeshShape, Placement, R
from passes.pipeline_cut import BATCH_AXIS
from passes.plan import Plan
from passes.plan.plan_data import TensorPlan
from runtime import ops
from runtime.agreement.call_agreement import FORWARD, TRAIN_STEP, CallAgreement, describe
from runtime.agreement.no_calls import NoCalls
from runtime.agreement.ranks_together import Ranks, rank_in
from runtime.calls.changing_floats import ChangingFloats
from runtime.calls.model_call import ModelCall, Path, positional_of, read_call
from runtime.calls.model_watch import ModelWatch
from runtime.calls.skeleton import skeleton
from runtime.data.host_copies import HostCopies
from runtime.execution.batch_split import BatchSplit
from runtime.execution.chunk import InputOf, in_order_of_use, uses_of
from runtime.execution.differentiated_loss import differentiable, without_gradients
from runtime.execution.experts_without_tokens import LoopedExpertParameters
from runtime.execution.gradients_of_parameters import GradientsOfParameters
from runtime.execution.mixed_precision import computing_in
from runtime.execution.outputs import counted_once, with_all_shares, wrap_outputs
from runtime.execution.prepared_programs import Prepared
from runtime.execution.program_builder import Maker
from runtime.execution.rank_mapping import Places, local_axes
from runtime.execution.replanning import Planner
from runtime.execution.step_state import StepState
from runtime.kernels.routing_listeners import unheard
from runtime.program_tools.adapters import apply_adapters
from runtime.zero.group import StateGroup, everyone_of


class Engine:
    """Runs calls of a model under a plan: of a whole step, or on a given mesh.

    Args:
        model: the original; only a copy without data is kept.
        plan: None to plan at the first call.
        example: a call of the model with a global batch, from which the first programs are made.
        loss_fn: as in ``planner.compile``.
        compute: dtype that the plan computes in, if it is not that of the model's parameters.
        planner: called for the first plan, and when a call needs nodes that the plan does not know.
        buffers: whole values of the model's buffers, by name; None for its own.
        waits: whether this rank has no part in any plan: calls are refused.
    """

    def __init__(
        self,
        model: nn.Module,
        places: Places,
        *,
        plan: Plan | None,
        example: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        loss_fn: Callable[..., Any] | None = None,
        compute: torch.dtype | None = None,
        planner: Planner | None = None,
        buffers: Mapping[str, torch.Tensor] | None = None,
        dynamic: bool = False,
        waits: bool = False,
    ) -> None:
        apply_adapters()
        #: Of the original's parameters, by each name.
        self.dtypes = {name: one.dtype for name, one in model.named_parameters(remove_duplicate=False)}
        self.model = skeleton(model) if compute is None else computing_in(model, compute)
        self.watch = ModelWatch(model, self.model, loss_fn=loss_fn)
        self.floats = ChangingFloats(self.model)
        self.compute = compute
        self.places = places
        self.layout = places.layout
        self.loss_fn = loss_fn
        #: What ``runtime.generation`` keeps from one call to the next.
        self.generation: Any = None
        self._inputs: dict[Path, torch.Tensor] = {}
        self._on_device: dict[_InputPart, torch.Tensor] = {}
        self._totals: dict[str, torch.Tensor] = {}
        self._local_inputs = False
        self._split = BatchSplit(1, 1)
        self.ranks = Ranks(None) if places.stage is None else Ranks.of(places.device_mesh)
        # Ranks of a pipeline need not pass what their own stage does not read.
        self._may_leave_out = plan is not None and plan.step.decides_units
        self.waits = waits
        self.calls = (
            NoCalls()
            if waits
            else CallAgreement(self.ranks, data_rank=self._data_rank(), may_leave_out=self._may_leave_out)
        )
        self.state = StepState(model, places)
        self._maker = Maker(
            self.model,
            self.state,
            plan,
            watch=self.watch,
            example=None if example is None else self._read(*example, plan=plan),
            loss_fn=loss_fn,
            planner=planner,
            input_of=self._input_of,
            ranks=self.ranks,
            dynamic=dynamic,
            buffers=buffers or {name: buffer.detach() for name, buffer in model.named_buffers()},
        )
        self._are_buffers_stale = False

    def _data_rank(self) -> int:
        """A number that is the same for ranks that pass the same local inputs."""
        names = self.layout.mesh.names
        return self.layout.coordinate[names.index(BATCH_AXIS)] if BATCH_AXIS in names else rank_in()

    @property
    def plan(self) -> Plan | None:
        """The plan; None before the first call where there was none."""
        return self._maker.plan

    @property
    def example(self) -> ModelCall | None:
        """A call with a global batch, without data; None if none is known yet."""
        return self._maker.example

    @property
    def buffer_values(self) -> Mapping[str, torch.Tensor]:
        """Whole buffers by name, as programs were traced with them."""
        return self._maker.cases.buffers

    @property
    def latest(self) -> Program | None:
        """The program of this rank that was made or run last."""
        latest = self._maker.latest
        return None if latest is None else latest.stages[-1].program

    @property
    def needed_inputs(self) -> frozenset[str] | None:
        """Names of the inputs that this rank's programs read; None if it takes its part of all."""
        return self._maker.needed_inputs if self._may_leave_out else None

    @property
    def all_ranks(self) -> StateGroup:
        """Every rank of the step."""
        return everyone_of(self.places.device_mesh)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCall:
        """A call in the form that programs are made for."""
        return self._read(args, kwargs, plan=self.plan)

    def graph_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        """The graph of a call with a global batch, whose tensors may be without data; all ranks must ask for it."""
        return self._maker.graph_of(self.read(args, kwargs))

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, plan: Plan | None) -> ModelCall:
        return read_call(self.model.forward, args, kwargs, positional=positional_of(plan, self.loss_fn))

    def train(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, local_inputs: bool = False, weight: float = 1.0
    ) -> torch.Tensor:
        """Forward and backward of one global batch; see ``ParallelModule.train_step``."""
        call, prepared = self._prepare(
            TRAIN_STEP, args, kwargs, local_inputs=local_inputs, training=True, weight=weight
        )
        return self._step(call, prepared, local_inputs, weight)

    def _step(self, call: ModelCall, prepared: Prepared, local_inputs: bool, weight: float) -> torch.Tensor:
        ops.begin_step(training=True)
        prepared.effects.write_parameters(self.state)
        with (
            self._inputs_of(call, prepared, local_inputs),
            ops.stored_at_end(),
            self._looped_experts(prepared).step(),
            self.state.tied_gradients_summed(),
            torch.enable_grad(),
        ):
            units = in_order_of_use(prepared.stages)
            for unit, uses in uses_of(prepared.stages).items():
                unit.begin(uses * prepared.split.num_microbatches)
            self._totals = self._sum_totals(prepared)
            self._totals |= self._count(prepared)
            losses = prepared.execution.train(weight / prepared.split.copies)
            for unit in units:
                unit.finish()
        return self._loss(prepared, losses)

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        local_inputs: bool = False,
        parameters: Callable[[], Sequence[torch.Tensor]] = tuple,
    ) -> Any:
        """The model's outputs; with a pipeline the loss alone has gradients, in training mode.

        ``parameters`` gives those trained ones, as users see them, whose gradients a script may ask autograd for. They
        are asked for when the call's programs are prepared, which may cut the weights anew.
        """
        is_training = self.model.training and torch.is_grad_enabled()
        training = None if is_training and self.places.num_stages > 1 else False
        call, prepared = self._prepare(FORWARD, args, kwargs, local_inputs=local_inputs, training=training)
        if prepared.trains:
            path, rebuild = prepared.last.outputs[0].path, prepared.last.unflatten or dict
            step = partial(self._step, call, prepared, local_inputs, 1.0)
            return differentiable(path, rebuild, self._trained(), parameters(), step)
        ops.begin_step(training=is_training)  # as with a pipeline, where such a call is a step: the draws are the same
        prepared.effects.write_parameters(self.state)
        read_later = prepared.effects.buffers_here(self.state) if torch.is_grad_enabled() else ()
        with self._inputs_of(call, prepared, local_inputs), ops.stored_at_end(read_later):
            for unit in in_order_of_use(prepared.stages):
                unit.refresh_needed()  # nothing tells when an owner's memory is written (an optimizer, ``.data``, EMA)
            outputs = self._looped_experts(prepared).forward(prepared.execution.forward)
            for unit in () if torch.is_grad_enabled() else in_order_of_use(prepared.stages):
                unit.drop_ahead()
        if not prepared.split.is_shared:
            outputs = counted_once(outputs, prepared.split.copies)
        if self.places.num_stages > 1 and torch.is_grad_enabled() and self._trains_any:
            outputs = without_gradients(outputs)
        leaves = [leaf for unit in in_order_of_use(prepared.stages) for leaf in unit.leaves]
        shown = parameters() if torch.is_grad_enabled() else ()
        return wrap_outputs(prepared.last, outputs, self.layout, GradientsOfParameters(shown, leaves))

    def _looped_experts(self, prepared: Prepared) -> LoopedExpertParameters:
        def find(path: str) -> nn.Parameter | None:
            owner = self.state.find(path) if self.state.is_here(path) else None
            return owner if isinstance(owner, nn.Parameter) else None

        if prepared.looped_experts is None:
            graphs = [stage.graph for stage in prepared.stages]
            compiled = self.plan is not None and self.plan.step.compiled
            prepared.looped_experts = LoopedExpertParameters(graphs, self.ranks, compiled=compiled, find=find)
        return prepared.looped_experts

    @property
    def _trains_any(self) -> bool:
        return any(self.state.trains(info.names[0]) for info in self.state.everything() if info.is_parameter)

    def _trained(self) -> Iterator[nn.Parameter]:
        """What this rank has of the parameters that are trained."""
        for info in self.state.here():
            owner = self.state.find(info.names[0])
            if isinstance(owner, nn.Parameter) and owner.requires_grad:
                yield owner

    def _prepare(
        self,
        verb: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        local_inputs: bool,
        training: bool | None,
        weight: float = 1.0,
    ) -> tuple[ModelCall, Prepared]:
        """This rank's call, and the programs for the call that all ranks make together; ``training``: see ``Maker``."""

        def read() -> ModelCall:
            self.watch.check(self.state.trains)
            self.state.check()
            return self.read(args, kwargs)

        self.watch.update()
        action = describe(verb, self.model, self.watch, local_inputs=local_inputs)
        agreed = self.calls.agree(action, read, reads=self.needed_inputs, local=local_inputs, weight=weight)

        if self._are_buffers_stale:
            self._maker.refresh_buffers()
            self._are_buffers_stale = False
        own = agreed.own.tensors

        def prepare(call: ModelCall) -> Prepared:
            scalars = {path: tensor for path, tensor in call.tensors.items() if path not in own}
            return self._maker.prepare(call, training=training, local_inputs=local_inputs, values={**scalars, **own})

        whole = self.floats.applied(agreed.whole, lambda call: prepare(call).last)
        scalars = {path: tensor for path, tensor in whole.tensors.items() if path not in agreed.whole.tensors}
        own_call = agreed.own
        if scalars:
            own_call = dataclasses.replace(own_call, tensors={**own_call.tensors, **scalars})
        prepared = prepare(whole)
        self._are_buffers_stale = not prepared.effects.buffers.isdisjoint(self._maker.cases.buffers_read)
        if agreed.is_compared:
            self.calls.confirm(lambda: _check_passed(own_call, prepared))
        return own_call, prepared

    def programs_of(
        self,
        model: nn.Module,
        *,
        input_of: Callable[[Program], InputOf],
        scratch: Mapping[str, torch.Tensor],
        planned: Mapping[str, TensorPlan],
    ) -> Maker:
        """What makes programs of another model with the same weights; see ``Maker.for_model``."""
        return self._maker.for_model(model, input_of=input_of, scratch=scratch, planned=planned)

    def weights_changed(self) -> None:
        """This rank's state was changed other than by training: recompute what depends on it."""
        self._are_buffers_stale = True
        for prepared in self._maker.all_made:
            prepared.forget_constants()

    forget_constants = weights_changed

    @contextlib.contextmanager
    def _inputs_of(self, call: ModelCall, prepared: Prepared, local_inputs: bool) -> Iterator[None]:
        self._inputs, self._local_inputs, self._split = dict(call.tensors), local_inputs, prepared.split
        if not prepared.split.is_shared:
            self._inputs = with_all_shares(self._inputs, prepared.split.copies)
        try:
            if self.layout.copies is not None:
                self._on_device = self._bring_inputs(self.layout.copies, prepared)
            yield
        finally:
            self._inputs, self._totals, self._on_device = {}, {}, {}

    def _bring_inputs(self, copies: HostCopies, prepared: Prepared) -> dict[_InputPart, torch.Tensor]:
        """What this rank's programs read of the batch, of all micro-batches."""
        parts = {
            (spec.path, spec.placement, program.mesh, microbatch): self._host_part(spec, microbatch, program.mesh)
            for program in prepared.programs
            for spec in program.inputs
            if spec.path in self._inputs
            for microbatch in range(prepared.split.num_microbatches)
        }
        brought = copies.bring(list(parts.values()), otherwise=self.places.to_device)
        return dict(zip(parts, brought))

    def _sum_totals(self, prepared: Prepared) -> dict[str, torch.Tensor]:
        """The totals of this batch: of all micro-batches and data ranks."""
        if prepared.totals is None:
            return {}
        runner, sums = prepared.totals, dict[str, torch.Tensor]()
        with torch.no_grad():
            for microbatch in range(prepared.split.num_microbatches):
                tensors = [self._input(spec, microbatch, runner.program.mesh) for spec in runner.program.inputs]
                for name, part in runner(tensors, microbatch).items():
                    sums[name] = sums[name] + part if name in sums else part
            if not prepared.split.is_shared:
                return sums
            return {name: self.places.sum_over_batch_ranks(part) for name, part in sums.items()}

    def _count(self, prepared: Prepared) -> dict[str, torch.Tensor]:
        """The totals of this batch that come from activations, by a pass without gradients."""
        if prepared.counting is None:
            return {}
        with unheard():
            sums = prepared.counting.execution.sums()
        if not prepared.split.is_shared:
            return sums
        return {name: self.places.sum_over_batch_ranks(part) for name, part in sums.items()}

    def _loss(self, prepared: Prepared, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The batch's loss on all ranks from the micro-batches' parts on those of the last chunk."""
        spec = prepared.last.outputs[0]
        local: torch.Tensor = (
            sum(losses[1:], losses[0])
            if losses
            else torch.zeros(spec.local_shape, dtype=getattr(torch, spec.dtype), device=self.layout.device)
        )
        whole = self.layout.join(local.detach(), self._over_ranks(spec.placement, prepared)) if losses else local
        return self.places.from_stage(whole, self._maker.step.chunks[-1].rank)

    def _over_ranks(self, placement: Placement, prepared: Prepared) -> Placement:
        """``placement`` on the ranks' own mesh, of what was summed over micro-batches."""
        if prepared.split.is_shared:
            return placement
        names = self.layout.mesh.names
        return tuple(R if name == BATCH_AXIS else spmd_type for name, spmd_type in zip(names, placement))

    def _input_of(self, program: Program) -> InputOf:
        return lambda spec, microbatch: self._input(spec, microbatch, program.mesh)

    def _input(self, spec: InputSpec, microbatch: int, mesh: MeshShape) -> torch.Tensor:
        """This rank's part of an input of a program for a micro-batch."""
        if spec.path[0] == "total":
            return self._totals[str(spec.path[1])]
        part = self._on_device.get((spec.path, spec.placement, mesh, microbatch))
        return self.places.to_device(self._host_part(spec, microbatch, mesh)) if part is None else part

    def _host_part(self, spec: InputSpec, microbatch: int, mesh: MeshShape) -> torch.Tensor:
        """A view of that part where the caller's tensor is."""
        # A program's batch axis counts micro-batches too.
        split = self._split
        counts = [split.num_microbatches if name == BATCH_AXIS else 1 for name in mesh.names]
        alone = self._local_inputs or not split.is_shared
        local = [alone and name in local_axes(mesh) for name in mesh.names]

        def at(coordinate: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(
                (0 if is_local else rank) * count + (microbatch if count > 1 else 0)
                for rank, count, is_local in zip(coordinate, counts, local)
            )

        if any(local):
            sizes = [count if is_local else size for count, size, is_local in zip(counts, mesh.sizes, local)]
            mesh = MeshShape(mesh.names, tuple(sizes))
        return self.places.input_part(self._inputs[spec.path], spec.placement, mesh, at)


#: Path and placement of an input of programs on a mesh, and the micro-batch.
_InputPart = tuple[Path, Placement, MeshShape, int]


def _check_passed(call: ModelCall, prepared: Prepared) -> None:
    left_out = [path for path in prepared.reads if path not in call.tensors]
    if left_out:
        name = ".".join(map(str, min(left_out, key=str)))
        raise ValueError(
            f"input {name!r} was passed on other ranks, but not on this one, whose programs read it: every rank must "
            "pass at least the inputs in its parallel.needed_inputs"
        )
