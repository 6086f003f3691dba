"""Which operators may be in a chain, and on which space each computes."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from passes.chains.formulas import ROW_OPERATORS, is_listed
from passes.chains.operator_chain import Member, member_of
from passes.ir.types import I, MeshShape, P, R, shard_dim
from passes.rules.operator_call import schema_of
from passes.shard import Compute

#: Element types that kernels compute with.
DTYPES = frozenset(
    {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}
)  # fmt: skip
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
#: Elementwise by torch's tags, but not to be moved or not computing anything.
_NEVER = frozenset({"aten.clone.default", "aten.contiguous.default", "aten.positive.default"})

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ChainMember:
    """A member with the shape that it computes on."""

    member: Member
    space: Shape


def candidate_of(compute: Compute, mesh: MeshShape) -> ChainMember | None:
    """``compute`` as part of a chain; None if it is not elementwise, and no row reduction either."""
    node = compute.node
    if node.constant or len(node.outputs) != 1 or not compute.inputs or node.op in _NEVER:
        return None
    if not _is_local(compute, mesh) or not _has_plain_dtypes(compute):
        return None
    output = compute.outputs[0].shape
    if not _is_known(node.op):
        return None
    member = member_of(compute)
    if member is None or not output:
        return None
    space = output
    if member.reduces or node.op in ROW_OPERATORS:
        shape = compute.inputs[0].shape
        if not shape or not _is_along_rows(member, len(shape)):
            return None
        space = shape
    elif not all(_broadcasts(local.shape, output) for local in compute.inputs):
        return None
    if member.formula is not None and not _holds(member):
        member = dataclasses.replace(member, formula=None)
    return ChainMember(member, space)


def rows_of(space: Shape) -> Shape:
    """The shape of one number a row."""
    return (*space[:-1], 1)


def joint_space(one: Shape, other: Shape) -> Shape | None:
    """The space of a kernel that computes on both: the same, or one has a number for each row of the other."""
    if one == other or rows_of(one) == other:
        return one
    return other if rows_of(other) == one else None


@functools.cache
def _is_known(op: str) -> bool:
    """Whether an operator is in the tables, or elementwise by torch's own tag."""
    if is_listed(op):
        return True
    if not op.startswith("aten.") or schema_of(op) is None:
        return False
    import torch

    name, _, overload = op.removeprefix("aten.").rpartition(".")
    tags = getattr(getattr(torch.ops.aten, name), overload).tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _is_local(compute: Compute, mesh: MeshShape) -> bool:
    """Whether the operator is written as a plain call: its types need no word of their own on any axis."""
    for axis, (size, choice) in enumerate(zip(mesh.sizes, compute.choices)):
        if size == 1:
            continue
        inputs = [local.placement[axis] for local in compute.inputs]
        outputs = [local.placement[axis] for local in compute.outputs]
        cut_in, cut_out = (any(shard_dim(kind) is not None for kind in kinds) for kinds in (inputs, outputs))
        if (choice.factor is not None and P in choice.outputs) or (cut_out and not cut_in):
            return False
        if I in inputs and R in outputs:
            return False
    return True


def _has_plain_dtypes(compute: Compute) -> bool:
    return all(local.value.dtype in DTYPES for local in (*compute.inputs, *compute.outputs))


def _is_along_rows(member: Member, rank: int) -> bool:
    dims = member.arguments.get("dim")
    listed = dims if isinstance(dims, (list, tuple)) else [dims]
    return len(listed) == 1 and isinstance(listed[0], int) and listed[0] % rank == rank - 1


def _broadcasts(shape: Shape, space: Shape) -> bool:
    return len(shape) <= len(space) and all(
        size in (1, whole) for size, whole in zip(shape[::-1], space[::-1], strict=False)
    )


def _holds(member: Member) -> bool:
    """Whether the formula holds for these dtypes: truth values are not added, whole numbers have no roots."""
    formula, output = member.formula, member.output.value
    assert formula is not None
    if output.dtype in FLOATS:
        missing = [
            name
            for name, local in member.operands.items()
            if local.value.requires_grad and local.value.dtype in FLOATS and name not in formula.gradients
        ]
        return not (output.requires_grad and missing)
    if not formula.whole_numbers:
        return False
    return output.dtype != "bool" or formula.gives_truth or formula.casts
