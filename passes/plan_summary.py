"""A plan as text that a person can read: what is split how, what it costs, and how sure the solver is."""

from __future__ import annotations

import re
from collections.abc import Sequence

from passes.ir.types import describe
from passes.plan_data import PlanData, TensorPlan

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def format_seconds(seconds: float) -> str:
    """``12.3 ms``."""
    for unit, name in _SECONDS:
        if seconds >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds / 1e-6:.3g} µs" if seconds else "0 s"


def format_bytes(num_bytes: float) -> str:
    """``1.5 GiB``."""
    for unit, name in _BYTES:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:.0f} B"


def format_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns under a title; empty if there are no rows."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (header, *rows)]
    return "\n".join([title, f"  {lines[0]}", f"  {'-' * len(lines[0])}", *(f"  {line}" for line in lines[1:])])


def summarise(plan: PlanData, *, operators: bool = False) -> str:
    """The plan as a few tables; ``operators`` adds one line for each operator (of a block: of its first copy)."""
    parts = [
        _headline(plan),
        _blocks(plan),
        _tensors("Inputs", plan, plan.inputs),
        _tensors("Parameters and buffers", plan, plan.states),
        _tensors("Outputs", plan, plan.outputs),
        _collectives(plan),
        _costs(plan),
        _operators(plan) if operators else "",
        _notes(plan),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(plan: PlanData) -> str:
    certificate = plan.certificate
    kind = "training" if plan.training else "inference"
    cluster = plan.cluster.get("name", "an unnamed cluster")
    return "\n".join(
        [
            f"{plan.model}: {kind} on mesh {plan.mesh} ({plan.mesh.num_devices} devices of {cluster})",
            f"predicted step {format_seconds(certificate.objective)}, lower bound {format_seconds(certificate.bound)}, "
            f"gap {certificate.gap:.3%} ({certificate.status}; {certificate.solver}, "
            f"{certificate.num_variables:,} variables, {certificate.num_constraints:,} constraints)",
        ]
    )


def _blocks(plan: PlanData) -> str:
    rows = [
        [" + ".join(block.roots[0]), str(len(block.roots)), " ".join(describe(p, plan.mesh) for p in block.carried)]
        for block in plan.blocks
    ]
    return format_table("Repeated blocks", ("first copy", "copies", "passed from copy to copy as"), rows)


def _tensors(title: str, plan: PlanData, tensors: dict[str, TensorPlan]) -> str:
    """One line for all tensors whose names differ in layer numbers alone."""
    groups: dict[tuple[str, ...], int] = {}
    for path, tensor in tensors.items():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        line = (pattern, str(list(tensor.shape)), tensor.dtype, describe(tensor.placement, plan.mesh))
        groups[line] = groups.get(line, 0) + 1
    rows = [[name, str(count), *rest] for (name, *rest), count in groups.items()]
    return format_table(title, ("name", "count", "shape", "dtype", "placement"), rows)


def _collectives(plan: PlanData) -> str:
    rows = [
        [item.collective, item.axis, item.phase, f"{item.count:,}", format_bytes(item.num_bytes)]
        for item in plan.collectives
    ]
    return format_table("Collectives in one step", ("collective", "axis", "phase", "count", "bytes"), rows)


def _costs(plan: PlanData) -> str:
    costs = plan.costs
    rows = [
        ["compute", format_seconds(costs.compute_forward), format_seconds(costs.compute_backward)],
        ["communication", format_seconds(costs.communication_forward), format_seconds(costs.communication_backward)],
    ]
    seconds = format_table("Predicted time of one step", ("", "forward", "backward"), rows)
    memory = [[part.replace("_", " "), format_bytes(size)] for part, size in costs.memory.items()]
    return seconds + "\n\n" + format_table("Predicted memory of one device", ("part", "bytes"), memory)


def _operators(plan: PlanData) -> str:
    rows = [
        [key, ", ".join(node.strategy), " ".join(describe(p, plan.mesh) for p in node.outputs)]
        for key, node in plan.nodes.items()
    ]
    header = ("operator", f"strategy ({', '.join(plan.mesh.names)})", "output")
    return format_table("Operators", header, rows)


def _notes(plan: PlanData) -> str:
    return "\n".join(["Notes", *(f"  * {note}" for note in plan.notes)]) if plan.notes else ""
