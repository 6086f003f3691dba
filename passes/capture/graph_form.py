"""What a graph computes, in a form that two graphs which compute the same share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from passes.ir.graph import Graph, Node, Ref, Value

#: Stands for a zero without dims, however it is made.
_ZERO = ("zero",)


def form_of(graph: Graph) -> list[Any]:
    """What a graph computes, whatever the names of its values.

    What numbers do to a zero of Python they do to a zero that is a tensor: sums, products and quotients with one are
    the same, whatever their dtype until they are added to something else.
    """
    literals = {state.value.name: state.data for state in graph.states if state.data is not None}
    numbers: dict[str, Any] = {
        name: (str(data.dtype), tuple(data.shape), data.tolist()) for name, data in literals.items()
    }
    numbers.update({name: _ZERO for name, data in literals.items() if data.dim() == 0 and data.item() == 0})
    form: list[Any] = []
    for node in graph.nodes:
        same = _same_as(node, numbers, graph.values)
        if same is not None:
            numbers[node.output.name] = same
            continue
        form.append(_call(node, numbers))
        numbers.update({value.name: (len(form), place) for place, value in enumerate(node.outputs)})
    return [*form, [(path, numbers.get(name, name)) for path, name in graph.outputs.items()], graph.loss]


def _call(node: Node, numbers: Mapping[str, Any]) -> Any:
    if node.op == "aten.div.Tensor" and _zeros(node, numbers)[:1] == [True]:
        divisors = [numbers.get(arg.name, arg.name) if isinstance(arg, Ref) else arg for arg in node.args[1:]]
        return node.op, _ZERO, divisors, node.output.shape, node.module_path
    operands = [numbers.get(name, name) for name in node.inputs]
    results = [(value.shape, value.dtype) for value in node.outputs]
    return node.op, operands, node.constants, results, node.module_path


def _same_as(node: Node, numbers: Mapping[str, Any], values: Mapping[str, Value]) -> Any:
    """The zero that a node without dims gives, or the other operand of a sum with one; None for others."""
    if len(node.outputs) != 1 or node.output.shape:
        return None
    zeros = _zeros(node, numbers)
    match node.op:
        case "aten.full.default":
            return _ZERO if node.args[1] == 0 else None
        case "aten.zeros.default":
            return _ZERO
        case "aten.to.dtype":
            return _ZERO if zeros[0] else None
        case "aten.mul.Tensor":
            return _ZERO if any(zeros) else None
        case "aten.add.Tensor" if any(zeros) and not node.kwargs:
            others = [arg for arg, zero in zip(node.args, zeros) if isinstance(arg, Ref) and not zero]
            if len(others) == 1 and values[others[0].name].dtype == node.output.dtype:
                return numbers.get(others[0].name, others[0].name)
            return _ZERO if all(zeros) else None
    return None


def _zeros(node: Node, numbers: Mapping[str, Any]) -> list[bool]:
    """Which of the arguments are zeros without dims."""
    return [numbers.get(arg.name) == _ZERO if isinstance(arg, Ref) else type(arg) in (int, float) and arg == 0
            for arg in node.args]  # fmt: skip
