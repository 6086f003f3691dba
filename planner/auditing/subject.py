"""The subject of an audit: a plan, the graph of its model, and its cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cost_models import Cluster
from passes.fuse import Fused
from passes.ir.errors import CaptureError
from passes.ir.fingerprint import fingerprint
from passes.ir.graph import Graph
from passes.plan import Plan, TensorPlan
from passes.plan.step_summary import seq_len_of

if TYPE_CHECKING:
    import torch

    from passes.capture.call_arguments import ExampleInputs


@dataclass(frozen=True)
class AuditSubject:
    """What the checks of an audit look at.

    Attributes:
        captured: the model's graph at the plan's global batch; ``graph``: as the plan was made of it, fused if that is.
        fused: what the pattern pass did, None for a plan without fused operators.
        config: the model's transformers config, None if it has none.
    """

    plan: Plan
    captured: Graph
    graph: Graph
    fused: Fused | None
    cluster: Cluster
    config: Any = None


def subject_of(
    plan: Plan,
    model: Any = None,
    *,
    example_inputs: ExampleInputs | None = None,
    loss_fn: Callable[..., Any] | None = None,
    cluster: Cluster | None = None,
) -> AuditSubject:
    """Capture the model of ``plan``, at the shapes in the plan unless there are ``example_inputs``.

    Raises:
        ValueError: if the plan does not name its model and none is passed, or if the model is another.
        CaptureError: if the model cannot be captured.
    """
    from planner.planning import config_of

    model = _named_model(plan) if model is None else model
    try:
        captured = _captured(plan, model, example_inputs=example_inputs, loss_fn=loss_fn)
    except CaptureError as error:
        if loss_fn is not None:
            raise
        raise CaptureError(f"{error}; if the plan was made with a loss_fn, pass the loss_fn here, too") from error
    _check_same_model(plan, captured)
    fused = None
    if plan.fusion is not None:
        import runtime.kernels  # noqa: F401  (registers the operators)
        from passes.fuse import fuse

        fused = fuse(captured, tolerance=plan.fusion.tolerance, registered=plan.fusion.registered)
    graph = captured if fused is None else fused.graph
    on = cluster or Cluster.from_dict(plan.cluster)
    return AuditSubject(plan, captured, graph, fused, on, config_of(model))


def _captured(
    plan: Plan,
    model: Any,
    *,
    example_inputs: ExampleInputs | None,
    loss_fn: Callable[..., Any] | None,
) -> Graph:
    """The graph of ``model`` as it was planned: on a config's own batch where the plan's inputs are of that."""
    from planner.compilation import planned_inputs
    from planner.planning import as_module, capture_for_planning

    module = as_module(model, dtype=_float_dtype(plan.states))
    inputs: dict[str, Any] = {"example_inputs": planned_inputs(plan) if example_inputs is None else example_inputs}
    if example_inputs is None and _is_own_batch(plan, module):
        inputs = {"batch_size": plan.step.global_batch, "seq_len": seq_len_of(plan)}
    return capture_for_planning(module, loss_fn=loss_fn, training=plan.training, **inputs)


def _is_own_batch(plan: Plan, module: torch.nn.Module) -> bool:
    """Whether the plan's inputs are the tensors of a batch that is made up from the module's config.

    Such a batch has more than tensors: flags, and numbers that the model's Python reads.
    """
    from planner.planning import example_inputs_of

    try:
        batch = example_inputs_of(module, batch_size=plan.step.global_batch, seq_len=seq_len_of(plan))
    except ValueError:  # no config, or one whose task is not in the library
        return False
    shapes = {name: tuple(value.shape) for name, value in batch.items() if hasattr(value, "shape")}
    return all(shapes.get(name) == value.shape for name, value in plan.inputs.items())


def _named_model(plan: Plan) -> str:
    """The name in the config library; nothing else that a file says is looked for on this machine."""
    from planner.library import config_names

    if plan.config_name not in config_names():
        what = (
            f"names no config of the library ({plan.config_name!r})" if plan.config_name else "does not name its model"
        )
        raise ValueError(
            f"the plan of {plan.model} {what}: pass the model (--model: a library name, the path of a config, or "
            "MODULE:FUNCTION or FILE.py:FUNCTION that returns the module)"
        )
    return plan.config_name


def _float_dtype(states: Mapping[str, TensorPlan]) -> str | None:
    """The dtype of most floating-point parameters."""
    counts = Counter(state.dtype for state in states.values() if state.trainable and "float" in state.dtype)
    return counts.most_common(1)[0][0] if counts else None


def _check_same_model(plan: Plan, graph: Graph) -> None:
    """Raise ValueError if the parameters, inputs or outputs of ``graph`` are not those that ``plan`` is of."""
    if fingerprint(graph) != plan.fingerprint:
        raise ValueError(
            f"the plan is of another model: {plan.model} with fingerprint {plan.fingerprint}, not this "
            f"{graph.model_name} with {fingerprint(graph)} (other paths, shapes or dtypes of parameters); pass the "
            "model that it was made of"
        )
    inputs = {".".join(map(str, path)) for path in graph.input_paths}
    for what, planned, captured in (
        ("inputs", set(plan.inputs), inputs),
        ("outputs", set(plan.outputs), {*graph.outputs}),
    ):
        if planned != captured:
            raise ValueError(
                f"the plan has {what} {', '.join(sorted(planned))}; this {graph.model_name} has "
                f"{', '.join(sorted(captured))}: pass the loss_fn and example_inputs that it was planned with"
            )
