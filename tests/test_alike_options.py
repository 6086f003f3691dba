"""Operators that are alike share their options: they are those that each would have by itself."""

from __future__ import annotations

from cost_models import Cluster
from passes.rules import forward_flops, rule_for
from planner.sharding_ilp.options import OperatorChoices, operator_options
from planner.whole_step.candidates.mesh_layout import Links, MeshLayout
from planner.whole_step.costs.level_one import batch_prices
from planner.whole_step.costs.operator_facts import Fusion
from planner.whole_step.costs.sharding import Cut, ShardingSpace
from planner.whole_step.costs.step_prices import StepPricing
from tests.exhaustive_models import of_config

CLUSTER = Cluster.uniform(4, flops=1e12, memory_bandwidth=1e11, latency=1e-6, bandwidth=1e10)


def test_options_of_alike_operators_are_those_of_each_alone() -> None:
    graph, cut = of_config("tiny-llama", num_hidden_layers=2), Cut(pieces=2, tensor=2)
    space = ShardingSpace.of(graph)
    prices = batch_prices(Links.of(CLUSTER, MeshLayout(1, 2, 1, 2)), mixes=True)

    def pricing() -> StepPricing:
        return StepPricing(prices, cut.mesh, states=space.states, fusion=Fusion())

    def offers() -> OperatorChoices:
        return OperatorChoices(graph.values, rule_for=rule_for, flops_of=forward_flops)

    together = pricing()
    num_options = 0
    for node in graph.nodes:
        for live in (True, False):
            for keep in (True, False):
                saved = [keep] * len(node.outputs)
                options = operator_options(node, space.offers, together, live=live, saved=saved)
                assert options == operator_options(node, offers(), pricing(), live=live, saved=saved)
                num_options += 1
    assert len(together.options) < num_options / 2
