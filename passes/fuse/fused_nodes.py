"""Build the nodes that replace a matched pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from passes.capture.interpret import operator
from passes.fuse.pattern_notation import Constant, PatternCall, PatternLiteral, Tensor, Tree
from passes.fuse.pattern_notation import Sequence as Listed
from passes.ir.graph import Node, Ref, Value, iterate_refs, map_refs
from passes.ir.recent_results import RecentResults
from passes.rules.operator_call import schema_of

#: Shape and dtype.
Spec = tuple[tuple[int, ...], str]
#: Operators whose values do not depend on those of their operands.
_CONSTANT = frozenset(("aten.ones_like.default", "aten.zeros_like.default"))
_output_specs: RecentResults[tuple[Spec, ...]] = RecentResults(4096)


class CannotBuild(Exception):
    """The fused operator cannot be called on the matched tensors and constants."""


def is_registered(op: str) -> bool:
    """Whether torch knows ``op``."""
    return schema_of(op) is not None


def build(
    tree: PatternCall,
    tensors: Mapping[str, str],
    constants: Mapping[str, Any],
    values: Mapping[str, Value],
    *,
    prefix: str,
) -> list[Node]:
    """Nodes that compute ``tree``, the last one its result; intermediate values are named after ``prefix``.

    Raises:
        CannotBuild: if an operator refuses the shapes, types or constants.
    """
    nodes: list[Node] = []
    values_by_name = dict(values)

    def argument(each: Tree) -> Any:
        if isinstance(each, Tensor):
            return Ref(tensors[each.name])
        if isinstance(each, Constant):
            return constants[each.name]
        if isinstance(each, PatternLiteral):
            return each.value
        if isinstance(each, Listed):
            return tuple(argument(item) for item in each.items)
        return Ref(call(each).output.name)

    def call(each: PatternCall) -> Node:
        args = tuple(argument(item) for item in each.args)
        kwargs = {name: argument(item) for name, item in each.kwargs}
        outputs = outputs_of(each.ops[0], args, kwargs, values_by_name, name=f"{prefix}{len(nodes)}")
        node = Node(outputs[0].name, each.ops[0], args, kwargs, outputs)
        values_by_name.update((value.name, value) for value in outputs)
        nodes.append(node)
        return node

    call(tree)
    return nodes


def outputs_of(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any], values: Mapping[str, Value], *, name: str
) -> tuple[Value, ...]:
    """The outputs of a call, inferred on the meta device."""
    inputs = [values[ref.name] for ref in iterate_refs((tuple(args), tuple(kwargs.values())))]
    places = iter(range(len(inputs)))
    numbered = map_refs((tuple(args), dict(kwargs)), lambda _: Ref(str(next(places))))
    input_specs = tuple((value.shape, value.dtype) for value in inputs)
    specs = _output_specs.get((op, repr(numbered), input_specs), lambda: _specs(op, numbered, input_specs))
    grad = any(value.requires_grad for value in inputs) and op not in _CONSTANT
    names = [name] if len(specs) == 1 else [f"{name}_{place}" for place in range(len(specs))]
    return tuple(
        Value(output_name, shape, dtype, requires_grad=grad) for output_name, (shape, dtype) in zip(names, specs)
    )


def _specs(op: str, arguments: Any, inputs: Sequence[Spec]) -> tuple[Spec, ...]:
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in inputs]
    args, kwargs = _plain(map_refs(arguments, lambda ref: tensors[int(ref.name)]))
    try:
        with torch.no_grad():
            result = operator(op)(*args, **kwargs)
    except Exception as error:  # whatever an operator raises for arguments that it does not take
        raise CannotBuild(f"{op} does not take this: {str(error).splitlines()[0]}") from error
    outputs = result if isinstance(result, (list, tuple)) else (result,)
    return tuple((tuple(output.shape), str(output.dtype).removeprefix("torch.")) for output in outputs)


def _plain(argument: Any) -> Any:
    if isinstance(argument, str) and argument.startswith("dtype:"):
        return getattr(torch, argument.removeprefix("dtype:"))
    if isinstance(argument, (list, tuple)):
        return [_plain(item) for item in argument]
    if isinstance(argument, dict):
        return {name: _plain(item) for name, item in argument.items()}
    return argument
