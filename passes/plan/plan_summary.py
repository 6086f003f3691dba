"""A plan as text that a person can read: what is split how, what it costs, and how sure the solver is."""

from __future__ import annotations

import re

from cost_models.text import printable_lines
from passes.ir.types import MeshShape, describe, largest_part, part_of_dim, uneven_dims
from passes.plan.plan_data import PlanData, TensorPlan
from passes.plan.step_summary import summarise_step
from passes.plan.text_tables import format_bytes, format_seconds, format_table

#: What the operators' part of a plan leaves to its step's part.
ONE_MICRO_BATCH = "nothing recomputed, nothing sharded by ZeRO"


def summarise(plan: PlanData, *, operators: bool = False) -> str:
    """The plan as a few tables; ``operators`` adds one line for each operator (of a block: of its first copy)."""
    parts = [
        *summarise_step(plan, plan.step),
        _blocks(plan),
        _fusion(plan),
        tensor_table("Inputs", plan, plan.inputs),
        tensor_table(_states_title(plan), plan, plan.states),
        tensor_table("Outputs", plan, plan.outputs),
        collective_table(plan, f"Collectives in one step{_of_stages(plan)}"),
        _costs(plan),
        operator_table(plan) if operators else "",
    ]
    # Names are a model's or a file's.
    return printable_lines("\n\n".join(part for part in parts if part) + "\n")


def _blocks(plan: PlanData) -> str:
    rows = [
        [" + ".join(block.roots[0]), str(len(block.roots)), " ".join(describe(p, plan.mesh) for p in block.carried)]
        for block in plan.blocks
    ]
    return format_table("Repeated blocks", ("first copy", "copies", "passed from copy to copy as"), rows)


def _fusion(plan: PlanData) -> str:
    """Fused operators, with what they save, and what nearly was one."""
    if plan.fusion is None:
        return ""
    (before, after), (kept_before, kept_after) = plan.fusion.operators, plan.fusion.saved_bytes
    title = (
        f"Fused operators ({before:,} operators before, {after:,} after; kept for backward of the whole batch "
        f"{format_bytes(kept_before)} before, {format_bytes(kept_after)} after)"
    )
    rows = [[entry.pattern, str(entry.count), ", ".join(entry.modules)] for entry in plan.fusion.matches]
    parts = [format_table(title, ("operator", "count", "modules"), rows)]
    if plan.fusion.near_misses:
        missed = [
            [entry.pattern, str(entry.count), ", ".join(entry.modules), entry.reason]
            for entry in plan.fusion.near_misses
        ]
        parts.append(format_table("Nearly fused", ("operator", "count", "modules", "why not"), missed))
    return "\n\n".join(parts)


def _states_title(plan: PlanData) -> str:
    return "Parameters and buffers" + (
        " (while they are used: ZeRO divides them further)" if any(plan.step.zero) else ""
    )


def tensor_table(title: str, plan: PlanData, tensors: dict[str, TensorPlan]) -> str:
    """One line for all tensors whose names differ in layer numbers alone."""
    groups: dict[tuple[str, ...], int] = {}
    for path, tensor in tensors.items():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        placement = describe(tensor.placement, plan.mesh) + _uneven(tensor, plan.mesh)
        line = (pattern, str(list(tensor.shape)), tensor.dtype, placement)
        groups[line] = groups.get(line, 0) + 1
    rows = [[name, str(count), *rest] for (name, *rest), count in groups.items()]
    return format_table(title, ("name", "count", "shape", "dtype", "placement"), rows)


def _uneven(tensor: TensorPlan, mesh: MeshShape) -> str:
    """`` dim 0: 25,129 on each, 25,128 on the last`` for every dim that an axis cuts into unequal parts."""
    parts = []
    for dim, axis in uneven_dims(tuple(tensor.shape), tuple(tensor.placement), mesh).items():
        extent, count = tensor.shape[dim], mesh.sizes[axis]
        last = part_of_dim(extent, count, count - 1)[1]
        parts.append(f" dim {dim}: {largest_part(extent, count):,} on each, {last:,} on the last")
    return ",".join(parts)


def _of_stages(plan: PlanData) -> str:
    return " (of one rank of every stage, together)" if plan.step.axes.get("pp", 1) > 1 else ""


def collective_table(plan: PlanData, title: str) -> str:
    """What collectives are issued, how often, and their bytes."""
    rows = [
        [item.collective, item.axis, item.phase, f"{item.count:,}", format_bytes(item.num_bytes)]
        for item in plan.collectives
    ]
    return format_table(title, ("collective", "axis", "phase", "count", "bytes"), rows)


def _costs(plan: PlanData) -> str:
    costs = plan.costs
    rows = [
        ["compute", format_seconds(costs.compute_forward), format_seconds(costs.compute_backward)],
        ["communication", format_seconds(costs.communication_forward), format_seconds(costs.communication_backward)],
    ]
    title = f"Predicted time of one micro-batch through all stages ({ONE_MICRO_BATCH})"
    if not plan.step.decides_units:
        title = "Predicted time of one step"
    return format_table(title, ("", "forward", "backward"), rows)


def operator_table(plan: PlanData, title: str = "Operators") -> str:
    """One line for each operator (of a block: of its first copy)."""
    rows = [
        [key, ", ".join(node.strategy), " ".join(describe(p, plan.mesh) for p in node.outputs)]
        for key, node in plan.nodes.items()
    ]
    header = ("operator", f"strategy ({', '.join(plan.mesh.names)})", "output")
    return format_table(title, header, rows)
