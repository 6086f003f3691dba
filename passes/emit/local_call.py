"""One operator as one rank calls it, and the tools that render the call as Python source."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from passes.emit.expression_table import FUNCTIONS, INFIX
from passes.emit.quoting import literal
from passes.ir.graph import Node, Ref, Value, map_refs
from passes.ir.types import I, MeshShape, P, Placement, R, shard_dim, uneven_dims
from passes.rules.operator_call import OperatorCall, bind, schema_of, signature
from passes.rules.rule import AxisChoice, ShardingRule


@dataclass(frozen=True)
class LocalTensor:
    """An operand or output as one rank has it: how the source names it, its local shape, and its types.

    ``shape`` is that of the first rank's part, ``whole`` that of all parts together.
    """

    name: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    placement: Placement
    requires_grad: bool
    dtype: str


@dataclass(frozen=True)
class LocalCall:
    """One operator on one rank. ``inputs`` follow ``node.inputs``, ``choices`` have one entry per mesh axis.

    ``draw`` numbers the random operators of a block.
    """

    node: Node
    inputs: tuple[LocalTensor, ...]
    outputs: tuple[LocalTensor, ...]
    choices: tuple[AxisChoice, ...]
    mesh: MeshShape
    rule: ShardingRule | None
    draw: int = 0


class Name(str):
    """Source text that stands for a tensor."""


class Writer:
    """Renders one call; ``arguments`` are the operator's by name, with tensors replaced by their ``Name``."""

    def __init__(self, call: LocalCall) -> None:
        self.call = call
        self.op = call.node.op
        node = _numbered(call.node)
        bound = bind(node, {name: _value(tensor) for name, tensor in zip(node.inputs, call.inputs)})
        if bound is None:
            raise ValueError(f"cannot write {self.op}: torch has no such operator; give it a signature and a rule")
        self.bound: OperatorCall = bound
        self.arguments: dict[str, Any] = {
            name: _with_names(value, call.inputs) for name, value in bound.arguments.items()
        }
        self.summed = False

    # -- what the plan says -------------------------------------------------------------------------------------

    @property
    def output(self) -> LocalTensor:
        return self.call.outputs[0]

    @property
    def axes(self) -> tuple[tuple[str, AxisChoice, int], ...]:
        """Name, choice and place of every mesh axis of more than one device."""
        mesh = self.call.mesh
        return tuple(
            (name, choice, place)
            for place, (name, size, choice) in enumerate(zip(mesh.names, mesh.sizes, self.call.choices))
            if size > 1
        )

    def axes_cutting(self, factor: str) -> tuple[str, ...]:
        """Names of the mesh axes that cut ``factor``, outermost first."""
        return tuple(name for name, choice, _ in self.axes if choice.factor == factor)

    @property
    def contracted_axes(self) -> tuple[str, ...]:
        """Mesh axes that cut a factor that the outputs lack: what the function gives there are partial sums."""
        return tuple(name for name, choice, _ in self.axes if choice.factor is not None and P in choice.outputs)

    @property
    def takes_partial(self) -> bool:
        """Whether an operand is a partial sum on some axis."""
        return any(tensor.placement[place] == P for tensor in self.call.inputs for _, _, place in self.axes)

    @property
    def mixes_invariant(self) -> bool:
        """Whether operands are I and R on some axis: those that are R have no gradient."""
        return any({I, R} <= {tensor.placement[place] for tensor in self.call.inputs} for _, _, place in self.axes)

    def uneven_dims(self, tensor: LocalTensor) -> dict[int, str]:
        """The dims whose parts differ in length from rank to rank, with the mesh axis that cuts each."""
        mesh = self.call.mesh
        return {dim: mesh.names[axis] for dim, axis in uneven_dims(tensor.whole, tensor.placement, mesh).items()}

    def tensor(self, name: str) -> LocalTensor:
        """The operand passed as argument ``name``."""
        return self.call.inputs[self.bound.slots.index(name)]

    # -- source -------------------------------------------------------------------------------------------------

    def plain(self) -> str:
        """The call as the tables say, or torch's own operator where they say nothing."""
        if self.op in INFIX and self._only_operands():
            return INFIX[self.op].format(**{name: render(value) for name, value in self.arguments.items()})
        template = FUNCTIONS.get(self.op)
        return self.function(template if template is not None and self._shows_all(template) else self._operator())

    def _shows_all(self, template: str) -> bool:
        """Whether ``template`` has a place for every argument that is not at its default.

        No function of Python takes None in a list of tensors, which stands for a dim that is not indexed.
        """
        if any(isinstance(value, (list, tuple)) and None in value for value in self.arguments.values()):
            return False
        inside = template.partition("(")[2].rstrip(")")
        if not inside:
            return True  # Every argument in the order of the schema, or none that matters.
        shown = {name.removeprefix("*") for _, name in map(_parameter, _split(inside))}
        shown |= {template.partition(".")[0]} | _PLACES | _WITHOUT_EFFECT
        defaults = dict(signature(self.op) or ())
        return all(name in shown or _same(value, defaults.get(name)) for name, value in self.arguments.items())

    def function(self, template: str) -> str:
        """``template`` (see ``expression_table``) filled in."""
        callee, bracket, inside = template.partition("(")
        parameters: list[tuple[str | None, str]]
        if bracket:
            parameters = [_parameter(text) for text in _split(inside.rstrip(")"))]
        else:
            parameters = self._schema_parameters()
        owner = None
        if callee.startswith("self."):
            first = next(iter(self._names()))
            owner = render(self.arguments[first])
            if not bracket:
                parameters = parameters[1:]
        function = f"{owner}.{callee.removeprefix('self.')}" if owner is not None else callee
        first_piece = "[0]" if len(self.call.outputs) == 1 and _gives_list(self.op) else ""
        return f"{function}({self._rendered(parameters)}){first_piece}"

    def _names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in signature(self.op) or ())

    def _schema_parameters(self) -> list[tuple[str | None, str]]:
        keyword_only = _keyword_only(self.op)
        return [(name if name in keyword_only else None, name) for name in self._names() if name not in _PLACES]

    def _rendered(self, parameters: list[tuple[str | None, str]]) -> str:
        """Arguments without those at their default, from the right."""
        defaults = dict(signature(self.op) or ())
        parts: list[str] = []
        dropping = True
        for keyword, name in reversed(parameters):
            if name.startswith("'"):  # a literal of the template
                parts.append(f"{keyword}={name}")
                continue
            starred, name = name.startswith("*"), name.removeprefix("*")
            value = self.arguments.get(name)
            default = name in defaults and _same(value, defaults[name])
            if default and (keyword is not None or dropping):
                continue
            if keyword is None:
                dropping = False
            text = ", ".join(render(item) for item in value or ()) if starred else render(value)
            parts.append(f"{keyword}={text}" if keyword is not None else text)
        return ", ".join(reversed(parts))

    def _only_operands(self) -> bool:
        """Whether the arguments that an infix form cannot show are at their default."""
        shown = set(re.findall(r"{(\w+)}", INFIX[self.op]))
        defaults = dict(signature(self.op) or ())
        return all(name in shown or _same(value, defaults.get(name)) for name, value in self.arguments.items())

    def _operator(self) -> str:
        return f"torch.ops.{self.op}"

    # -- types --------------------------------------------------------------------------------------------------

    def sum_up(self, source: str) -> str:
        """``source`` declared as partial sums on the axes whose contraction is cut."""
        self.summed = True
        for axis in self.contracted_axes:
            source = f"spmd.reinterpret({source}, {literal(axis)}, src=V, dst=P)"
        return source

    def typed(self, source: str) -> str:
        """``source`` with the types of the outputs, where the function alone would give others."""
        if not self.summed and self.contracted_axes:
            source = self.sum_up(source)
        for axis, _, place in self.axes:
            inputs = [tensor.placement[place] for tensor in self.call.inputs]
            outputs = [tensor.placement[place] for tensor in self.call.outputs]
            sharded_in = any(shard_dim(spmd_type) is not None for spmd_type in inputs)
            if any(shard_dim(spmd_type) is not None for spmd_type in outputs) and not sharded_in:
                source = self._retyped(source, f"{literal(axis)}, src=R, dst=V, expert_mode=True", range(len(outputs)))
            elif I in inputs and R in outputs:
                source = self._retyped(
                    source,
                    f"{literal(axis)}, src=I, dst=R",
                    [i for i, spmd_type in enumerate(outputs) if spmd_type == R],
                )
        return source

    def _retyped(self, source: str, how: str, places: Any) -> str:
        if len(self.call.outputs) == 1:
            return f"spmd.{'convert' if 'src=I' in how else 'reinterpret'}({source}, {how})"
        return f"ops.retyped({source}, {list(places)}, {how})"


