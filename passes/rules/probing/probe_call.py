"""One operator call that can be run at any shapes of its tensors, its other arguments fixed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from passes.ir.graph import Node, Ref, Value, map_refs
from passes.rules.operator_call import bind, schema_of

Shapes = tuple[tuple[int, ...], ...]

#: What a probe computes in, by the dtype that the call has: rounding must not hide a wrong rule.
_WIDE = {
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), "float64"),
    **dict.fromkeys(("complex32", "complex64", "complex128"), "complex128"),
}
_NARROW = {"float64": "float32", "complex128": "complex64"}
#: Namespaces of operators that speak to other ranks, or are ours and have their rules by hand.
_NOT_PROBED = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "spmd_types", "meshwright", "prim"})
#: Operators that end the process, with no error to catch, where the shapes of their weights do not fit.
_CRASH = tuple(f"aten.{kind}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu", "_thnn_", "mkldnn_", "quantized_"))


class ProbeFailure(Exception):
    """The operator cannot be run like this."""


@dataclass(frozen=True)
class ProbeCall:
    """An operator with its arguments; tensors are numbered in the order of ``Node.inputs``.

    Attributes:
        node: the call, every tensor a ``Ref`` to its number.
        dtypes: dtype that each tensor has in a probe.
        slots: name of the argument that each tensor is passed in.
        differentiable: which tensors' gradients are compared.
    """

    node: Node
    dtypes: tuple[str, ...]
    slots: tuple[str, ...]
    differentiable: tuple[bool, ...]

    @staticmethod
    def of(node: Node, values: Any) -> ProbeCall | None:
        """The call of ``node``, or None if it is not one that may be run: it writes, draws or communicates."""
        schema = schema_of(node.op)
        call = bind(node, values)
        if schema is None or call is None or schema.is_mutable or node.draw is not None:
            return None
        if node.op.partition(".")[0] in _NOT_PROBED or node.op.startswith(_CRASH):
            return None
        if not node.inputs or not node.outputs:
            return None
        numbers = iter(range(len(node.inputs)))
        args = map_refs(node.args, lambda _: Ref(str(next(numbers))))
        kwargs = {name: map_refs(value, lambda _: Ref(str(next(numbers)))) for name, value in node.kwargs.items()}
        dtypes = tuple(_WIDE.get(values[name].dtype, values[name].dtype) for name in node.inputs)
        differentiable = tuple(map(is_differentiable, dtypes))
        return ProbeCall(dataclasses.replace(node, args=args, kwargs=kwargs), dtypes, call.slots, differentiable)

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        namespace, name, overload = self.node.op.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)  # type: ignore[no-any-return]

    def in_single_precision(self) -> ProbeCall:
        """The same in float32, for operators without a float64 form."""
        return dataclasses.replace(self, dtypes=tuple(_NARROW.get(dtype, dtype) for dtype in self.dtypes))

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of the operator.

        Raises:
            ProbeFailure: if it raises, or gives something else than the call in the graph does.
        """
        wide = "float64" if "float32" not in self.dtypes else "float32"
        try:
            result = self.function(
                *(_argument(argument, tensors, wide) for argument in self.node.args),
                **{name: _argument(argument, tensors, wide) for name, argument in self.node.kwargs.items()},
            )
        except Exception as error:  # whatever the operator's own code raises
            raise ProbeFailure(_first_line(error)) from None
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        if len(outputs) != len(self.node.outputs) or not all(isinstance(item, torch.Tensor) for item in outputs):
            raise ProbeFailure(f"it gives {len(outputs)} results")
        return outputs

    def node_at(self, shapes: Shapes, outputs: Sequence[torch.Tensor]) -> tuple[Node, dict[str, Value]]:
        """The call as a node of a graph with these shapes, and its values."""
        values = {
            str(number): Value(str(number), shape, dtype, requires_grad=is_differentiable(dtype))
            for number, (shape, dtype) in enumerate(zip(shapes, self.dtypes))
        }
        results = tuple(
            Value(f"output{place}", tuple(tensor.shape), dtype_name(tensor), requires_grad=tensor.requires_grad)
            for place, tensor in enumerate(outputs)
        )
        return dataclasses.replace(self.node, outputs=results), values

    def text(self, shapes: Shapes) -> str:
        """The call as text, with tensors by shape."""
        arguments = [_text(argument, shapes) for argument in self.node.args]
        arguments += [f"{name}={_text(argument, shapes)}" for name, argument in self.node.kwargs.items()]
        return f"{self.node.op}({', '.join(arguments)})"


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_differentiable(dtype: str) -> bool:
    return dtype.startswith(("float", "complex", "bfloat"))


def _argument(argument: Any, tensors: Sequence[torch.Tensor], wide: str) -> Any:
    if isinstance(argument, Ref):
        return tensors[int(argument.name)]
    if isinstance(argument, (list, tuple)):
        return [_argument(item, tensors, wide) for item in argument]
    if isinstance(argument, str):
        kind, _, name = argument.partition(":")
        name = name.removeprefix("torch.")
        if kind == "dtype":
            return getattr(torch, wide if name in ("float16", "bfloat16", "float32", "float64") else name)
        if kind in ("layout", "memory_format") and name.isidentifier():
            return getattr(torch, name)
    return argument


def _text(argument: Any, shapes: Shapes) -> str:
    if isinstance(argument, Ref):
        return f"tensor{list(shapes[int(argument.name)])}"
    if isinstance(argument, (list, tuple)):
        return "[" + ", ".join(_text(item, shapes) for item in argument) + "]"
    return repr(argument)


def _first_line(error: BaseException) -> str:
    lines: Iterator[str] = iter(str(error).strip().splitlines())
    return f"{type(error).__name__}: {next(lines, '')}"[:200]
