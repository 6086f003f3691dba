"""From the canonical FX graph to ``passes.ir.graph.Graph``."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from passes.canonicalise import CONSTANT, WRITES, cross_entropy, expert_linear, nodes_with_gradient
from passes.capture.naming import Namer, name_wishes
from passes.capture.nested_values import Path
from passes.ir.errors import CaptureError
from passes.ir.graph import ITEM_SIZE, Graph, Node, ParameterWrite, Ref, State, Value, assign_keys
from passes.torch_compat.operators import HigherOrderOperator

OUR_OPERATORS: dict[Any, str] = {
    cross_entropy: "meshwright.cross_entropy",
    expert_linear: "meshwright.expert_linear",
}


@dataclasses.dataclass(frozen=True)
class Source:
    """What a placeholder is: a graph input (``path`` in the call), or a state.

    ``kind`` is a ``ValueKind``; ``name`` the name that its value should have.
    """

    kind: str
    name: str
    path: Path = ()
    state: str = ""
    aliases: tuple[str, ...] = ()
    persistent: bool = True
    requires_grad: bool = False
    data: Any = None


def convert(module: fx.GraphModule, sources: Mapping[str, Source], outputs: list[str], *, model_name: str) -> Graph:
    """The Graph of a canonical FX graph.

    Args:
        sources: placeholder name → what it is; placeholders that nothing uses are left out of the graph.
        outputs: path of every output tensor, in the order in which the graph returns them.

    Raises:
        CaptureError: for a node that gives something other than tensors.
    """
    return _Converter(module, sources).graph(outputs, model_name)


class _Converter:
    def __init__(self, module: fx.GraphModule, sources: Mapping[str, Source]) -> None:
        self.fx_nodes = list(module.graph.nodes)
        self.parameter_writes: list[ParameterWrite] = module.meta.get(WRITES, [])
        self.sources = sources
        self.namer = Namer()
        self.names: dict[fx.Node, str] = {}
        trainable = [name for name, source in sources.items() if source.requires_grad]
        self.carrying = nodes_with_gradient(module.graph, trainable)
        calls = [node for node in self.fx_nodes if _is_call(node)]
        self.wishes = dict(zip(calls, name_wishes([(_place(node)[0], _operator(node)) for node in calls])))

    def graph(self, outputs: list[str], model_name: str) -> Graph:
        inputs: list[Value] = []
        paths: list[Path] = []
        states: list[State] = []
        nodes: list[Node] = []
        results: Any = ()
        for node in self.fx_nodes:
            if node.op == "placeholder" and node.users:
                source = self.sources[node.name]
                value = self.value(node, node.meta["val"], source.name, source.kind, source.requires_grad)
                if source.kind == "input":
                    inputs.append(value)
                    paths.append(source.path)
                else:
                    states.append(State(value, source.state, source.aliases, source.persistent, source.data))
            elif _is_call(node):
                nodes.append(self.node(node))
            elif node.op == "output":
                results = node.args[0]
        named = {path: self.names[result] for path, result in zip(outputs, results, strict=True)}
        classes = {path: name for node in self.fx_nodes if _is_call(node) for path, name in _places(node)}
        keyed = assign_keys(tuple(nodes))
        return Graph(
            model_name,
            tuple(inputs),
            tuple(paths),
            tuple(states),
            keyed,
            named,
            parameter_writes=tuple(map(self.parameter_write, self.parameter_writes)),
            module_classes=classes,
        )

    def value(self, node: fx.Node, entry: torch.Tensor, wish: str, kind: Any, requires_grad: bool) -> Value:
        name = self.namer.name(wish)
        self.names.setdefault(node, name)
        dtype = str(entry.dtype).removeprefix("torch.")
        if dtype not in ITEM_SIZE or not all(isinstance(size, int) for size in entry.shape):
            raise CaptureError(f"{wish} has shape {tuple(entry.shape)} and dtype {dtype}: shapes must be static")
        return Value(name, tuple(entry.shape), dtype, kind, requires_grad)

    def node(self, node: fx.Node) -> Node:
        path, module_class = _place(node)
        if isinstance(node.target, HigherOrderOperator):
            raise CaptureError(f"in module {path!r} ({module_class}): {node.target} cannot be planned: its branches or "
                               "loops run by the values of tensors")  # fmt: skip
        values = self.outputs(node, self.wishes[node])
        return Node(
            values[0].name,
            _operator(node),
            tuple(self.argument(argument) for argument in node.args),
            {name: self.argument(argument) for name, argument in node.kwargs.items() if name not in _PLACEMENT},
            tuple(values),
            path,
            module_class,
            bool(node.meta.get(CONSTANT)),
        )

    def outputs(self, node: fx.Node, wish: str) -> list[Value]:
        """The values of a call; of one with several outputs, the ``getitem`` nodes that name them."""
        entry = node.meta.get("val")
        if isinstance(entry, torch.Tensor):
            return [self.value(node, entry, wish, "node", node in self.carrying)]
        if not isinstance(entry, (list, tuple)) or not all(isinstance(leaf, torch.Tensor) for leaf in entry):
            raise CaptureError(f"{node.target} gives {type(entry).__name__}, not tensors")
        values = []
        for index, leaf in enumerate(entry):
            carries = node in self.carrying and (leaf.is_floating_point() or leaf.is_complex())
            values.append(self.value(node, leaf, f"{wish}_{index}", "node", carries))
        for user in node.users:
            if user.target is operator.getitem:
                self.names[user] = values[user.args[1]].name  # type: ignore[index]
        return values

    def parameter_write(self, write: ParameterWrite) -> ParameterWrite:
        """A write with the paths of parameters for the names of their placeholders."""
        steps = tuple(
            dataclasses.replace(step, args=(self.sources[step.args[0]].state,)) if step.op == "parameter" else step
            for step in write.steps
        )
        return dataclasses.replace(write, path=self.sources[write.path].state, steps=steps)

    def argument(self, argument: Any) -> Any:
        """An argument as plain data."""
        if isinstance(argument, fx.Node):
            return Ref(self.names[argument])
        if isinstance(argument, (list, tuple)):
            return tuple(self.argument(item) for item in argument)
        if isinstance(argument, torch.dtype):
            return f"dtype:{str(argument).removeprefix('torch.')}"
        if isinstance(argument, (torch.device, torch.layout, torch.memory_format)):
            return None
        return argument


_PLACEMENT = ("device", "layout", "pin_memory", "memory_format", "non_blocking")


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def _operator(node: fx.Node) -> str:
    return OUR_OPERATORS.get(node.target, str(node.target))


def _place(node: fx.Node) -> tuple[str, str]:
    """Path and class name of the module whose forward made the call."""
    places = _places(node)
    return places[-1] if places else ("", "")


def _places(node: fx.Node) -> list[tuple[str, str]]:
    """Path and class name of every module whose forward was running at the call, outermost first."""
    places = []
    for path, class_name in (node.meta.get("nn_module_stack") or {}).values():
        name = class_name if isinstance(class_name, str) else class_name.__name__
        places.append((path.partition("@")[0].removeprefix("model").removeprefix("."), name.rpartition(".")[2]))
    return places
