"""Planning at the first call: until then a module has whole weights; its inputs are what the mesh is planned for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from cost_models import Cluster
from cost_models.text import counted
from passes.capture.call_arguments import CallArguments
from passes.ir.types import MeshShape
from planner.targets import as_device_mesh
from runtime.agreement.call_agreement import FORWARD
from runtime.execution.engine import Engine
from runtime.execution.rank_mapping import RankPlaces
from runtime.mesh.first_rank import is_first_rank
from runtime.module.parallel_module import ParallelModule


def planned_at_first_call(
    model: nn.Module,
    cluster: Cluster,
    engine_for: Callable[..., Engine],
    loss_fn: Callable[..., Any] | None,
    fix: Mapping[str, Any] | None,
) -> ParallelModule:
    """A parallel module that ``engine_for(model, cluster, example_inputs=…, fix=…)`` plans at its first call.

    Its parameters stay the same objects, so an optimizer may be made before.

    Raises:
        ValueError: as ``planner.compile``, for what the model shows without a call.
    """
    device_mesh, shape = as_device_mesh(MeshShape(("dp",), (cluster.num_devices,)))
    whole = Engine(model, RankPlaces(device_mesh, shape), plan=None, loss_fn=loss_fn)

    def plan(before: Engine, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Engine:
        fixed = dict(fix or {})
        if verb == FORWARD:  # a loss that the caller differentiates must be on every rank
            fixed.setdefault("pp", 1)
        with _as_left(model, before):
            engine = engine_for(model, cluster, example_inputs=CallArguments(*args, **kwargs), fix=fixed or None)
        _fill(engine, before, model)
        engine.watch.continue_from(before.watch)
        if is_first_rank(engine.places.device_mesh):
            _announce(engine, verb)
        return engine

    return ParallelModule(whole, plan)


@contextlib.contextmanager
def _as_left(model: nn.Module, before: Engine) -> Iterator[None]:
    """Inside the block ``model`` has the modes, and is frozen, as the parallel module made of it was meanwhile."""
    modes = [(module, module.training) for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for module, lean in zip(model.modules(), before.model.modules(), strict=True):
        module.training = lean.training
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(before.state.trains(name))
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)


def _fill(engine: Engine, before: Engine, model: nn.Module) -> None:
    """Take what was loaded since into tensors that ``model`` has on meta; the others share its memory."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for info in before.state.everything():
        own = before.state.find(info.names[0])
        if tensors[info.names[0]].is_meta and not own.is_meta:
            engine.state.load(info.names[0], own)


def _announce(engine: Engine, verb: str) -> None:
    plan = engine.plan
    assert plan is not None
    axes = ", ".join(f"{axis}={size}" for axis, size in plan.step.axes.items() if size > 1) or "nothing divided"
    chose_one_stage = verb == FORWARD and plan.step.num_devices > 1 and plan.step.axes.get("pp", 1) == 1
    alone = " (pp=1: train_step plans pipelines too)" if chose_one_stage else ""
    print(
        f"meshwright: {plan.model} planned at its first call for {counted(plan.step.num_devices, 'device')} of "
        f"{plan.cluster.get('name', 'this machine')}: {axes}{alone}",
        file=sys.stderr,
    )
