"""Rows of an audit: the gap of a plan's certificate, and its lower bound proved a second time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cost_models import CostModel
from passes.plan import Certificate, Plan
from planner.auditing.audit_report import SECONDS, SHARE, TOLERANCE, AuditRow, compared, unchecked
from planner.auditing.subject import AuditSubject
from planner.solvers.linear import STOPPED

_BOUND = "lower bound"


def gap_row(certificate: Certificate) -> AuditRow:
    """The gap that follows from objective and bound; a bound above the objective is none."""
    objective, bound = certificate.objective, certificate.bound
    gap = (objective - bound) / objective if objective else 0.0
    if bound > objective * (1.0 + TOLERANCE):
        return AuditRow("gap", certificate.gap, gap, SHARE, False, "the bound is above the objective")
    return compared("gap", certificate.gap, gap, SHARE, least=1.0)


def bound_rows(subject: AuditSubject, *, prove: bool, time_limit: float | None) -> Iterator[AuditRow]:
    """Search again under what the plan was demanded to be; what that proves must be no less than the claimed bound.

    Raises:
        ValueError: if the demands in the plan are none, or no plan meets them.
    """
    certificate = subject.plan.certificate
    if not prove:
        yield unchecked(_BOUND, certificate.bound, "not asked for", SECONDS)
    elif not certificate.demands:
        yield unchecked(_BOUND, certificate.bound, "the plan does not say under which demands it was searched", SECONDS)
    else:
        yield _bound_row(certificate, search_again(subject, time_limit=time_limit).certificate)


def _bound_row(claimed: Certificate, again: Certificate) -> AuditRow:
    if claimed.bound <= again.bound * (1.0 + TOLERANCE):
        return AuditRow(_BOUND, claimed.bound, again.bound, SECONDS, True, f"searched again: {again.status}")
    if claimed.bound > again.objective * (1.0 + TOLERANCE):
        why = "searched again: there is a faster plan than the bound allows"
        return AuditRow(_BOUND, claimed.bound, again.bound, SECONDS, False, why)
    if any(limit in again.status for limit in STOPPED):
        why = "searched again: a limit was reached before so much was proved; a longer time limit would tell"
        return AuditRow(_BOUND, claimed.bound, again.bound, SECONDS, None, why)
    return AuditRow(_BOUND, claimed.bound, again.bound, SECONDS, False, "searched again: only less can be proved")


def search_again(subject: AuditSubject, *, time_limit: float | None) -> Plan:
    """The plan of a second search for what ``subject.plan`` was demanded to be."""
    plan, cluster, demands = subject.plan, subject.cluster, dict(subject.plan.certificate.demands)
    if not plan.step.decides_units:
        from planner.sharding_ilp import search

        cost_model = CostModel(cluster, plan.mesh.as_dict())
        return search(
            subject.graph,
            mesh=plan.mesh,
            cost_model=cost_model,
            cluster_info=plan.cluster,
            constraints=plan.constraints,
            time_limit=time_limit,
            **_only(demands, "memory_limit", "forbid_collectives", "forbid_replicated_matmul", "fold"),
        )
    from planner.whole_step.candidates.demands import FRAMEWORK, NEVER, read_demands
    from planner.whole_step.candidates.training_options import TrainingOptions
    from planner.whole_step.plan_step import plan_step

    step = plan.step
    framework = demands.pop(FRAMEWORK, None)
    again = read_demands(
        headroom=step.headroom,
        training=TrainingOptions(step.optimizer, step.gradient_dtype or None, step.optimizer_on_host),
        offload=step.offload or NEVER,
        compiled=step.compiled,
        overlap_tensor=step.overlap_tensor,
        time_limit=time_limit,
        **_only(demands, "fix", "forbid", "memory_limit", "num_alternatives", "gap"),
    )
    if framework is not None:
        from planner.exports.export_plan import framework_named
        from planner.exports.framework_search import plan_for

        return plan_for(framework_named(framework), subject.graph, cluster, again, config=subject.config)
    return plan_step(subject.graph, cluster, again, pins=plan.constraints)


def _only(demands: dict[str, Any], *names: str) -> dict[str, Any]:
    """``demands`` if they are of these names."""
    unknown = sorted(demands.keys() - set(names))
    if unknown:
        raise ValueError(f"certificate.demands: unknown name {unknown[0]!r}: expected {', '.join(names)}")
    return demands
