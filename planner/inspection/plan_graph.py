"""The graph that a saved plan was made of: from the cache of captured graphs, or captured again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from passes.ir.fingerprint import fingerprint
from passes.ir.graph import Graph
from passes.plan import Plan
from passes.plan.parameter_dtype import float_dtype
from passes.plan.step_summary import seq_len_of

if TYPE_CHECKING:
    from passes.capture.call_arguments import ExampleInputs


@contextmanager
def graph_of_plan(
    plan: Plan,
    model: Any = None,
    *,
    example_inputs: ExampleInputs | None = None,
    loss_fn: Callable[..., Any] | None = None,
) -> Iterator[Graph]:
    """The graph to price ``plan`` on, inside of a ``with`` block.

    Args:
        model, example_inputs, loss_fn: of a plan that is not of a config in the library, as ``planner.plan`` takes
            them. The graph of a config that was planned before is read from the cache.

    Raises:
        ValueError: if the plan does not name its model and none is passed, or if the model is another.
    """
    from planner.planning import graph_to_plan

    with graph_to_plan(
        library_model(plan) if model is None else model,
        fuse=plan.fusion is not None,
        batch_size=plan.step.global_batch,
        seq_len=seq_len_of(plan) if example_inputs is None else None,
        example_inputs=example_inputs,
        loss_fn=loss_fn,
        dtype=float_dtype(plan),
        training=training_of(plan),
    ) as planned:
        check_model(plan, fingerprint(planned.graph))
        yield planned.graph


def training_of(plan: Plan) -> bool | None:
    """``training`` for capturing the plan's model again: a model with a loss is trained unless inference is asked for.

    None rather than True, as plans of training seldom ask for it and the cache tells the two apart.
    """
    return None if plan.training else False


def check_model(plan: Plan, model_fingerprint: str) -> None:
    """Raise ValueError unless the fingerprint is that of the plan's model."""
    if model_fingerprint != plan.fingerprint:
        raise ValueError(f"the model is another than the plan's {plan.model}: pass the model that it was made of")


def library_model(plan: Plan) -> str:
    """The library's name of the plan's model.

    Raises:
        ValueError: if the plan names none.
    """
    if not plan.config_name:
        raise ValueError(
            f"the plan of {plan.model} does not name a config of the library: pass the model (--model: the path of a "
            "config, or MODULE:FUNCTION or FILE.py:FUNCTION that returns the module)"
        )
    return plan.config_name
