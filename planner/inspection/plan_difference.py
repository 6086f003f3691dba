"""What differs between two plans: choices, seconds by cause, memory, and the types of tensors and operators."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from cost_models.short_text import ShortRepr
from cost_models.text import counted
from passes.plan import Plan
from passes.plan.step_plan import StepPlan
from passes.plan.step_summary import tokens_per_sample
from passes.plan.text_tables import format_bytes, format_seconds, format_table, table_in_width
from planner.inspection.simulated_step import simulated_step
from planner.inspection.time_waterfall import waterfall

#: Rows of tensors and operators that are shown unless all are asked for.
MAX_ROWS = 20


@dataclass(frozen=True, repr=False)
class PlanDifference(ShortRepr):
    """Rows of (what, in the first plan, in the second): only what differs, but seconds and memory always.

    ``of``: what the figures are of.
    """

    choices: tuple[tuple[str, str, str], ...]
    figures: tuple[tuple[str, str, str, str], ...]
    tensors: tuple[tuple[str, str, str], ...]
    operators: tuple[tuple[str, str, str], ...]
    of: str = "One step"

    @property
    def same(self) -> bool:
        """Whether both plans choose the same."""
        return not (self.choices or self.tensors or self.operators)

    def __str__(self) -> str:
        """What is chosen otherwise, and how many tensors and operators are split otherwise."""
        rows = f"{counted(len(self.tensors), 'row')} of tensors and {len(self.operators):,} of operators differ"
        if self.same:
            return "Both plans choose the same."
        return f"{table_in_width(self._choices)}\n{rows}: table() shows them, and the seconds".lstrip()

    def _choices(self) -> str:
        return format_table("Choices", ("choice", "first", "second"), self.choices)

    def table(self, *, all_rows: bool = False) -> str:
        """The rows as text."""
        parts = [
            "Both plans choose the same." if self.same else "",
            self._choices(),
            format_table(self.of, ("figure", "first", "second", "change"), self.figures),
            _cut("Tensors", self.tensors, all_rows=all_rows),
            _cut("Operators", self.operators, all_rows=all_rows),
        ]
        return "\n\n".join(part for part in parts if part)


def difference(first: Plan, second: Plan) -> PlanDifference:
    """Compare two plans, of one model or of two.

    Raises:
        ValueError: if a plan's step does not play in the seconds that it states.

    Example:
        >>> print(difference(Plan.load("a.json"), Plan.load("b.json")).table())
    """
    axes = {axis for plan in (first, second) for axis, size in zip(plan.mesh.names, plan.mesh.sizes) if size > 1}
    return PlanDifference(
        choices=changed(_choices(first), _choices(second)),
        figures=tuple(_figures(first, second)),
        tensors=merged(changed(tensors_along(axes, first), tensors_along(axes, second))),
        operators=merged(changed(operators_along(axes, first), operators_along(axes, second))),
    )


def changed(first: Mapping[str, str], second: Mapping[str, str]) -> tuple[tuple[str, str, str], ...]:
    """What differs, by name."""
    both = {name: (first.get(name, "—"), second.get(name, "—")) for name in (*first, *second)}
    return tuple((name, ours, theirs) for name, (ours, theirs) in both.items() if ours != theirs)


def merged(rows: Iterable[tuple[str, str, str]]) -> tuple[tuple[str, str, str], ...]:
    """Rows whose names differ in layer numbers alone as one row, which says how many they are."""
    counts: dict[tuple[str, str, str], int] = {}
    for name, ours, theirs in rows:
        row = re.sub(r"(?<=\.)\d+(?=[.:])", "*", name), ours, theirs
        counts[row] = counts.get(row, 0) + 1
    return tuple(
        (f"{name} ({count})" if count > 1 else name, ours, theirs) for (name, ours, theirs), count in counts.items()
    )


def _choices(plan: Plan) -> dict[str, str]:
    step = plan.step
    return {
        "model": plan.model,
        "cluster": str(plan.cluster.get("name", "")),
        **{axis: str(size) for axis, size in step.axes.items()},
        "order of axes, outermost first": ", ".join(axis for axis, size in step.axes.items() if size > 1),
        "global batch": f"{step.global_batch:,}",
        "tokens of a sample": f"{tokens_per_sample(plan) or 0:,}",
        "memory that was allowed": format_bytes(step.memory_limit) if step.memory_limit else "—",
        "micro-batches": f"{step.num_microbatches:,} of {step.local_batch:,}",
        "schedule": step.schedule,
        "chunks a rank": str(step.chunks_per_rank),
        "units of each chunk": " ".join(str(sum(group.count for group in chunk.groups)) for chunk in step.chunks),
        "recompute": ", ".join(step.recompute),
        "ZeRO": ", ".join(map(str, step.zero)) + step.zero_over,
        "optimizer": step.optimizer,
        "offloaded": step.offload or "nothing",
        "gradients": step.gradient_dtype or "float32 or wider",
        "kernels": "fused by torch.compile" if step.compiled else "one an operator",
        "rows on the tensor axis": "exchanged by products, too"
        if step.overlap_tensor
        else "exchanged between operators",
    }


def _figures(first: Plan, second: Plan) -> Iterator[tuple[str, str, str, str]]:
    seconds = [
        {bar.name: bar.seconds for bar in waterfall(plan, simulated_step(plan, events=False))}
        for plan in (first, second)
    ]
    for name in seconds[0]:
        yield row_of(name, seconds[0][name], seconds[1][name], format_seconds)
    ours, theirs = first.step, second.step
    yield row_of("step, simulated", ours.costs.simulated, theirs.costs.simulated, format_seconds)
    yield row_of("samples per second", ours.costs.samples_per_second, theirs.costs.samples_per_second, "{:,.4g}".format)
    for part in ("parameters", "gradients", "optimizer", "activations", "transient", "total", "host"):
        yield row_of(f"memory, {part} (most of any rank)", _most(ours, part), _most(theirs, part), format_bytes)
    yield row_of(
        "bytes in collectives, a device of every stage", sum_of_bytes(first), sum_of_bytes(second), format_bytes
    )


def _most(step: StepPlan, part: str) -> float:
    return float(max(getattr(rank, part) for rank in step.memory))


def row_of(name: str, first: float, second: float, form: Callable[[float], str]) -> tuple[str, str, str, str]:
    """A figure of two plans, and by how much it changes."""
    return name, form(first), form(second), _change(first, second)


def sum_of_bytes(plan: Plan) -> float:
    """Bytes that the collectives of a step move on one device of every stage together."""
    return float(sum(item.num_bytes for item in plan.collectives))


def _change(first: float, second: float) -> str:
    if not first:
        return "" if not second else "new"
    ratio = second / first
    return f"{ratio - 1.0:+.2%}" if ratio < 10.0 else f"{ratio:,.4g} times"


def tensors_along(axes: Set[str], plan: Plan) -> dict[str, str]:
    """By name of a tensor, its type along each of these axes."""
    groups = (("input", plan.inputs), ("parameter", plan.states), ("output", plan.outputs))
    return {
        f"{kind} {name}": _along(axes, plan, tensor.placement)
        for kind, tensors in groups
        for name, tensor in tensors.items()
    }


def operators_along(axes: Set[str], plan: Plan) -> dict[str, str]:
    """By key of an operator, its strategy along each of these axes."""
    return {key: _along(axes, plan, node.strategy) for key, node in plan.nodes.items()}


def _along(axes: Set[str], plan: Plan, values: Iterable[object]) -> str:
    """What stands along each axis that has ranks in one of both plans."""
    return ", ".join(f"{axis}: {value}" for axis, value in zip(plan.mesh.names, values) if axis in axes)


def _cut(title: str, rows: tuple[tuple[str, str, str], ...], *, all_rows: bool) -> str:
    shown = rows if all_rows else rows[:MAX_ROWS]
    more = f" (the first {len(shown)} of {len(rows)}; --all shows all)" if len(shown) < len(rows) else ""
    return format_table(title + more, ("name", "first", "second"), shown)
