"""The model as a tree of modules: every parameter's and operator's types, local shapes, collectives, recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from passes.ir.types import describe, local_shape
from passes.plan import ConversionPlan, NodePlan, Plan, TensorPlan
from passes.plan.stage_table import path_range
from passes.plan.text_tables import format_bytes


@dataclass
class ModuleEntry:
    """A module: its name, how many copies of it are alike, what stands in it, and the modules inside.

    Attributes:
        path: as in the model; of a repeated block the range of its copies.
        remarks: how its units run: recompute policy and ZeRO stage.
        parameters: (name, global shape, local shape, dtype, types).
        operators: (operator, what each axis cuts, types of its outputs, collectives on what it takes and gives).
    """

    name: str
    path: str
    copies: int = 1
    remarks: list[str] = field(default_factory=list)
    parameters: list[tuple[str, ...]] = field(default_factory=list)
    operators: list[tuple[str, ...]] = field(default_factory=list)
    children: dict[str, ModuleEntry] = field(default_factory=dict)


def model_tree(plan: Plan) -> ModuleEntry:
    """The whole model; of a block that repeats the first copy stands for all."""
    copied = {root for block in plan.blocks for roots in block.roots[1:] for root in roots}
    tree = ModuleEntry(plan.model, "")
    for path, tensor in plan.states.items():
        module, _, name = path.rpartition(".")
        if not _inside(module, copied):
            _module(tree, module).parameters.append(_parameter(plan, name, tensor))
    collectives = _collectives_by_node(plan)
    for key, node in plan.nodes.items():
        module, _, _ = key.rsplit(":", 2)
        _module(tree, module).operators.append(_operator(plan, node, collectives.get(key, [])))
    for block in plan.blocks:
        for first, last in zip(block.roots[0], block.roots[-1]):
            entry = _module(tree, first)
            entry.copies, entry.path = len(block.roots), path_range(first, last)
    _remark(tree, plan)
    return tree


def _inside(path: str, roots: set[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:count]) in roots for count in range(1, len(parts) + 1))


def _module(tree: ModuleEntry, path: str) -> ModuleEntry:
    entry = tree
    parts = path.split(".") if path else []
    for count, name in enumerate(parts, start=1):
        entry = entry.children.setdefault(name, ModuleEntry(name, ".".join(parts[:count])))
    return entry


def _parameter(plan: Plan, name: str, tensor: TensorPlan) -> tuple[str, ...]:
    local = local_shape(tensor.shape, tensor.placement, plan.mesh)
    types = describe(tensor.placement, plan.mesh)
    trained = "" if tensor.trainable else " (not trained)"
    return name + trained, str(list(tensor.shape)), str(list(local)), tensor.dtype, types


def _operator(plan: Plan, node: NodePlan, collectives: list[str]) -> tuple[str, ...]:
    cuts = ", ".join(
        f"{axis}: {label}"
        for axis, label, size in zip(plan.mesh.names, node.strategy, plan.mesh.sizes)
        if size > 1 and label not in ("replicate", "invariant")
    )
    name = node.op.removesuffix(".default")
    rule = "" if node.has_rule else " (no rule: replicated)"
    types = "; ".join(describe(placement, plan.mesh) for placement in node.outputs)
    return name + rule, cuts or "whole on every device", types, "; ".join(collectives)


def _collectives_by_node(plan: Plan) -> dict[str, list[str]]:
    """By the key of the operator that gives a value: the collectives that change its type."""
    by_node: dict[str, list[str]] = {}
    for conversion in plan.conversions:
        kind, _, rest = conversion.value.partition(":")
        texts = list(_collective_texts(conversion))
        if kind == "node" and texts:
            by_node.setdefault(rest.rpartition("#")[0], []).extend(texts)
    return by_node


def _collective_texts(conversion: ConversionPlan) -> Iterator[str]:
    for phase, collective in (("forward", conversion.forward), ("backward", conversion.backward)):
        if collective is not None:
            times = f"{conversion.copies:,} × " if conversion.copies > 1 else ""
            yield f"{phase}: {times}{collective} on {conversion.axis}, {format_bytes(conversion.num_bytes)}"


def _remark(tree: ModuleEntry, plan: Plan) -> None:
    """Say at the first module of every group of units how it runs."""
    for chunk in plan.step.chunks:
        for group in chunk.groups:
            first = group.unit.split(" ")[0].split(":")[0]
            entry = tree
            for name in first.split(".") if first else ():
                if name not in entry.children:
                    break
                entry = entry.children[name]
            units = f"{group.count} units from {group.unit}" if group.count > 1 else group.unit
            zero = f"{group.zero}{plan.step.zero_over}" if group.zero else "0"
            entry.remarks.append(f"rank {chunk.rank}: {units}: recompute {group.recompute}, ZeRO {zero}")
