"""Sharding rules: how each operator may be cut on a mesh axis (``rule_for``), and what it computes (``forward_flops``).

One line per operator in ``passes.rules.rule_table``; rules that depend on arguments are in ``views``, ``reductions``,
``structure`` and ``layers``. What people register comes before them (``registered_rules``); an operator that is in none
of them is run on small shards for the rule that it obeys (``probing``). Importing this loads no torch; the first use
does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from passes.ir.graph import Node, Ref, Value
from passes.rules import expert_rules, fused, layers, linear_rows, reductions
from passes.rules import selections as structure
from passes.rules import view_rules as views
from passes.rules.flops import FLOPS
from passes.rules.operator_call import OperatorCall, bind
from passes.rules.registered_rules import REGISTRY, registered_rule
from passes.rules.rule import ShardingRule
from passes.rules.rule_notation import instantiate
from passes.rules.rule_table import RULES

COMPUTED: dict[str, Callable[[OperatorCall], ShardingRule | None]] = {
    **views.COMPUTED,
    **reductions.COMPUTED,
    **structure.COMPUTED,
    **layers.COMPUTED,
    **fused.COMPUTED,
    **linear_rows.COMPUTED,
    expert_rules.EXPERTS: expert_rules.experts,
}
_CACHE: dict[Any, ShardingRule | None] = {}
_CACHE_LIMIT = 4096


def known_operators() -> frozenset[str]:
    """Operators that have a rule (for some of their calls at least)."""
    return frozenset(RULES) | frozenset(COMPUTED)


def rule_for(node: Node, values: Mapping[str, Value]) -> ShardingRule | None:
    """How ``node`` may be sharded, or None if there is no rule: then every factor is whole."""
    registered = REGISTRY.get(node.op)
    key = _key(node, values) if registered is None else (registered.number, _key(node, values))
    if key not in _CACHE:
        if len(_CACHE) >= _CACHE_LIMIT:
            _CACHE.clear()
        _CACHE[key] = _derive(node, values) if registered is None else _simplified(registered_rule(node, values), node)
    return _CACHE[key]


def forward_flops(node: Node, values: Mapping[str, Value]) -> float:
    """Floating point operations of the whole call; 0 for operators bound by memory."""
    registered = REGISTRY.get(node.op)
    count = FLOPS.get(node.op) if registered is None or registered.flops is None else registered.flops
    call = bind(node, values) if count is not None else None
    return float(count(call)) if count is not None and call is not None else 0.0


def _derive(node: Node, values: Mapping[str, Value]) -> ShardingRule | None:
    rule = _from_tables(node, values)
    return _simplified(_found_by_running(node, values) if rule is None else rule, node)


def _from_tables(node: Node, values: Mapping[str, Value]) -> ShardingRule | None:
    if node.op not in COMPUTED and node.op not in RULES:
        return None
    call = bind(node, values)
    if call is None or not call.outputs:
        return None
    computed = COMPUTED.get(node.op)
    return computed(call) if computed is not None else instantiate(RULES[node.op], call)


def _found_by_running(node: Node, values: Mapping[str, Value]) -> ShardingRule | None:
    from passes.rules.probing.probed_rules import is_worth_probing, probe
    from passes.rules.probing.rule_cache import cached_rule

    if not is_worth_probing(node, values):
        return None
    return cached_rule(node, values, lambda: probe(node, values))


def _simplified(rule: ShardingRule | None, node: Node) -> ShardingRule | None:
    """``rule`` without factors of size 1, and without partial sums of truth values."""
    if rule is None:
        return None
    if all(value.dtype == "bool" for value in node.outputs):
        rule = dataclasses.replace(rule, passes_partial=False)
    sizes = {factor: size for factor, size in rule.sizes.items() if size > 1}
    return dataclasses.replace(rule, sizes=sizes)


def _key(node: Node, values: Mapping[str, Value]) -> Any:
    """What a rule depends on: the operator, its arguments with tensors by shape, and the output shapes."""
    outputs = tuple((value.shape, value.dtype, value.requires_grad) for value in node.outputs)
    kwargs = tuple((name, _frozen(value, values)) for name, value in node.kwargs.items())
    return node.op, _frozen(node.args, values), kwargs, outputs, node.constant, node.draw is None


def _frozen(argument: Any, values: Mapping[str, Value]) -> Any:
    if isinstance(argument, Ref):
        value = values[argument.name]
        return value.shape, value.dtype, value.requires_grad
    if isinstance(argument, (list, tuple)):
        return tuple(_frozen(item, values) for item in argument)
    # 1, 1.0 and True are equal keys
    return (type(argument).__name__, argument) if isinstance(argument, (bool, int, float)) else str(argument)
