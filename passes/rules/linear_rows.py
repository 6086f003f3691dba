"""The rule of linear layers, which may exchange the shards of their rows themselves."""

from __future__ import annotations

import dataclasses

from passes.ir.graph import ITEM_SIZE
from passes.rules.operator_call import OperatorCall
from passes.rules.rule import RowShards, ShardingRule
from passes.rules.rule_notation import instantiate
from passes.rules.rule_table import RULES

LINEAR = "aten.linear.default"


def linear(call: OperatorCall) -> ShardingRule | None:
    """The line of the table; with rows, a way to gather or scatter these beside the product."""
    rule = instantiate(RULES[LINEAR], call)
    if rule is None or len(rule.inputs[0]) < 2 or len(rule.inputs[1]) != 2:
        return rule
    rows, (features, contracted) = rule.inputs[0][-2], rule.inputs[1]
    if not (rows and features and contracted):
        return rule
    shards = RowShards(rows[0], contracted[0], features[0], ITEM_SIZE[call.outputs[0].dtype])
    return dataclasses.replace(rule, row_shards=shards)


COMPUTED = {LINEAR: linear}
