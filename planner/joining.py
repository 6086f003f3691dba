"""``planner.join``: a rank that joins a training that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from planner.compilation import engine_for, in_place_of
from planner.engine_under_another_plan import ModelReplanner, waiting_engine
from runtime.calls.model_watch import ModelWatch
from runtime.calls.skeleton import skeleton
from runtime.execution.mixed_precision import compute_dtype
from runtime.launch.process import init
from runtime.module.parallel_module import ParallelModule


def join(
    model: nn.Module,
    *,
    loss_fn: Callable[..., Any] | None = None,
    precision: str | torch.dtype | None = None,
    fuse: bool = True,
    dynamic: bool = False,
    optimizer: str | None = None,
) -> ParallelModule:
    """A parallel module without work (``has_work`` is False) on a rank that joins a training that runs.

    It holds nothing, shows the model's parameters without data, so that an optimizer can be made of them, and refuses
    calls. When all ranks of the job call ``replan``, this one gets its part from those at work: weights, optimizer
    state and random state, and the states of what is handed over as ``carried``. Nothing is communicated here.

    Args:
        model: as the others gave it to ``planner.compile``; its weights do not count.
        loss_fn, precision, fuse, dynamic, optimizer: as the others gave them.

    Example:
        >>> parallel = planner.join(model)
        >>> optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
        >>> parallel.replan("dp=4", optimizer)      # the other three call it, too

    Raises:
        CaptureError: for a model that cannot be planned for.
    """
    compute = None if precision is None else compute_dtype(precision)
    engine = waiting_engine(skeleton(model), init().device.type, loss_fn=loss_fn, compute=compute)
    engine.watch.watch_original_of(ModelWatch(model, engine.model, loss_fn=loss_fn))
    lasting: dict[str, Any] = {"loss_fn": loss_fn, "precision": precision, "fuse": fuse, "dynamic": dynamic}
    lasting["optimizer"] = optimizer
    return in_place_of(model, ParallelModule(engine), None, ModelReplanner(engine_for, lasting))
