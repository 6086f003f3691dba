"""The engine that ``ParallelModule.replan`` goes on with: the same model, without data, under another plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from passes.capture.call_arguments import CallArguments
from passes.ir.types import MeshShape
from planner.targets import num_devices_of
from runtime import ops
from runtime.agreement.ranks_together import rank_in
from runtime.calls.skeleton import skeleton
from runtime.execution.engine import Engine
from runtime.execution.rank_mapping import RankPlaces
from runtime.launch.groups import mesh_of_axes
from runtime.module.meeting import Facts

#: Options of ``planner.compile`` that are the same under every plan of a training.
LASTING = ("loss_fn", "precision", "fuse", "dynamic", "optimizer")


@dataclass(frozen=True)
class ModelReplanner:
    """Makes engines from the present one.

    Args:
        engine_for: as ``planner.compilation.engine_for``.
        options: of ``engine_for``: those of ``LASTING``.
    """

    engine_for: Callable[..., Engine]
    options: dict[str, Any] = field(default_factory=dict)

    def num_devices(self, target: Any) -> int:
        """How many devices a target names."""
        return num_devices_of(target)

    def engine(self, before: Engine, target: Any, facts: Facts, ranks: Sequence[int] | None, **options: Any) -> Engine:
        """An engine for ``target``, whose tensors are on meta; ``before`` stays as it is.

        Args:
            facts: what ranks at work say.
            ranks: as of ``engine_for``.
            options: of ``engine_for``; without ``example_inputs`` it is planned for calls as before.

        Raises:
            ValueError: as ``planner.compile``.
        """
        model = _model_of(before)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(facts.trains[name])
        if options.get("example_inputs") is None and facts.example is not None:
            options["example_inputs"] = CallArguments(*facts.example.args, **facts.example.kwargs)
        random_state = ops.get_random_state()
        try:
            engine = self.engine_for(model, target, buffers=facts.buffers, ranks=ranks, **self.options, **options)
        finally:
            ops.set_random_state(random_state)
        engine.watch.watch_original_of(before.watch)
        return engine

    def waiting(self, before: Engine) -> Engine:
        """The engine of this rank when it has no part in the plan."""
        engine = waiting_engine(
            _model_of(before), before.layout.device.type, loss_fn=before.loss_fn, compute=before.compute
        )
        engine.watch.watch_original_of(before.watch)
        return engine


def waiting_engine(model: nn.Module, device_type: str, *, loss_fn: Any, compute: torch.dtype | None) -> Engine:
    """An engine that holds nothing and refuses all calls.

    Args:
        model: on meta.
    """
    alone = mesh_of_axes(device_type, torch.tensor([rank_in()], device="cpu"), ("dp",))
    places = RankPlaces(alone, MeshShape(("dp",), (1,)))
    return Engine(model, places, plan=None, loss_fn=loss_fn, compute=compute, waits=True)


def _model_of(before: Engine) -> nn.Module:
    """The model without data, as it was before it was planned for, and as what was set on it since."""
    model = skeleton(before.model)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(before.dtypes[name])
    return model
