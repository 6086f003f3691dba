"""A mesh given without inputs, or the best one: checked by ``compile``, planned at the first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from passes.capture import refuse_unsupported
from passes.ir.types import MeshShape
from planner.checkpointed_models import enables_checkpoints
from planner.first_call import planned_at_first_call
from planner.planning import as_cluster
from planner.rank_comparison import check_compiled_alike, ranks_of
from planner.targets import Target, axis_sizes, check_options, plans_step, process_group_as_cluster, read_target
from planner.whole_step.candidates.demands import fixed_axes
from runtime.execution.engine import Engine
from runtime.module.parallel_module import ParallelModule


def is_step_on_axes(model: nn.Module, mesh: Target, options: Mapping[str, Any]) -> bool:
    """Whether a mesh is given by sizes of axes, and other options or the model ask for a whole step."""

    def axes_of_step() -> MeshShape | None:
        refuse_unsupported(model)
        target = read_target(mesh)
        asks = options.get("precision") is not None or enables_checkpoints(model)
        return target if isinstance(target, MeshShape) and (asks or plans_step(target, options)) else None

    ranks = ranks_of(mesh)
    axes = ranks.together(axes_of_step)
    # What comes next is compared in full, but by other messages.
    ranks.check_alike({"the mesh": "one without a whole step" if axes is None else f"a whole step on {axes}"})
    return axes is not None


def planned_later(
    model: nn.Module, mesh: Target | None, options: dict[str, Any], engine_for: Callable[..., Engine]
) -> ParallelModule:
    """A parallel module whose step is planned at its first call: on axes of given sizes, or (None) the best."""
    target = None if mesh is None else read_target(mesh)
    if isinstance(target, MeshShape):
        _check_alike_on_axes(model, target, options)
    fix, hardware = options.pop("fix", None), options.pop("cluster")
    if isinstance(target, MeshShape):
        fix = fixed_axes(
            axis_sizes(target), {"recompute": "full"} if fix is None and enables_checkpoints(model) else fix
        )
    devices = process_group_as_cluster()
    if hardware is not None:
        devices = as_cluster(hardware, num_devices=devices.num_devices)
    return planned_at_first_call(model, devices, partial(engine_for, **options), options["loss_fn"], fix)


def _check_alike_on_axes(model: nn.Module, target: MeshShape, options: Mapping[str, Any]) -> None:
    """Compare and check now what is planned later."""
    own = ("constraints", "memory_limit", "precision", "fuse", "dynamic", "loss_fn", "cluster", "optimizer")
    compared = {name: value for name, value in options.items() if name != "loss_fn"}
    check_compiled_alike(
        ranks_of(target), model, target=target, plan=None, loss_fn=options["loss_fn"], options=compared
    )
    check_options({name: value for name, value in options.items() if name not in own}, step=True)
