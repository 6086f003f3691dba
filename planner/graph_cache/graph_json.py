"""A graph as plain data and back: what planning needs of it, without tensors and without code.

Numbers, texts, ``None``, lists and booleans stand for themselves. What JSON cannot tell apart is tagged: a ``Ref`` is
``{"ref": name}``, a tuple ``{"tuple": […]}``, a mapping ``{"dict": {…}}``, a float that is not finite
``{"float": "inf"}``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from passes.ir.graph import Graph, Node, Ref, State, Value


def to_plain(graph: Graph) -> dict[str, Any]:
    """The graph as what ``json.dumps`` takes, without the data of its literal constants and without ``unflatten``.

    Raises:
        ValueError: if an argument of a node is of a kind that JSON cannot say.
    """
    return {
        "model_name": graph.model_name,
        "inputs": [_value(value) for value in graph.inputs],
        "input_paths": [list(path) for path in graph.input_paths],
        "states": [[_value(state.value), state.path, list(state.aliases), state.persistent] for state in graph.states],
        "nodes": [_node(node) for node in graph.nodes],
        "outputs": dict(graph.outputs),
        "loss": graph.loss,
        "training": graph.training,
        "checkpointed": graph.checkpointed,
        "module_classes": dict(graph.module_classes),
    }


def from_plain_graph(data: Mapping[str, Any]) -> Graph:
    """The graph that ``to_plain`` wrote.

    Raises:
        KeyError, TypeError, ValueError: if it did not.
    """
    return Graph(
        model_name=data["model_name"],
        inputs=tuple(map(_read_value, data["inputs"])),
        input_paths=tuple(tuple(path) for path in data["input_paths"]),
        states=tuple(
            State(_read_value(value), path, tuple(aliases), persistent)
            for value, path, aliases, persistent in data["states"]
        ),
        nodes=tuple(map(_read_node, data["nodes"])),
        outputs=data["outputs"],
        loss=data["loss"],
        training=data["training"],
        checkpointed=data["checkpointed"],
        module_classes=data["module_classes"],
    )


def _value(value: Value) -> list[Any]:
    return [value.name, list(value.shape), value.dtype, value.kind, value.requires_grad]


def _read_value(data: list[Any]) -> Value:
    name, shape, dtype, kind, requires_grad = data
    return Value(name, tuple(shape), dtype, kind, requires_grad)


def _node(node: Node) -> list[Any]:
    return [
        node.name, node.op, _argument(node.args), _argument(dict(node.kwargs)),
        [_value(value) for value in node.outputs],
        node.module_path, node.module_class, node.constant, node.key, node.draw,
    ]  # fmt: skip


def _read_node(data: list[Any]) -> Node:
    name, op, args, kwargs, outputs, *rest = data
    return Node(name, op, _read_argument(args), _read_argument(kwargs), tuple(map(_read_value, outputs)), *rest)


def _argument(item: Any) -> Any:
    if isinstance(item, Ref):
        return {"ref": item.name}
    if type(item) is tuple:
        return {"tuple": [_argument(each) for each in item]}
    if type(item) is list:
        return [_argument(each) for each in item]
    if type(item) is dict and all(isinstance(key, str) for key in item):
        return {"dict": {key: _argument(each) for key, each in item.items()}}
    if type(item) is float and not math.isfinite(item):
        return {"float": repr(item)}
    if item is None or type(item) in (bool, int, float, str):
        return item
    raise ValueError(f"an argument {item!r} of type {type(item).__name__} cannot be written as JSON")


def _read_argument(data: Any) -> Any:
    if isinstance(data, list):
        return [_read_argument(each) for each in data]
    if not isinstance(data, dict):
        return data
    ((tag, content),) = data.items()
    if tag == "ref":
        return Ref(content)
    if tag == "tuple":
        return tuple(_read_argument(each) for each in content)
    if tag == "dict":
        return {key: _read_argument(each) for key, each in content.items()}
    if tag == "float":
        return float(content)
    raise ValueError(f"unknown tag {tag!r} in a graph")
