"""The graph that every pass and the search work on: a list of operators over named values.

It is plain data (no torch import), made once by capture and never changed in place: a pass takes a graph and
returns a graph. Shapes are global (the whole model on one device) and static.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cost_models.dtypes import ITEM_SIZE
from cost_models.short_text import ShortRepr
from passes.ir.value_guards import GuardStep, ValueGuards

ValueKind = Literal["input", "parameter", "buffer", "constant", "node"]


@dataclass(frozen=True)
class Ref:
    """A use of a value, inside the arguments of a node."""

    name: str


@dataclass(frozen=True)
class Value:
    """A tensor: a graph input, a parameter, a buffer, a literal constant, or the output of a node.

    ``name`` is a Python identifier, unique in the graph. ``dtype`` is a key of ``ITEM_SIZE``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: ValueKind = "node"
    requires_grad: bool = False

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class State:
    """A parameter, buffer or literal constant of the model: the value and where it lives.

    ``path`` is its fully qualified name (``model.layers.0.mlp.up_proj.weight``); ``aliases`` are further names
    of the same tensor (tied weights). ``data`` holds the tensor of a literal constant, else None.
    """

    value: Value
    path: str
    aliases: tuple[str, ...] = ()
    persistent: bool = True
    data: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class ParameterWrite:
    """A write of forward to a parameter, which is done before a call.

    Attributes:
        path: of the parameter.
        steps: operators on parameters (``parameter`` of a path is one's value); the last one writes in place.
        elementwise: whether each element is written from the same element of tensors of the same shape.
    """

    path: str
    steps: tuple[GuardStep, ...]
    elementwise: bool

    @property
    def paths(self) -> tuple[str, ...]:
        """The parameters that it reads, and the one that it writes."""
        return tuple(step.args[0] for step in self.steps if step.op == "parameter")


@dataclass(frozen=True)
class Node:
    """One operator call.

    Attributes:
        name: unique Python identifier.
        op: ``"aten.linear.default"`` and the like, or ``"meshwright.<name>"`` for operators of ours.
        args, kwargs: as in the call; every tensor is a ``Ref`` (possibly inside a list or tuple), everything else
            a plain constant (dtypes as ``"dtype:float32"``, devices dropped).
        outputs: one value for most operators, several for ``split``, ``topk`` and the like.
        module_path: path of the module that made the call, ``""`` for the root.
        module_class: its class name.
        constant: True if it depends on shapes and constants alone (attention masks, position ids): it is computed
            once per shape, replicated, and costs the step nothing.
        key: stable name across captures and shapes: ``<module_path>:<op>:<occurrence in that module>``.
        draw: number of a random operator among those of the model, in the order of the captured graph; else None.
    """

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Value, ...]
    module_path: str = ""
    module_class: str = ""
    constant: bool = False
    key: str = ""
    draw: int | None = None

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensor inputs in call order (args, then kwargs), with repeats."""
        return tuple(ref.name for ref in iterate_refs((self.args, tuple(self.kwargs.values()))))

    @functools.cached_property
    def constants(self) -> str:
        """The arguments with every tensor blanked out, for telling whether two calls differ in a constant."""
        return repr(map_refs((self.args, dict(self.kwargs)), lambda ref: Ref("")))

    @property
    def writes_buffer(self) -> bool:
        """Whether it writes its first input, a buffer of the model: graphs write nothing else in place."""
        return self.op == "aten.copy_.default"

    @property
    def output(self) -> Value:
        """The first (for most operators, the only) output."""
        return self.outputs[0]


def iterate_refs(args: Any) -> Iterator[Ref]:
    """Every ``Ref`` in nested lists, tuples and dicts of arguments, in order."""
    if isinstance(args, Ref):
        yield args
    elif isinstance(args, (list, tuple)):
        for item in args:
            yield from iterate_refs(item)
    elif isinstance(args, dict):
        for item in args.values():
            yield from iterate_refs(item)


def map_refs(args: Any, function: Callable[[Ref], Any]) -> Any:
    """Nested arguments with every ``Ref`` replaced by ``function(ref)``."""
    if isinstance(args, Ref):
        return function(args)
    if isinstance(args, (list, tuple)):
        return type(args)(map_refs(item, function) for item in args)
    if isinstance(args, dict):
        return {key: map_refs(item, function) for key, item in args.items()}
    return args


@dataclass(frozen=True, repr=False)
class Graph(ShortRepr):
    """A captured model.

    Attributes:
        model_name: class name of the model.
        inputs: tensor inputs that are used, in call order; ``Value.name`` is made from the argument's path.
        input_paths: for each input, its place in the call: ``("input_ids",)``, ``(0,)``, ``("batch", "x")``.
        states: parameters, buffers and literal constants that are used.
        nodes: in execution order, constant ones included.
        outputs: output path → value name (``"loss"``, ``"logits"``, ``"0"``, ``"past.0"``, or ``""`` if the model
            returns one bare tensor). Non-tensor outputs are left out.
        loss: the output path that is the training loss (a scalar), or None.
        training: captured in training mode.
        checkpointed: part of the model runs under ``torch.utils.checkpoint``: its author wants it recomputed.
        unflatten: makes what the model returns from ``{output path: tensor}``; None for ``{path: tensor}`` itself.
        parameter_writes: what is done to parameters before the call, in order.
        module_classes: class name of every module that computes something, itself or by its children, by path.
    """

    model_name: str
    inputs: tuple[Value, ...]
    input_paths: tuple[tuple[str | int, ...], ...]
    states: tuple[State, ...]
    nodes: tuple[Node, ...]
    outputs: Mapping[str, str]
    loss: str | None = None
    training: bool = True
    checkpointed: bool = False
    guards: ValueGuards = field(default_factory=ValueGuards)
    parameter_writes: tuple[ParameterWrite, ...] = ()
    unflatten: Callable[[dict[str, Any]], Any] | None = field(default=None, compare=False, repr=False)
    module_classes: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def values(self) -> Mapping[str, Value]:
        """Every value of the graph by name; one mapping for all who ask."""
        values = {value.name: value for value in self.inputs}
        values.update((state.value.name, state.value) for state in self.states)
        values.update((value.name, value) for node in self.nodes for value in node.outputs)
        return values

    @property
    def parameters(self) -> tuple[State, ...]:
        return tuple(state for state in self.states if state.value.kind == "parameter")

    def replace(self, **changes: Any) -> Graph:
        return dataclasses.replace(self, **changes)


def node_keys(calls: Iterable[tuple[str, str]]) -> list[str]:
    """The ``key`` of every call, given as (module path, operator), in the order of the graph."""
    seen: dict[tuple[str, str], int] = {}
    keys = []
    for path, op in calls:
        occurrence = seen.get((path, op), 0)
        keys.append(f"{path}:{op}:{occurrence}")
        seen[path, op] = occurrence + 1
    return keys


def assign_keys(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Nodes with their ``key`` set: module path, operator and how often it came before in that module."""
    keys = node_keys((node.module_path, node.op) for node in nodes)
    return tuple(dataclasses.replace(node, key=key) for node, key in zip(nodes, keys))
