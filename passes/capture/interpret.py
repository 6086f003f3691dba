"""Run a graph on one device, operator by operator: what the graph means, for tests and for constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from passes.canonicalise import cross_entropy, expert_linear
from passes.ir.graph import Graph, Node, Ref, State

_OURS: dict[str, Callable[..., Any]] = {
    "meshwright.cross_entropy": cross_entropy,
    "meshwright.expert_linear": expert_linear,
}

#: Operators that make a tensor from no tensor: they need to be told the device.
_FACTORIES = ("arange", "zeros", "ones", "full", "empty", "eye", "rand", "randn", "scalar_tensor", "linspace",
              "randint", "tril_indices", "triu_indices", "hann_window", "randperm")  # fmt: skip


def operator(op: str) -> Callable[..., Any]:
    """The function that an operator's name stands for.

    Raises:
        ValueError: if there is none.
    """
    if op in _OURS:
        return _OURS[op]
    namespace, name, overload = op.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError:
        raise ValueError(f"unknown operator {op!r}: expected one of torch.ops or of {sorted(_OURS)}") from None


def run_node(node: Node, values: Mapping[str, Any], *, device: torch.device | str = "cpu") -> tuple[Any, ...]:
    """The outputs of one node on real tensors.

    Args:
        values: value name → tensor, for the node's inputs.
        device: where tensors made from nothing go.
    """
    kwargs = {name: _argument(argument, values) for name, argument in node.kwargs.items()}
    if node.op.split(".")[1] in _FACTORIES:
        kwargs["device"] = device
    result = operator(node.op)(*(_argument(argument, values) for argument in node.args), **kwargs)
    return tuple(result) if isinstance(result, (list, tuple)) else (result,)


def interpret(
    graph: Graph, inputs: Mapping[str, torch.Tensor], states: Callable[[State], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Run ``graph``.

    Args:
        inputs: value name of every input → tensor.
        states: gives the tensor of a parameter, buffer or literal; a buffer that the graph writes is written.

    Returns:
        output path → tensor.
    """
    values: dict[str, Any] = dict(inputs)
    values.update((state.value.name, states(state)) for state in graph.states)
    device = next(iter(values.values())).device if values else "cpu"
    for node in graph.nodes:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not node.op.endswith("_.default")):
            results = run_node(node, values, device=device)
        values.update((value.name, result) for value, result in zip(node.outputs, results))
    return {path: values[name] for path, name in graph.outputs.items()}


def _argument(argument: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, tuple):
        return [_argument(item, values) for item in argument]
    if isinstance(argument, str) and argument.startswith("dtype:"):
        return getattr(torch, argument.removeprefix("dtype:"))
    return argument
