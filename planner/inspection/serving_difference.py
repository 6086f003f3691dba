"""What differs between two plans of generating text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from passes.plan import Plan
from passes.plan.serving import ServingPlan
from passes.plan.text_tables import format_bytes, format_rate, format_seconds
from planner.inspection.plan_difference import (
    PlanDifference,
    changed,
    difference,
    merged,
    operators_along,
    row_of,
    sum_of_bytes,
    tensors_along,
)


def difference_of(first: Plan | ServingPlan, second: Plan | ServingPlan) -> PlanDifference:
    """Compare two plans of one kind.

    Raises:
        ValueError: for a plan of a step beside one of generating text, and as ``difference``.
    """
    if isinstance(first, ServingPlan) and isinstance(second, ServingPlan):
        return serving_difference(first, second)
    if isinstance(first, ServingPlan) or isinstance(second, ServingPlan):
        serving, other = ("first", "second") if isinstance(first, ServingPlan) else ("second", "first")
        raise ValueError(
            f"the {serving} plan is of generating text and the {other} of a training step: compare two of one kind"
        )
    return difference(first, second)


def serving_difference(first: ServingPlan, second: ServingPlan) -> PlanDifference:
    """Compare two plans of generating text, of one model or of two."""
    axes = {axis for plan in (first, second) for axis, size in plan.mesh.as_dict().items() if size > 1}
    return PlanDifference(
        choices=changed(_choices(first), _choices(second)),
        figures=tuple(_figures(first, second)),
        tensors=merged(changed(_tensors(first, axes), _tensors(second, axes))),
        operators=merged(changed(_operators(first, axes), _operators(second, axes))),
        of="One answer",
    )


def _choices(plan: ServingPlan) -> dict[str, str]:
    return {
        "model": plan.token.model,
        "cluster": str(plan.token.cluster.get("name", "")),
        **{axis: str(size) for axis, size in plan.mesh.as_dict().items()},
        "samples at once": f"{plan.batch:,}",
        "tokens of a prompt": f"{plan.prompt_len:,}",
        "tokens of an answer": f"{plan.new_tokens:,}",
    }


def _figures(first: ServingPlan, second: ServingPlan) -> Iterator[tuple[str, str, str, str]]:
    figures: Mapping[str, tuple[Callable[[ServingPlan], float], Callable[[float], str]]] = {
        "first token": (lambda plan: plan.first_token_seconds, format_seconds),
        "first token, bound": (lambda plan: plan.first_token_bound, format_seconds),
        "each token": (lambda plan: plan.token_seconds, format_seconds),
        "each token, bound": (lambda plan: plan.token_bound, format_seconds),
        "whole answer": (lambda plan: plan.seconds, format_seconds),
        "tokens per second": (lambda plan: plan.tokens_per_second, format_rate),
        "weights on a device": (lambda plan: plan.weight_bytes, format_bytes),
        "cache on a device": (lambda plan: plan.cache_bytes, format_bytes),
        "bytes in collectives of a prompt": (lambda plan: sum_of_bytes(plan.prompt), format_bytes),
        "bytes in collectives of a token": (lambda plan: sum_of_bytes(plan.token), format_bytes),
    }
    for name, (figure, form) in figures.items():
        yield row_of(name, figure(first), figure(second), form)


def _tensors(plan: ServingPlan, axes: set[str]) -> dict[str, str]:
    return {**tensors_along(axes, plan.prompt), **tensors_along(axes, plan.token)}


def _operators(plan: ServingPlan, axes: set[str]) -> dict[str, str]:
    return {
        f"{phase}: {key}": along
        for phase, of_phase in plan.phases.items()
        for key, along in operators_along(axes, of_phase).items()
    }
