"""Why operators are split as they are: prices that sum to the objective, and what every other strategy costs."""

from __future__ import annotations

from typing import Any

import pytest

import planner
from cost_models import Cluster
from planner.inspection.operator_reasons import explain
from tests.expert_models import mixture, mixture_batch
from tests.small_models import Mlp
from tests.test_inspection import CALL, PLANS, plan_of

pytestmark = pytest.mark.usefixtures("models_traced_once")


def model_of(**options: Any) -> dict[str, Any]:
    return {"model": Mlp(layers=4), **CALL, **options}


@pytest.mark.parametrize("kind", PLANS)
def test_the_prices_sum_to_the_objective(kind: str) -> None:
    plan = plan_of(kind)
    reasons = explain(plan, "*", **model_of())
    assert sum(reasons.prices.values()) == pytest.approx(plan.certificate.objective, rel=1e-9)
    assert sum(reason.here for reason in reasons.operators) == pytest.approx(
        reasons.prices["these operators"], rel=1e-9
    )
    assert reasons.prices["other operators"] == 0.0
    causes = [seconds for seconds in reasons.prices.values() if seconds]
    assert min(map(abs, causes)) > 1e-9 * plan.certificate.objective  # what rounding leaves is no cause


def test_a_rival_costs_what_a_plan_that_is_pinned_to_it_takes_more() -> None:
    plan = plan_of("mesh")
    (reason,) = explain(plan, "layers.1.up", everything=True, **model_of()).operators
    rivals = {rival.strategy: rival.objective for rival in reason.rivals or ()}
    cluster = Cluster.from_dict(dict(plan.cluster))
    cheapest, dearest = (choose(rivals, key=lambda strategy: rivals[strategy] or 0.0) for choose in (min, max))
    for strategy in {cheapest, dearest}:
        labels = dict(part.split(": ") for part in strategy.split(", ")) if ":" in strategy else {}
        pins = {axis: labels.get(axis, ["replicate", "invariant"]) for axis in ("dp", "tp")}
        demands = {"layers.*.up:*": pins}
        pinned = planner.plan(Mlp(layers=4), cluster, **CALL, **PLANS["mesh"], constraints=demands)
        change = pinned.certificate.objective - plan.certificate.objective
        assert rivals[strategy] == pytest.approx(change, rel=1e-6, abs=1e-9 * plan.certificate.objective)


def test_experts_are_said_to_lie_over_their_axis() -> None:
    model, batch = mixture(layers=3), mixture_batch(batch=16)
    cluster = Cluster.uniform(4, flops=1e9, memory_bandwidth=1e9, latency=1e-6, bandwidth=1e9, memory_bytes=2**30)
    plan = planner.plan(model, cluster, example_inputs=batch, fix={"ep": 2, "dp": 2})
    reasons = explain(plan, "*", model=model, example_inputs=batch)
    assert sum(reasons.prices.values()) == pytest.approx(plan.certificate.objective, rel=1e-9)
    (experts,) = (reason for reason in reasons.operators if "meshwright.experts" in reason.key)
    assert experts.strategy == "experts over ep"
    assert {reason.strategy for reason in reasons.operators} <= {"experts over ep", "samples over dp, ep", "not cut"}


def test_a_name_that_stands_for_nothing_is_told_what_is_like_it() -> None:
    with pytest.raises(ValueError, match=r"'layers.1.upp' matches no .* did you mean"):
        explain(plan_of("1f1b"), "layers.1.upp", **model_of())
    with pytest.raises(ValueError, match="does not name a config"):
        explain(plan_of("1f1b"), "*")