#: Arguments of schemas that say where and how a tensor is stored, not what is computed.
_PLACES = frozenset({"device", "layout", "pin_memory", "memory_format", "requires_grad", "out"})


#: Arguments of schemas that say how something is done, not what comes out in a functional graph.
_WITHOUT_EFFECT = frozenset({"copy", "non_blocking", "cudnn_enable"})


def _keyword_only(op: str) -> frozenset[str]:
    schema = schema_of(op)
    return frozenset(argument.name for argument in schema.arguments if argument.kwarg_only) if schema else frozenset()


def _gives_list(op: str) -> bool:
    """Whether the operator returns its pieces in a list, also where there is but one."""
    schema = schema_of(op)
    return schema is not None and [str(returned.type) for returned in schema.returns] == ["List[Tensor]"]


def _value(tensor: LocalTensor) -> Value:
    return Value(tensor.name, tensor.shape, tensor.dtype, requires_grad=tensor.requires_grad)


def _numbered(node: Node) -> Node:
    """``node`` with its refs numbered in order, so that operands are told apart by place, not by name."""
    places = iter(range(len(node.inputs)))
    args = map_refs(node.args, lambda _: Ref(str(next(places))))
    kwargs = {name: map_refs(value, lambda _: Ref(str(next(places)))) for name, value in node.kwargs.items()}
    return replace(node, args=args, kwargs=kwargs)


