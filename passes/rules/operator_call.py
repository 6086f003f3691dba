"""One operator call as the rules see it: its arguments by name, and the shapes of what goes in and out.

Names and defaults come from torch's own schemas (torch is imported at the first use, never with this module);
operators of ours declare theirs in ``SIGNATURES``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from passes.ir.graph import Node, Ref, Value
from passes.ir.torch_facts import asked
from passes.rules.rule import Dims, Factor, ShardingRule

#: Linear layers of one input that gather its rows once: in programs, where the plan says so, and in no graph.
GATHERED_LINEARS = "meshwright.gathered_linears"

#: Name of each argument and its default; ``REQUIRED`` marks those without one.
Signature = tuple[tuple[str, Any], ...]
REQUIRED = object()

SIGNATURES: dict[str, Signature] = {
    "meshwright.cross_entropy": (
        ("logits", REQUIRED),
        ("target", REQUIRED),
        ("ignore_index", -100),
        ("label_smoothing", 0.0),
        ("reuse_logits", False),
        ("dtype", None),
    ),
    "meshwright.expert_linear": (("input", REQUIRED), ("expert_ids", REQUIRED), ("weight", REQUIRED)),
    GATHERED_LINEARS: (("input", REQUIRED), ("weights", REQUIRED), ("biases", None)),
}
_OWN_TENSORS = {
    "meshwright.cross_entropy": ("logits", "target"),
    "meshwright.expert_linear": ("input", "expert_ids", "weight"),
}


def signature(op: str) -> Signature | None:
    """Arguments of ``op`` in call order, or None if torch does not know it."""
    if op in SIGNATURES:
        return SIGNATURES[op]
    arguments = _arguments(op)
    return None if arguments is None else _signature(op)


@functools.cache
def _signature(op: str) -> Signature:
    return tuple((name, default[0] if default else REQUIRED) for name, _, default in _arguments(op) or ())


def tensor_arguments(op: str) -> tuple[str, ...]:
    """Names of the arguments of ``op`` that take one tensor, in the order of its schema."""
    if op in _OWN_TENSORS:
        return _OWN_TENSORS[op]
    return _tensor_arguments(op) if _arguments(op) is not None else ()


@functools.cache
def _tensor_arguments(op: str) -> tuple[str, ...]:
    return tuple(name for name, kind, _ in _arguments(op) or () if kind in ("Tensor", "Optional[Tensor]"))


def _arguments(op: str) -> list[tuple[str, str, list[Any]]] | None:
    """Name, type and default (in a list, empty without one) of every argument of ``op``; None for no operator."""

    def ask() -> list[list[Any]] | None:
        schema = schema_of(op)
        if schema is None:
            return None
        return [
            [argument.name, str(argument.type), [argument.default_value] if argument.has_default_value() else []]
            for argument in schema.arguments
        ]

    return asked("schema", op, ask)  # type: ignore[no-any-return]


def schema_of(op: str) -> Any:
    """Torch's schema of ``"aten.linear.default"`` and the like, None if there is none."""
    import torch

    from passes.torch_compat.operators import schema

    namespace, _, rest = op.partition(".")
    name, _, overload = rest.rpartition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    operator = getattr(packet, overload, None) if packet is not None else None
    return schema(operator)


@dataclass(frozen=True)
class OperatorCall:
    """A node with its arguments bound to names.

    Attributes:
        node: the operator call.
        arguments: every argument by name, defaults filled in.
        slots: for each tensor input in the order of ``Node.inputs``, the name of its argument.
        inputs: the tensor inputs in that order.
        outputs: the outputs.
    """

    node: Node
    arguments: Mapping[str, Any]
    slots: tuple[str, ...]
    inputs: tuple[Value, ...]

    @property
    def outputs(self) -> tuple[Value, ...]:
        return self.node.outputs

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor argument ``name``."""
        return self.inputs[self.slots.index(name)].shape

    def has(self, name: str) -> bool:
        """Whether a tensor was passed as ``name``."""
        return name in self.slots

    def dim(self, name: str, rank: int) -> int:
        """The integer argument ``name`` as a non-negative dim of a tensor of ``rank`` dims."""
        return self.arguments[name] % max(rank, 1)

    def dims(self, name: str, rank: int) -> tuple[int, ...]:
        """The argument ``name`` (a dim, a list, or None or empty for all) as sorted non-negative dims."""
        dim_argument = self.arguments.get(name)
        if dim_argument is None or (isinstance(dim_argument, (list, tuple)) and not dim_argument):
            return tuple(range(rank))
        dims_in_argument = dim_argument if isinstance(dim_argument, (list, tuple)) else (dim_argument,)
        return tuple(sorted(dim % max(rank, 1) for dim in dims_in_argument))

    def by_slot(self, dims: Mapping[str, Dims]) -> tuple[Dims, ...]:
        """Factors by argument name, in the order of ``Node.inputs``; an argument not named has no factors."""
        return tuple(dims.get(slot, ((),) * len(value.shape)) for slot, value in zip(self.slots, self.inputs))

    def rule(
        self,
        inputs: Sequence[Dims],
        outputs: Sequence[Dims],
        *,
        terms: tuple[tuple[int, ...], ...] | None = None,
        passes_partial: bool = True,
        sizes: Mapping[Factor, int] | None = None,
        **more: Any,
    ) -> ShardingRule:
        """A rule whose factor sizes are read off the dims that consist of one factor, or given in ``sizes``."""
        factor_sizes: dict[Factor, int] = {}
        shapes = [value.shape for value in (*self.inputs, *self.outputs)]
        for shape, dims in zip(shapes, (*inputs, *outputs), strict=True):
            for size, factors in zip(shape, dims, strict=True):
                if len(factors) == 1:
                    factor_sizes.setdefault(factors[0], size)
        factor_sizes.update(sizes or {})
        return ShardingRule(
            tuple(inputs), tuple(outputs), factor_sizes, terms=terms, passes_partial=passes_partial, **more
        )


def bind(node: Node, values: Mapping[str, Value]) -> OperatorCall | None:
    """The call that ``node`` makes, or None if its operator has no known signature."""
    parameters = signature(node.op)
    if parameters is None or len(node.args) > len(parameters):
        return None
    arguments = {name: default for name, default in parameters if default is not REQUIRED}
    passed = [(parameters[index][0], value) for index, value in enumerate(node.args)]
    passed.extend(node.kwargs.items())
    arguments.update(passed)
    slots = tuple(name for name, value in passed for _ in _count_refs(value))
    inputs = tuple(values[name] for name in node.inputs)
    return OperatorCall(node, arguments, slots, inputs)


def _count_refs(value: Any) -> Iterator[None]:
    if isinstance(value, Ref):
        yield None
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _count_refs(item)


def named_dims(shape: Sequence[int], *, prefix: str = "d", whole: Sequence[int] = ()) -> Dims:
    """One factor ``<prefix><dim>`` per dim; none for dims of size 1 and for those in ``whole``."""
    return tuple((f"{prefix}{dim}",) if size != 1 and dim not in whole else () for dim, size in enumerate(shape))


def aligned(shape: Sequence[int], full: Dims) -> Dims:
    """Factors of an operand that broadcasts to dims with the factors ``full``."""
    return tuple(() if size == 1 else factors for size, factors in zip(shape, full[len(full) - len(shape) :]))


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that tensors of these shapes broadcast to."""
    rank = max(map(len, shapes))
    sizes = [[shape[len(shape) - back] for shape in shapes if len(shape) >= back] for back in range(rank, 0, -1)]
    return tuple(next((size for size in dim if size != 1), 1) for dim in sizes)
