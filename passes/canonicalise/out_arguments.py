"""Turn ``out=`` arguments into values that are copied: ``torch.div(a, b, out=c)`` into ``c.copy_(a / b)``.

``functionalise`` then carries the copy to all that shares memory with what was written, as any write in place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx
from torch import ops as torch_operators

from passes.canonicalise.fx import aten, insert, shape, value
from passes.ir.errors import CaptureError
from passes.torch_compat.operators import OpOverload, overload_name, schema

#: What operators that make tensors from nothing take instead of out=.
_MADE_AS = {"dtype", "layout", "device", "pin_memory"}


def replace_out_arguments(module: fx.GraphModule) -> None:
    """Give every call with ``out=`` a value of its own and copy that to where it was to be written.

    Raises:
        CaptureError: if an operator has no overload without ``out=``, or resizes what it writes to.
    """
    for node in list(module.graph.nodes):
        names = _out_names(node)
        if names:
            _replace(node, [node.kwargs[name] for name in names], set(names))


def _out_names(node: fx.Node) -> list[str]:
    """The keyword arguments that a call writes to."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    return [
        entry.name
        for entry in schema(node.target).arguments
        if entry.kwarg_only and entry.alias_info is not None and entry.alias_info.is_write and entry.name in node.kwargs
    ]


def _replace(node: fx.Node, written: list[Any], names: set[str]) -> None:
    functional = _without_out(node.target, names)
    kwargs = {name: entry for name, entry in node.kwargs.items() if name not in names}
    kwargs.update(_as_written(functional, written[0], schema(node.target).arguments))
    computed = insert(node, functional, node.args, kwargs)
    values = [computed]
    if len(written) > 1:
        values = [insert(node, operator.getitem, (computed, index)) for index in range(len(written))]
    for target, new in zip(written, values):
        if shape(target) != shape(new):
            raise CaptureError(
                f"{node.target} resizes its out= from {shape(target)} to {shape(new)}: pass one of the result's shape"
            )
        insert(node, aten.copy_.default, (target, new), like=target)
    if len(written) == 1:
        node.replace_all_uses_with(written[0])
    for user in list(node.users):  # the outputs of several, taken one by one
        index = user.args[1]
        assert isinstance(index, int)
        user.replace_all_uses_with(written[index])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _without_out(target: Any, names: set[str]) -> OpOverload:
    """The overload of the same operator that takes the same arguments, less those called ``names``."""
    expected = _signature(entry for entry in schema(target).arguments if entry.name not in names)
    packet = getattr(getattr(torch_operators, target.namespace), schema(target).name.split("::")[1])
    for overload in packet.overloads():
        candidate: OpOverload = getattr(packet, overload)
        arguments = schema(candidate).arguments
        # What makes a tensor from nothing takes beside them what out= had said.
        is_alike = _signature(arguments[: len(expected)]) == expected and not _writes(arguments)
        if is_alike and {entry.name for entry in arguments[len(expected) :]} <= _MADE_AS:
            return candidate
    raise CaptureError(f"{target} ({overload_name(target)}) writes to out= and has no form without it: do not use out=")


def _as_written(functional: OpOverload, target: fx.Node, before: Sequence[Any]) -> dict[str, Any]:
    """The dtype and device of a tensor made from nothing: those that out= had. ``before``: arguments beside out=."""
    of_target = {"dtype": value(target).dtype, "device": value(target).device}
    names = {entry.name for entry in schema(functional).arguments} - {entry.name for entry in before}
    return {name: of_target[name] for name in sorted(names) if name in of_target}


def _signature(arguments: Iterable[Any]) -> list[tuple[str, str]]:
    return [(entry.name, str(entry.type)) for entry in arguments]


def _writes(arguments: Any) -> bool:
    return any(entry.alias_info is not None and entry.alias_info.is_write for entry in arguments)
