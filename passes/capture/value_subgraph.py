"""The operators that lead to a value, out of a graph that is still being traced, as steps that can be run anywhere."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from passes.capture.shorten import SKIPPED
from passes.ir.value_guards import GuardStep, StepResult
from passes.torch_compat.operators import OpOverload, schema, tree_leaves
from passes.torch_compat.tensor_fields import FakeTensor, storage_id
from passes.torch_compat.tracer_questions import CurrentTrace, outside_of_tracing

#: What a placeholder is: ("input", path), ("parameter", name) or ("buffer", name).
Source = tuple[str, Any]

#: Operators → the place of the argument of which only the shape and dtype matter.
_OF_SHAPE = {
    **{
        f"aten.{name}": 0
        for name in (
            "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "empty_like", "new_empty",
        )
    },
    **{f"aten.{name}": 1 for name in ("expand_as", "view_as", "reshape_as", "type_as")},
}  # fmt: skip
#: Arguments of random operators that draw only where none of these is False or zero.
_SWITCHES = ("train", "training", "dropout", "dropout_p", "p")


class UnknownValue(Exception):
    """A value that no inputs, buffers and constants decide; the text goes on from "a value that"."""


class Subgraphs:
    """Finds what leads to a tensor.

    Args:
        trace: the graph so far.
        tensors: those that the trace began with, by what they are.
    """

    def __init__(self, trace: CurrentTrace, tensors: Mapping[Source, torch.Tensor]) -> None:
        self._trace = trace
        self._sources: dict[fx.Node, Source] = {}
        for source, tensor in tensors.items():
            node = trace.node_of(tensor)
            if node is not None:
                self._sources.setdefault(node, source)
        self._steps: dict[fx.Node, StepResult] = {}

    def steps_to(self, tensor: torch.Tensor, add: Callable[[GuardStep], StepResult]) -> StepResult:
        """Add the steps that give ``tensor``, those that were added before not again.

        Raises:
            UnknownValue: if it depends on more than inputs, buffers and constants.
        """
        node = self._trace.node_of(tensor)
        if node is None:
            raise UnknownValue("comes from outside of what is traced")
        nodes = _upstream(node)
        writes = self._writers(nodes)
        if writes:
            nodes = _with_writers(list(self._trace.graph.nodes), node)
        for each in nodes:  # refuse before anything is run
            self._check(each)
        # What is written to is computed again for every reading, which may come before or after the writing.
        steps = {} if writes else self._steps
        for each in nodes:
            if each not in steps:
                steps[each] = add(self._step(each, steps, copied=bool(writes)))
        return steps[node]

    def is_settled(self, tensor: torch.Tensor) -> bool:
        """Whether inputs, buffers and constants decide what ``tensor`` is."""
        node = self._trace.node_of(tensor)
        try:
            for each in _upstream(node) if node is not None else ():
                self._check(each)
        except UnknownValue:
            return False
        return node is not None

    def is_written(self, source: Source) -> bool:
        """Whether an operator changes what the trace began with."""
        nodes = [node for node, of in self._sources.items() if of == source]
        return bool(self._writers(nodes))

    def _writers(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Nodes that write to the memory of any of these."""
        memories = {memory for node in nodes for memory in _memories(node)}
        return [node for node in self._trace.graph.nodes if not memories.isdisjoint(_written_memories(node))]

    def _check(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            kind, name = self._sources.get(node, ("unknown", node.name))
            if kind == "parameter":
                raise UnknownValue(f"depends on the parameter {name!r}, which training changes")
            if kind == "unknown":
                raise UnknownValue("comes from outside of what is traced")
        elif node.op == "get_attr":
            if isinstance(self._trace.constant(str(node.target)), FakeTensor):
                raise UnknownValue("depends on a tensor without data")
        elif node.target is not python_operator.getitem:
            if not isinstance(node.target, OpOverload):
                raise UnknownValue(f"comes out of {node.target}")
            if str(node.target) == SKIPPED:
                raise UnknownValue("depends on a layer that is skipped")
            if _draws(node):
                raise UnknownValue(f"depends on random numbers ({node.target})")

    def _step(self, node: fx.Node, steps: Mapping[fx.Node, StepResult], *, copied: bool) -> GuardStep:
        if node.op == "placeholder":
            kind, name = self._sources[node]
            return GuardStep(kind, (name,), writes=copied)
        if node.op == "get_attr":
            return _literal(self._trace.constant(str(node.target)))
        if node.target is python_operator.getitem:
            return GuardStep("item", tuple(_argument(argument, steps) for argument in node.args))
        args = tuple(_argument(argument, steps) for argument in node.args)
        place = _only_shape_at(node)
        if place is not None:
            entry = node.args[place].meta["val"]  # type: ignore[union-attr]
            blank = GuardStep("blank", (tuple(entry.shape), entry.dtype))
            return GuardStep(str(node.target), (*args[:place], blank, *args[place + 1 :]), _keywords(node, steps))
        return GuardStep(str(node.target), args, _keywords(node, steps), writes=bool(_written(node)))


def _upstream(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node depends on by its arguments, and itself, in an order in which they can run."""
    order: dict[fx.Node, None] = {}
    stack = [(node, False)]
    while stack:
        current, is_ready = stack.pop()
        if is_ready:
            order[current] = None
        elif current not in order:
            stack.append((current, True))
            stack += [(source, False) for source in _read_nodes(current)]
    return list(order)


def _with_writers(nodes: list[fx.Node], node: fx.Node) -> list[fx.Node]:
    """The nodes that a node depends on, also by what others wrote to its arguments' memory, in the graph's order."""
    needed, memories, order = {node}, set(_memories(node)), []
    for current in reversed(nodes):
        if current in needed or not memories.isdisjoint(_written_memories(current)):
            order.append(current)
            sources = _read_nodes(current)
            needed.update(sources)
            memories.update(memory for source in (current, *sources) for memory in _memories(source))
    return order[::-1]


def _read_nodes(node: fx.Node) -> list[fx.Node]:
    place = _only_shape_at(node)
    if place is None:
        return node.all_input_nodes
    others = (*node.args[:place], *node.args[place + 1 :], *node.kwargs.values())
    return [source for source in node.all_input_nodes if source in others]


def _only_shape_at(node: fx.Node) -> int | None:
    """The place of the argument of which only the shape matters; None if there is none."""
    place = _OF_SHAPE.get(str(node.target).rpartition(".")[0])
    return place if place is not None and isinstance(node.args[place], fx.Node) else None


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor))


def _memories(node: fx.Node) -> list[int]:
    return [storage_id(tensor) for tensor in _tensors(node)]


def _written_memories(node: fx.Node) -> list[int]:
    return [memory for argument in _written(node) for memory in _memories(argument)]


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operator changes in place."""
    if not isinstance(node.target, OpOverload):
        return []
    arguments = schema(node.target).arguments
    values = {**dict(zip((argument.name for argument in arguments), node.args)), **node.kwargs}
    changed = [
        values.get(argument.name) for argument in arguments if argument.alias_info and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, fx.Node)]


def _draws(node: fx.Node) -> bool:
    """Whether an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return False
    arguments = schema(node.target).arguments  # type: ignore[arg-type]
    values = {**dict(zip((argument.name for argument in arguments), node.args)), **node.kwargs}
    return all(values.get(name) not in (False, 0.0) for name in _SWITCHES if name in values)


def _keywords(node: fx.Node, steps: Mapping[fx.Node, StepResult]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _argument(value, steps)) for name, value in node.kwargs.items() if name != "pin_memory")


def _argument(argument: Any, steps: Mapping[fx.Node, StepResult]) -> Any:
    """An argument with results of steps for nodes; whatever the device, guards are read on the CPU."""
    if isinstance(argument, fx.Node):
        return steps.get(argument)
    if isinstance(argument, (list, tuple)):
        return tuple(_argument(item, steps) for item in argument)
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _literal(tensor: torch.Tensor) -> GuardStep:
    with outside_of_tracing():
        whole = tensor.detach().cpu().contiguous()
        content = whole.view(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    return GuardStep("literal", (tuple(tensor.shape), tensor.dtype, content))
