"""A chain: operators of a section that become one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_models.dtypes import ITEM_SIZE
from passes.chains.formulas import REDUCTIONS, Formula, formula_of
from passes.ir.graph import Ref, map_refs
from passes.rules.operator_call import bind
from passes.shard import Compute, Local

TRITON, INDUCTOR = "triton", "inductor"


@dataclass(frozen=True)
class Operand:
    """An argument that is a tensor: the member's input with this index."""

    index: int


@dataclass(frozen=True)
class Member:
    """One operator of a chain.

    Attributes:
        compute: the operator with its local tensors.
        arguments: its arguments by name, tensors as ``Operand``.
        formula: how Triton computes it; None if the table does not say.
        reduces: whether it is a sum over the last dim or the like, one number a row.
    """

    compute: Compute
    arguments: Mapping[str, Any]
    formula: Formula | None
    reduces: bool = False

    @property
    def output(self) -> Local:
        return self.compute.outputs[0]

    @property
    def operands(self) -> dict[str, Local]:
        """Tensor arguments by name."""
        return {
            name: self.compute.inputs[value.index]
            for name, value in self.arguments.items()
            if isinstance(value, Operand)
        }


@dataclass(frozen=True)
class OperatorChain(Compute):
    """Operators as one. ``node`` stands for them all; ``inputs`` are read once, ``outputs`` are used outside.

    Attributes:
        members: in order.
        space: the shape that every member computes on.
        backend: ``"triton"`` or, with the reason, ``"inductor"``.
        bytes_apart: moved when the operators run one by one, forward.
        bytes_fused: moved when each input is read and each output written once.
    """

    members: tuple[Member, ...]
    space: tuple[int, ...]
    backend: str
    reason: str
    bytes_apart: int
    bytes_fused: int


def member_of(compute: Compute) -> Member | None:
    """``compute`` with its arguments by name; None if torch does not know the operator."""
    node = compute.node
    places = iter(range(len(node.inputs)))
    args = map_refs(node.args, lambda _: Ref(str(next(places))))
    kwargs = {name: map_refs(value, lambda _: Ref(str(next(places)))) for name, value in node.kwargs.items()}
    numbered = type(node)(node.name, node.op, args, kwargs, node.outputs)
    call = bind(numbered, {str(index): local.value for index, local in enumerate(compute.inputs)})
    if call is None:
        return None
    arguments = {
        name: Operand(int(value.name)) if isinstance(value, Ref) else value for name, value in call.arguments.items()
    }
    reduction = REDUCTIONS.get(node.op)
    formula = reduction if reduction is not None else formula_of(node.op, arguments)
    return Member(compute, arguments, formula, reduces=reduction is not None)


def bytes_of(*locals_: Local) -> int:
    """Local bytes of tensors."""
    total = 0
    for local in locals_:
        count = ITEM_SIZE[local.value.dtype]
        for size in local.shape:
            count *= size
        total += count
    return total
