"""Rules that people register for operators (``planner.register_rule``), held against the operator."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cost_models.registrations import function_in_words, note
from passes.ir.graph import Node, Value
from passes.rules.operator_call import OperatorCall, bind, schema_of
from passes.rules.rule import REGISTERED, ShardingRule
from passes.rules.rule_notation import instantiate, parse

#: From a call to its rule: in notation, as a ``ShardingRule``, or None where nothing may be cut.
RuleFunction = Callable[[OperatorCall], "str | ShardingRule | None"]
#: From a call to the floating-point operations of its forward pass.
FlopsFunction = Callable[[OperatorCall], float]


@dataclass(frozen=True)
class RegisteredRule:
    """What was registered for one operator; ``number`` tells it from what was registered before."""

    rule: str | RuleFunction | None
    check: bool
    number: int
    flops: FlopsFunction | None = None


_NUMBERS = itertools.count()
_CUSTOM_OPERATOR = re.compile(r"<CustomOpDef\((.+)\)>")


REGISTRY: dict[str, RegisteredRule] = {}


def register_rule(
    op: Any, rule: str | RuleFunction | None, *, check: bool = True, flops: FlopsFunction | None = None
) -> None:
    """Say how an operator may be sharded; this comes before the rules of this package.

    Every process that plans or runs a model with the operator must register it. A call under the rule is made with
    the operator's other arguments as they are, so a rule must not cut what a number among them fixes.

    Args:
        op: ``"my::op"``, ``"my::op.overload"``, ``"my.op.default"``, ``torch.ops.my.op``, or what
            ``torch.library.custom_op`` gives.
        rule: a line of the notation of ``passes.rules.rule_notation`` (``"bmk, bkn -> bmn"``), one operand for each
            tensor argument; a function from the call (``passes.rules.operator_call.OperatorCall``) to such a line, a
            ``ShardingRule`` or None; or None: the operator is never cut (nor run to find a rule).
        check: run the operator on small shards, at the first call of each kind that is planned, and refuse a rule that
            gives other values or gradients than one device. The operator is then called with random inputs on the CPU.

        flops: from a call of the operator, whole, to the floating-point operations of its forward pass; None for an
            operator that is bound by memory.

    Raises:
        ValueError: for an operator that torch does not know, or a rule that is not in the notation. A rule that is
            wrong is refused when a model is planned, with the call that shows it.
    """
    name = operator_name(op)
    if isinstance(rule, str):
        notation = parse(rule)
        if notation.reduced:
            raise ValueError(
                f"sharding rule {rule!r} of {name}: [{min(notation.reduced)}] says that the operator communicates, "
                "which none but this package's own can; write the factor with '!' to keep it whole"
            )
    elif rule is not None and not callable(rule):
        raise ValueError(f"sharding rule of {name}: expected a line of notation, a function or None, not {rule!r}")
    if flops is not None and not callable(flops):
        raise ValueError(f"flops of {name}: expected a function of the call or None, not {flops!r}")
    REGISTRY[name] = RegisteredRule(rule, check, next(_NUMBERS), flops)
    words = function_in_words(rule) if callable(rule) else str(rule)
    note("sharding rules", name, words if flops is None else f"{words}, flops {function_in_words(flops)}")


def operator_name(op: Any) -> str:
    """An operator's name in graphs (``"my.op.default"``).

    Raises:
        ValueError: if torch has no such operator.
    """
    text = _CUSTOM_OPERATOR.sub(r"\1", str(op))
    parts = text.replace("::", ".").split(".")
    name = ".".join(parts if len(parts) == 3 else [*parts, "default"])
    if name.count(".") != 2 or not all(part.isidentifier() for part in name.split(".")) or schema_of(name) is None:
        raise ValueError(
            f"unknown operator {text!r}: expected the name of one that torch knows, such as 'my::op' or "
            "'my::op.overload'; define it before its rule"
        )
    return name


def registered_rule(node: Node, values: Mapping[str, Value]) -> ShardingRule | None:
    """The registered rule of a call.

    Raises:
        ValueError: if it does not fit the call, or is wrong.
    """
    registered = REGISTRY[node.op]
    call = bind(node, values)
    if registered.rule is None or call is None:
        return None
    rule = read_rule(registered.rule, call)
    if rule is not None and registered.check:
        from passes.rules.probing.rule_check import check_rule

        check_rule(node, values, lambda small: read_rule(registered.rule, small))
    return rule


def read_rule(rule: str | RuleFunction | None, call: OperatorCall) -> ShardingRule | None:
    """A registered rule for one call.

    Raises:
        ValueError: if its dims are not those of the call's tensors.
    """
    told = rule(call) if callable(rule) else rule
    if told is None:
        return None
    read = instantiate(told, call) if isinstance(told, str) else told
    values = (*call.inputs, *call.outputs)
    if read is None or [len(dims) for dims in (*read.inputs, *read.outputs)] != [len(value.shape) for value in values]:
        shapes = ", ".join(str(list(value.shape)) for value in call.inputs)
        results = ", ".join(str(list(value.shape)) for value in call.outputs)
        raise ValueError(f"the sharding rule {told!r} of {call.node.op} does not fit its call on {shapes} -> {results}")
    return replace(read, source=REGISTERED)
