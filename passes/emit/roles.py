"""What a value is for, as a name: ``q``, ``attention``, ``h``, ``logits``.

The role of a value is, in this order: its name in what the model returns; what its consumers take it for (an argument
of attention, of a gate, of a loss), also through views and casts; a summand of the residual stream, ``x``; what its
operator gives or, of an operator with weights, what its module is for; what it is a view of; the operator's noun.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from passes.emit.role_tables import (
    ADDS,
    ARGUMENTS,
    DERIVED,
    GENERIC_MODULES,
    LEAVES,
    MODULES,
    NORMS,
    NOUNS,
    PARTS,
    RESULTS,
    SCALED,
    SCALES,
    STRONG,
    THROUGH,
    VIEWS,
)
from passes.emit.variable_names import RESERVED, identifier
from passes.ir.graph import Graph, Node, Ref, Value, iterate_refs
from passes.rules.operator_call import signature

#: The residual stream, and what goes from copy to copy of a block.
STREAM = "x"
_NUMBER_AT_END = re.compile(r"(_\d+)+$")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def unnumbered(text: str) -> str:
    """A captured name without the number at its end: ``view_3`` → ``view``."""
    return _NUMBER_AT_END.sub("", text) or text


def operator(node: Node) -> str:
    """``linear`` of ``aten.linear.default``."""
    parts = node.op.split(".")
    return parts[1] if len(parts) > 1 else node.op


class RoleNames:
    """The roles of the values of a graph; ``states`` are paths of states that it uses, by the names of their values."""

    def __init__(self, graph: Graph, states: Mapping[str, str]) -> None:
        self.values = graph.values
        self.states = {**states, **{state.value.name: state.path for state in graph.states}}
        self.inputs = {value.name for value in graph.inputs}
        self.makers = {value.name: (node, index) for node in graph.nodes for index, value in enumerate(node.outputs)}
        self.users: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(node.inputs):
                self.users.setdefault(name, []).append(node)
        self.returned = {name: path.rpartition(".")[2] for path, name in graph.outputs.items()}
        if graph.loss is not None and graph.loss in graph.outputs:
            self.returned[graph.outputs[graph.loss]] = "loss"
        self._roles: dict[str, str] = {}
        self._demands: dict[str, str] = {}
        for name in self.makers:
            self._of(name)  # in the order of the graph: nothing is found out through a whole model

    def of(self, value: Value) -> str:
        """The role of ``value``, not yet an identifier that is free."""
        return self._of(value.name)

    def _of(self, name: str) -> str:
        if name not in self._roles:
            self._roles[name] = unnumbered(name)  # should a value be made of itself
            self._roles[name] = self._role(name)
        return self._roles[name]

    def _role(self, name: str) -> str:
        returned = self.returned.get(name, "")
        if returned.isidentifier():
            return returned
        state = self._state(name)
        if state:
            is_literal = state in self.values and self.values[state].kind == "constant"
            return "literal" if is_literal else state_name(self.states[state])
        if name not in self.makers:
            whole = name.removeprefix("total_")
            if whole in self.makers:  # a total of all micro-batches
                return f"total_{self._of(whole)}"
            return name if name in self.inputs else self.demand(name) or unnumbered(name)
        node, index = self.makers[name]
        stored = next((user.inputs[0] for user in self.users.get(name, ()) if user.writes_buffer), "")
        if self.states.get(stored):
            return state_name(self.states[stored])
        demanded = self.demand(name)
        if demanded in STRONG or (demanded and not self._weights(node) and operator(node) not in RESULTS):
            return demanded
        if self._leaves_encoder(node):
            return "encoded"
        if self.is_stream(name):
            return STREAM
        return self._made(node, index)

    def demand(self, name: str) -> str:
        """What consumers take a value for; of what is cut in parts, the roles of the parts: ``qkv``; else ``""``."""
        if name not in self._demands:
            self._demands[name] = ""
            users = self.users.get(name, [])
            roles = list(dict.fromkeys(role for node in users for role in self._taken_for(node, name) if role))
            in_parts = all(operator(node) in PARTS for node in users)
            if len(roles) == 1:
                self._demands[name] = roles[0]
            elif len(roles) > 1 and in_parts:
                self._demands[name] = ("" if all(len(role) == 1 for role in roles) else "_").join(roles)
        return self._demands[name]

    def _taken_for(self, node: Node, name: str) -> Iterator[str]:
        op = operator(node)
        for place, argument in arguments_of(node):
            if argument != name:
                continue
            argument_role = ARGUMENTS.get(op, {}).get(place)
            if argument_role is not None:
                yield argument_role
            elif op in SCALES and place == "self":
                yield self.demand(node.output.name) if self.demand(node.output.name) in SCALED else ""
            elif op in PARTS or (op in THROUGH and place in THROUGH[op]):
                yield from map(self.demand, (value.name for value in node.outputs))
            elif op in NORMS and place == "input" and self.demand(node.output.name) in ("q", "k"):
                yield self.demand(node.output.name)
            elif op in ("matmul", "bmm", "baddbmm"):
                yield self._in_product(node, place)
            elif op in ("add", "masked_fill", "where") and self.demand(node.output.name) == "scores":
                value = self.values.get(name)
                carries = value is not None and value.requires_grad and value.shape == node.output.shape
                yield "scores" if carries and not self._state(name) else "mask"

    def _in_product(self, node: Node, place: str) -> str:
        """Operands of the products of attention that is written out: queries by keys, and probabilities by values."""
        if self._weights(node):
            return ""
        if self.demand(node.output.name) == "scores":
            if operator(node) == "baddbmm":
                return {"self": "bias", "batch1": "q", "batch2": "k"}.get(place, "")
            return {"self": "q", "other": "k", "mat2": "k"}.get(place, "")
        return "v" if place in ("other", "mat2") and self._of(node.inputs[0]) == "probabilities" else ""

    def is_stream(self, name: str) -> bool:
        """Whether a value is the residual stream: added to what was computed from it, or a sum with such a value."""
        users = self.users.get(name, ())
        if len({user.name for user in users}) > 1 and any(self._adds(user, name) for user in users):
            return True
        node, index = self.makers.get(name, (None, 0))
        if node is None or index or not self._adds(node):
            return False
        operands = [operand for operand in node.inputs[:2] if not self._state(operand)]
        return any(self._of(operand) == STREAM for operand in operands)

    def _adds(self, node: Node, name: str = "") -> bool:
        """Whether ``node`` adds two activations of one shape, one of them ``name`` if that is said."""
        operands = node.inputs[:2]
        if operator(node) not in ADDS or len(operands) < 2 or (name and name not in operands):
            return False
        # A chunk's graph has the operators of all chunks, but its own inputs alone.
        shapes = {self.values[operand].shape if operand in self.values else None for operand in operands}
        return shapes == {node.output.shape} and not any(map(self._state, operands))

    def _made(self, node: Node, index: int) -> str:
        op = operator(node)
        if op in RESULTS:
            names = RESULTS[op]
            return names[min(index, len(names) - 1)]
        derived = DERIVED.get((op, tuple(map(self._of, node.inputs))))
        if derived is not None:
            return derived
        summed = self.values.get(node.inputs[0]) if op == "sum" else None
        if summed is not None and summed.dtype == "bool":
            return "count"
        if op in ("matmul", "bmm") and self._of(node.inputs[0]) == "probabilities":
            return "attention"
        if self._weights(node) and node.module_path:
            return self._of_module(node)
        if (op in VIEWS or op in PARTS) and node.inputs:
            return self._of(node.inputs[0])
        return NOUNS.get(op, op)

    def _weights(self, node: Node) -> list[str]:
        return [name for name in node.inputs if self._state(name)]

    def _state(self, name: str) -> str:
        """The state that a value is, or is a view of; else ``""``."""
        while name in self.makers:
            node, _ = self.makers[name]
            if operator(node) not in VIEWS or len(node.inputs) != 1:
                return ""
            (name,) = node.inputs
        return name if name in self.states else ""

    def _leaves_encoder(self, node: Node) -> bool:
        """Whether a value is what an encoder gives to what is not in it."""
        before, encoder, _ = f".{node.module_path}.".partition(".encoder.")
        users = self.users.get(node.output.name, ())
        if not encoder or not users or not node.output.requires_grad:
            return False
        return not any(f".{user.module_path}.".startswith(before + encoder) for user in users)

    def _of_module(self, node: Node) -> str:
        """What is computed with weights: called as its module, or as the attention or feed-forward that it ends."""
        parts = [part for part in node.module_path.split(".") if not part.isdigit()]
        for pattern, role in LEAVES:
            if parts and pattern.fullmatch(parts[-1]):
                return role
        activation = next((name for name in node.inputs if not self._state(name)), "")
        source = self._of(activation) if activation else ""
        for part in reversed(parts[:-1]):
            for pattern, role, takes in MODULES:
                if pattern.fullmatch(part) and source in takes:
                    return role
        named = [part for part in parts if part.lower() not in GENERIC_MODULES] or parts
        return snake_case(named[-1]) if named else NOUNS.get(operator(node), operator(node))


def arguments_of(node: Node) -> Iterator[tuple[str, str]]:
    """Name of the argument and name of the value, of every tensor that an operator takes."""
    names = [name for name, _ in signature(node.op) or ()]
    for position, argument in enumerate(node.args):
        place = names[position] if position < len(names) else ""
        yield from ((place, ref.name) for ref in _refs(argument))
    for place, argument in node.kwargs.items():
        yield from ((place, ref.name) for ref in _refs(argument))


def _refs(argument: object) -> Iterator[Ref]:
    return iterate_refs(argument)


def state_name(path: str) -> str:
    """``q_proj_weight``, ``cls_token``: a name for what is made from a state alone."""
    parts = [part for part in path.split(".") if not part.isdigit()]
    return "_".join(parts[-2:]) if parts and parts[-1] in ("weight", "bias") else "".join(parts[-1:])


def snake_case(text: str) -> str:
    """``DenseReluDense`` → ``dense_relu_dense``."""
    return _CAMEL.sub("_", text).lower()


def module_alias(path: str) -> str:
    """What a module is called where several of its weights are used: ``attn`` for ``layer.0.SelfAttention``."""
    last = next((part for part in reversed(path.split(".")) if not part.isdigit() and part not in RESERVED), "")
    for pattern, role, _ in MODULES:
        if pattern.fullmatch(last):
            return _ALIASES[role]
    return identifier(snake_case(last)) if last else ""


_ALIASES: Mapping[str, str] = {"attention": "attn", "cross_attention": "cross_attn", "feed_forward": "mlp"}