def _with_names(value: Any, inputs: tuple[LocalTensor, ...]) -> Any:
    if isinstance(value, Ref):
        return Name(inputs[int(value.name)].name)
    if isinstance(value, (list, tuple)):
        return [_with_names(item, inputs) for item in value]
    return value


def render(value: Any) -> str:
    """Source of an argument."""
    if isinstance(value, Name):
        return str(value)
    if isinstance(value, str):
        kind, _, name = value.partition(":")
        name = name.removeprefix("torch.")
        return f"torch.{name}" if kind in _TORCH_KINDS and name.isidentifier() else repr(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "math.nan" if math.isnan(value) else ("math.inf" if value > 0 else "-math.inf")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(render(item) for item in value) + "]"
    return repr(value)


_TORCH_KINDS = frozenset({"dtype", "layout", "memory_format"})


def _parameter(text: str) -> tuple[str | None, str]:
    keyword, equals, name = text.strip().partition("=")
    return (keyword, name) if equals else (None, keyword)


def _split(inside: str) -> list[str]:
    return [part for part in inside.split(",") if part.strip()]


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, (list, tuple)) or isinstance(default, (list, tuple)):
        as_list = [list(item) if isinstance(item, (list, tuple)) else item for item in (value, default)]
        return bool(as_list[0] == as_list[1])
    return (
        type(value) is type(default) and bool(value == default)
        if not _both_numbers(value, default)
        else value == default
    )


def _both_numbers(value: Any, default: Any) -> bool:
    return all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in (value, default))
