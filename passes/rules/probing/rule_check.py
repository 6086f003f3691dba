"""A registered rule held against its operator: every choice it gives an axis, on small shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from passes.ir.graph import Node, Value
from passes.ir.types import shard_dim
from passes.rules.operator_call import OperatorCall, bind
from passes.rules.probing.clean_thread import on_clean_thread
from passes.rules.probing.probe_call import ProbeCall
from passes.rules.probing.probed_rules import whole_runs
from passes.rules.probing.sharded_trial import WholeRun, mismatch
from passes.rules.probing.small_shapes import nearly_full_size, small_shapes
from passes.rules.rule import AxisChoice, ShardingRule, axis_choices

_RANKS = (2, 3, 4)
_MAX_RANKS = 24


def check_rule(node: Node, values: Mapping[str, Value], rule_of: Callable[[OperatorCall], ShardingRule | None]) -> None:
    """Run the operator of ``node`` on small shards under each choice of its rule.

    Args:
        rule_of: the rule of a call at other shapes.

    Raises:
        ValueError: if a choice gives other values or gradients than one device, or the operator cannot be run.
    """
    on_clean_thread(lambda: _check(node, values, rule_of), name=f"check of the rule of {node.op}")


def _check(node: Node, values: Mapping[str, Value], rule_of: Callable[[OperatorCall], ShardingRule | None]) -> None:
    shapes = tuple(values[name].shape for name in node.inputs)
    wholes = _whole_runs(node, values)
    for whole in wholes:
        for choice, pieces in _choices_at(whole, rule_of):
            _compare(whole, choice, pieces)
    for choice in dict(_choices_at(wholes[0], rule_of)):
        resized = nearly_full_size(shapes, wholes[0].shapes, tuple(map(shard_dim, choice.inputs)), 1)
        large = whole_runs(wholes[0].call, resized, count=1) if resized is not None else []
        for whole in large:
            for again, pieces in _choices_at(whole, rule_of):
                if again.label == choice.label and pieces == min(_RANKS):
                    _compare(whole, again, pieces)


def _compare(whole: WholeRun, choice: AxisChoice, pieces: int) -> None:
    wrong = mismatch(whole, choice.inputs, choice.outputs, pieces)
    if wrong is not None:
        raise ValueError(
            f"the registered sharding rule of {whole.call.node.op} is wrong: under {choice.label!r}, "
            f"{whole.call.text(whole.shapes)}: {wrong}; mend the rule, or register it with check=False"
        )


def _choices_at(
    whole: WholeRun, rule_of: Callable[[OperatorCall], ShardingRule | None]
) -> Iterator[tuple[AxisChoice, int]]:
    """The choices that the rule gives an axis at the shapes of ``whole``."""
    node, values = whole.call.node_at(whole.shapes, whole.outputs)
    call = bind(node, values)
    rule = rule_of(call) if call is not None else None
    yield from _choices(rule) if rule is not None else ()


def _whole_runs(node: Node, values: Mapping[str, Value]) -> list[WholeRun]:
    call = ProbeCall.of(node, values)
    shapes = tuple(values[name].shape for name in node.inputs)
    for attempt in (call, call.in_single_precision()) if call is not None else ():
        small = small_shapes(attempt, shapes)
        in_graph = tuple(values[name].requires_grad for name in node.inputs)
        for trial in (attempt, replace(attempt, differentiable=in_graph)) if small is not None else ():
            wholes = whole_runs(trial, small or ())
            if wholes:
                return wholes
    raise ValueError(
        f"the registered sharding rule of {node.op} cannot be checked: on small tensors the operator raises, draws "
        "random numbers, changes its inputs, or gives no finite numbers; register it with check=False if it is sure"
    )


def _choices(rule: ShardingRule) -> Iterator[tuple[AxisChoice, int]]:
    """What an axis may do to the operator, and over how many ranks the small shapes divide for it."""
    grads = [True] * len(rule.inputs)
    for choice in axis_choices(rule, input_grads=grads, output_grads=[True] * len(rule.outputs)):
        size = rule.sizes[choice.factor] if choice.factor is not None else 1
        several = {*_RANKS, size} if size <= _MAX_RANKS else {*_RANKS}
        yield from ((choice, pieces) for pieces in sorted(several) if pieces > 1 and size % pieces == 0)
