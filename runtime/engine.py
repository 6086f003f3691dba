"""Making and running the programs of a parallel module: one for each set of shapes, all under one plan."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from passes.capture import capture, refuse_unsupported
from passes.chains import chain_up
from passes.emit import Program, emit
from passes.emit.program import ENTRY_POINT
from passes.fuse import as_planned, pair_rotaries
from passes.ir.graph import Graph
from passes.ir.types import I, Placement, R, SpmdType, shard_dim
from passes.losses.scalar import scalar_loss
from passes.plan import Plan
from passes.shard import PlanMismatch, ShardedGraph, input_key, shard
from runtime import ops
from runtime.adapters import apply_adapters
from runtime.agreement import Ranks, rank_in
from runtime.call_agreement import FORWARD, TRAIN_STEP, CallAgreement, describe
from runtime.calls import Call, Path, read_call
from runtime.captured import captured_alike
from runtime.changing_floats import ChangingFloats
from runtime.content import state_key
from runtime.launch.groups import flattened_group
from runtime.layout import DATA, Layout, VirtualLayout
from runtime.model_watch import ModelWatch
from runtime.outputs import loss_of, wrap_outputs
from runtime.program import Block
from runtime.program_cache import ProgramCache
from runtime.shards import Shards
from runtime.typecheck import typecheck
from runtime.units.group import DataGroup
from runtime.weights import overlaid

#: Finds a plan for a graph; the second argument is the plan whose decisions are pinned, or None.
Planner = Callable[[Graph, Plan | None], Plan]


@dataclass
class _Runnable:
    """A loaded program of a graph, and its constants once they are computed."""

    graph: Graph
    program: Program
    entry: Block
    constants: tuple[torch.Tensor, ...] | None = None


class Engine:
    """Runs calls of a model under a plan.

    Args:
        model: the original; only a copy without data is kept.
        plan: None to plan at the first call.
        planner: called for the first plan, and when a call needs nodes that the plan does not know.
        loss_fn: as in ``planner.compile``.
    """

    def __init__(
        self,
        model: nn.Module,
        shards: Shards,
        layout: Layout,
        *,
        plan: Plan | None,
        planner: Planner,
        loss_fn: Callable[..., Any] | None = None,
    ) -> None:
        apply_adapters()
        self.model = skeleton(model)
        self.shards = shards
        self.layout = layout
        self.plan = plan
        self.planner = planner
        self.loss_fn = loss_fn
        self.latest: Program | None = None
        self.watch = ModelWatch(model, self.model, loss_fn=loss_fn)
        self.floats = ChangingFloats(self.model)
        self._runnables: ProgramCache[_Runnable] = ProgramCache()
        self._frozen: list[nn.Parameter] = []
        self.ranks = Ranks(None) if isinstance(layout, VirtualLayout) else Ranks.of(layout.device_mesh)
        self.calls = CallAgreement(self.ranks, data_rank=self._data_rank(), may_leave_out=False)
        if plan is not None:
            self._start(plan)

    def _start(self, plan: Plan) -> None:
        self.plan = plan
        self.shards.place(plan)
        self._frozen = [parameter for parameter in self.shards.weights.parameters() if not parameter.requires_grad]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, local_inputs: bool = False) -> Any:
        return self._run(FORWARD, args, kwargs, local_inputs=local_inputs)

    def _run(
        self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, local_inputs: bool, weight: float = 1.0
    ) -> Any:
        self.watch.update()
        action = describe(verb, self.model, self.watch, local_inputs=local_inputs)
        call = self.calls.agree(action, lambda: self._read_ready(args, kwargs), local=local_inputs, weight=weight).whole
        call = self.floats.applied(call, lambda call: self.prepare(call, local_inputs=local_inputs).program)
        runnable = self.prepare(call, local_inputs=local_inputs)
        self._check_ready()
        if verb == TRAIN_STEP:
            scalar_loss(runnable.graph)
        program = runnable.program
        placements = [self._placement(spec.placement, local=local_inputs) for spec in program.inputs]
        tensors = self.layout.inputs([(call.tensors[i.path], where) for i, where in zip(program.inputs, placements)])
        ops.begin_step(training=verb == TRAIN_STEP)
        with self._running():
            if runnable.constants is None:
                with torch.no_grad():
                    runnable.constants = tuple(runnable.entry.constants())
            outputs = runnable.entry(*tensors, *runnable.constants)
        return wrap_outputs(program, outputs, self.layout)

    def train(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, local_inputs: bool = False, weight: float = 1.0
    ) -> torch.Tensor:
        """Forward and backward of one global batch; see ``ParallelModule.train_step``."""
        loss = loss_of(self._run(TRAIN_STEP, args, kwargs, local_inputs=local_inputs, weight=weight))
        loss.backward(torch.full_like(loss, weight))
        return loss.detach()

    def prepare(self, call: Call, *, local_inputs: bool = False) -> _Runnable:
        """The program for a call; planned, sharded, emitted, checked and loaded if it is the first of its kind."""
        shapes = (call.shapes, self.model.training, local_inputs)
        key = (call.signature, self.model.training, local_inputs, self.watch.key, state_key(self.loss_fn))
        runnable = self._runnables.get(key, lambda: self._make_for(call, local_inputs), shapes=shapes)
        self.latest = runnable.program
        return runnable

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call as ``prepare`` takes it."""
        return read_call(self.model.forward, args, kwargs, positional=self._positional())

    def _read_ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        self.watch.check(lambda name: self.shards.weights.find(name).requires_grad)
        if self.shards.placed:
            self._check_ready()
        return self.read(args, kwargs)

    def _data_rank(self) -> int:
        """The same for ranks that pass the same local inputs."""
        names = self.layout.mesh.names
        return self.layout.coordinate[names.index(DATA)] if DATA in names else rank_in()

    @property
    def all_ranks(self) -> DataGroup:
        """Every rank of the mesh."""
        return everyone_of(self.layout.device_mesh)

    @property
    def needed_inputs(self) -> frozenset[str] | None:
        """Names of the inputs that programs read: every rank takes its part of all."""
        return None

    def forget_constants(self) -> None:
        """Compute constants again at the next call: they may depend on buffers."""
        for runnable in self._runnables.values():
            runnable.constants = None

    def _positional(self) -> int | None:
        return positional_of(self.plan, self.loss_fn)

    def _make_for(self, call: Call, local_inputs: bool) -> _Runnable:
        whole = self._whole_call(call) if local_inputs else call
        with self.layout.plain():
            return self.ranks.together(lambda: self._make(whole))

    def _make(self, call: Call) -> _Runnable:
        # The modules' own modes count; gradients are kept in training and wherever there is a loss.
        graph = captured_alike(
            self.ranks,
            lambda: capture(self.model, args=call.args, kwargs=call.kwargs, loss_fn=self.loss_fn, copy_repeats=True),
        )
        sharded = self._shard(graph)
        program = emit(chain_up(pair_rotaries(sharded)))
        typecheck(program)
        weights = overlaid(self.shards.weights, self._literals(program))
        return _Runnable(graph, program, program.load()[ENTRY_POINT](weights))

    def _shard(self, graph: Graph) -> ShardedGraph:
        if self.plan is None:
            self._start(self.planner(graph, None))
        assert self.plan is not None
        graph = as_planned(graph, self.plan)
        try:
            return shard(graph, self.plan)
        except PlanMismatch:
            plan = self.planner(graph, as_seen_by(graph, self.plan))
            self.shards.adopt(plan, self.plan)
            return shard(graph, plan)

    def _literals(self, program: Program) -> dict[str, torch.Tensor]:
        """Literal constants of a program, whole on every rank."""
        return {
            spec.path: self.layout.split(spec.data.detach(), spec.placement)
            for spec in program.states
            if spec.kind == "constant"
        }

    def _whole_call(self, call: Call) -> Call:
        """The call with global shapes, from one with local parts."""
        if self.plan is None:
            raise ValueError("local_inputs=True needs a plan: give example_inputs (or batch_size) to compile()")
        shapes: dict[Path, tuple[int, ...]] = {}
        for path, tensor in call.tensors.items():
            planned = self.plan.inputs.get(input_key(path))
            shape = list(tensor.shape)
            placement = planned.placement if planned is not None else ()
            for name, size, spmd_type in zip(self.plan.mesh.names, self.plan.mesh.sizes, placement):
                dim = shard_dim(spmd_type)
                if dim is not None and self._is_local(name):
                    shape[dim] *= size
            shapes[path] = tuple(shape)
        if not any(shapes[path] != tuple(tensor.shape) for path, tensor in call.tensors.items()):
            self._refuse_samples()
        return call.with_shapes(shapes)

    def _refuse_samples(self) -> None:
        """Raise ValueError if data-parallel groups would pass their own samples to a plan that cuts no batch."""
        mesh = self.layout.mesh
        if DATA in mesh.names and mesh.size(DATA) > 1:
            raise ValueError(
                f"local_inputs=True passes each {DATA} rank's own samples, but the plan cuts no input over {DATA}: "
                f"plan with constraints={{'input:*': {{'{DATA}': 'S(0)'}}}}, or pass the global batch"
            )

    def _placement(self, placement: Placement, *, local: bool) -> Placement:
        """How an input is cut on this rank: where it is local, it is cut already."""
        if not local:
            return placement
        return tuple(R if self._is_local(axis) else where for axis, where in zip(self.layout.mesh.names, placement))

    def _is_local(self, axis: str) -> bool:
        """Whether local inputs are already cut on ``axis``: on the data axis if there is one, else on all."""
        return axis == DATA or DATA not in self.layout.mesh.names

    def _check_ready(self) -> None:
        self.shards.check()
        if any(parameter.requires_grad for parameter in self._frozen):
            raise ValueError(
                "a parameter that was frozen when the model was planned now requires a gradient: "
                "set requires_grad before planner.compile"
            )

    @contextlib.contextmanager
    def _running(self) -> Any:
        """The mesh that collectives mean, and the device on which tensors are made."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(spmd.set_current_mesh(self.layout.device_mesh))
            if self.layout.device.type != "cpu":
                stack.enter_context(torch.device(self.layout.device))
            yield


def as_seen_by(graph: Graph, plan: Plan) -> Plan:
    """What to keep of ``plan`` for another graph of the model: a tensor that is whole is R without a gradient, else I.

    Where a gradient comes in that the plan did not know of, its operators are chosen anew: only the shards stay.
    """
    with_grad = {state.path for state in graph.states if state.value.requires_grad}
    used = {state.path for state in graph.states}
    states = {
        path: dataclasses.replace(planned, placement=_whole_as(I if path in with_grad else R, planned.placement))
        if path in used
        else planned
        for path, planned in plan.states.items()
    }
    if any(path in plan.states and not plan.states[path].trainable for path in with_grad):
        return dataclasses.replace(plan, states=states, inputs={}, nodes={}, blocks=())
    return dataclasses.replace(plan, states=states)


def _whole_as(whole: SpmdType, placement: Placement) -> Placement:
    return tuple(whole if spmd_type in (R, I) else spmd_type for spmd_type in placement)


def positional_of(plan: Plan | None, loss_fn: Callable[..., Any] | None) -> int | None:
    """How many arguments the plan knows by position; None to leave them as they come."""
    if loss_fn is not None:
        return None
    if plan is None:
        return 0
    places = [int(head) for head in (name.split(".")[0] for name in plan.inputs) if head.isdigit()]
    return max(places) + 1 if places else 0


def everyone_of(device_mesh: DeviceMesh) -> DataGroup:
    """All ranks of a mesh as one group, made at the first call (which all of them must make)."""
    if device_mesh.mesh.numel() == 1:
        return DataGroup()
    if device_mesh.mesh.ndim == 1:
        return DataGroup.of(device_mesh.get_group())
    return DataGroup.of(flattened_group(device_mesh, "ranks"))


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of a model with its parameters and buffers on the meta device.

    Raises:
        CaptureError: for a model that cannot be planned for (the copy has no hooks on parameters to tell it by).
    """
    refuse_unsupported(model)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
