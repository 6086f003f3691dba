"""The engine that ``ParallelModule.replan`` goes on with: the same model, without data, under another plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from planner.first_call import example_of
from runtime import ops
from runtime.calls.skeleton import skeleton
from runtime.execution.engine import Engine


def engine_under_another_plan(
    engine_for: Callable[..., Engine], before: Engine, target: Any, trains: Mapping[str, bool], **options: Any
) -> Engine:
    """An engine for ``target``, whose tensors are on meta; ``before`` stays as it is.

    Args:
        engine_for: as ``planner.compilation.engine_for``.
        trains: whether a parameter is trained from now on, by each name.
        options: of ``engine_for``; without ``example_inputs`` it is planned for calls as ``before`` was.

    Raises:
        ValueError: as ``planner.compile``.
    """
    model = _model_of(before, trains)
    if options.get("example_inputs") is None and before.example is not None:
        options["example_inputs"] = example_of(model, before.example.args, before.example.kwargs)
    random_state = ops.get_random_state()
    try:
        engine = engine_for(model, target, buffers=before.buffer_values, **options)
    finally:
        ops.set_random_state(random_state)
    engine.watch.watch_original_of(before.watch)
    return engine


def _model_of(before: Engine, trains: Mapping[str, bool]) -> nn.Module:
    """The model without data, as it was before it was planned for, and as what was set on it since."""
    model = skeleton(before.model)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(before.dtypes[name])
        parameter.requires_grad_(trains[name])
    return model
