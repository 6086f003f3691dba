"""Figures of unequal devices that must be wrong before another plan wins: planned again on both sides of each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest

import planner
from cost_models import Cluster
from cost_models.cluster_format import REORDER, SLOWEST
from passes.plan import Plan
from planner.auditing.repriced_step import reprice
from planner.inspection.cluster_figures import Figure, figures_of
from planner.inspection.plan_graph import graph_of_plan
from planner.inspection.robustness import BEFORE, MARGIN, BreakEven, robustness, robustness_table
from tests.small_models import Mlp, mlp_batch, seeded, squared_error

pytestmark = pytest.mark.usefixtures("models_traced_once")

CALL: Mapping[str, Any] = {"example_inputs": mlp_batch(batch=8, size=16), "loss_fn": squared_error}
MODEL = seeded(functools.partial(Mlp, layers=3, size=16))


def fast_and_slow(*, unequal: str = REORDER) -> Cluster:
    """A device and one a third as fast with a quarter of the memory, which have own links to others of their kind."""

    def device(name: str, speed: float, memory_bytes: float) -> dict[str, object]:
        return {
            "name": name, "count": 1, "flops": {"float32": speed * 1e9}, "memory_bytes": memory_bytes,
            "memory_bandwidth": speed * 1e9, "launch_overhead": 0.0,
            "levels": [{"name": "bus", "size": 2, "latency": 1e-7, "bandwidth": speed * 1e9}],
        }  # fmt: skip

    return Cluster.from_dict({
        "name": "fast and slow", "unequal": unequal, "devices": [device("fast", 3.0, 4e6), device("slow", 1.0, 1e6)],
        "levels": [{"name": "bus", "size": 2, "latency": 1e-7, "bandwidth": 1e9}],
    })  # fmt: skip


@functools.cache
def plan_and_rows() -> tuple[Plan, tuple[BreakEven, ...]]:
    """A plan, and where others win by what slow devices compute."""
    plan = planner.plan(MODEL, fast_and_slow(), fix={"pp": 2}, **CALL)
    return plan, robustness(plan, model=MODEL, figures=("arithmetic of slow",), **CALL)


def figure_named(name: str, cluster: Cluster) -> Figure:
    (figure,) = (figure for figure in figures_of(cluster) if figure.name == name)
    return figure


def test_each_kind_has_its_own_figures_and_only_its_own_change() -> None:
    cluster = fast_and_slow()
    assert [figure.name for figure in figures_of(cluster)] == [
        "bandwidth of bus",
        *(f"{what} of {kind}" for kind in ("fast", "slow") for what in ("arithmetic", "memory bandwidth", "memory")),
    ]
    changed = figure_named("arithmetic of slow", cluster).at(cluster, 2.0)
    assert [group.device.peak_flops("float32") for group in changed.groups] == [3e9, 2e9]
    assert len(figures_of(fast_and_slow(unequal=SLOWEST))) == 4


def test_the_links_that_kinds_have_among_themselves_change_with_the_level() -> None:
    cluster = fast_and_slow()
    changed = figure_named("bandwidth of bus", cluster).at(cluster, 0.5)
    assert [group.levels[0].bandwidth for group in changed.groups] == [1.5e9, 0.5e9]
    assert changed.levels[0].bandwidth == 0.5e9


def test_devices_of_one_name_that_differ_are_told_apart() -> None:
    cluster = fast_and_slow()
    fast, slow = cluster.groups
    twins = dataclasses.replace(
        cluster, groups=(fast, dataclasses.replace(slow, device=dataclasses.replace(slow.device, name="fast")))
    )
    names = [figure.name for figure in figures_of(twins)]
    assert len(set(names)) == len(names) == 7


def test_at_each_factor_another_plan_wins_and_not_before() -> None:
    plan, rows = plan_and_rows()
    timed = [row for row in rows if row.factor is not None]
    assert timed, robustness_table(rows)
    assert "; on fast → slow" in timed[0].rival
    with graph_of_plan(plan, MODEL, **CALL) as graph:
        for row in timed:
            outward = 1.0 + BEFORE if row.larger else 1.0 - BEFORE
            before, behind = (planned_at(row, row.factor * step) for step in (1.0 / outward, outward))
            ours_before, ours_behind = (
                reprice(graph, plan, changed_at(row, row.factor * step)).seconds.total
                for step in (1.0 / outward, outward)
            )
            assert before >= ours_before * (1.0 - row.proved_to), row
            assert behind < ours_behind * (1.0 - MARGIN) * (1.0 + 1e-9), row


def changed_at(row: BreakEven, factor: float) -> Cluster:
    plan, _ = plan_and_rows()
    cluster = Cluster.from_dict(dict(plan.cluster))
    return figure_named(row.figure, cluster).at(cluster, factor)


def planned_at(row: BreakEven, factor: float) -> float:
    """Seconds of the plan for a changed cluster."""
    plan = planner.plan(MODEL, changed_at(row, factor), fix={"pp": 2}, **CALL)
    assert plan.step is not None
    return plan.step.costs.seconds


@pytest.mark.parametrize(("kind", "rank"), [("slow", 0), ("fast", 1)])
def test_a_plan_stops_to_fit_where_the_fullest_device_of_a_kind_is_full(kind: str, rank: int) -> None:
    plan, _ = plan_and_rows()
    assert plan.step is not None and plan.step.stage_devices[rank].name == kind
    used = plan.step.memory[rank].total / (1.0 - plan.step.headroom)
    cluster = Cluster.from_dict(dict(plan.cluster))
    groups = tuple(
        dataclasses.replace(group, device=dataclasses.replace(group.device, memory_bytes=2 * used))
        if group.device.name == kind
        else group
        for group in cluster.groups
    )
    tight = dataclasses.replace(plan, cluster=dataclasses.replace(cluster, groups=groups).to_dict())
    rows = robustness(tight, model=MODEL, figures=("memory of *",), **CALL)
    smaller = {row.figure: row for row in rows if not row.larger}
    assert smaller[f"memory of {kind}"].factor == pytest.approx(0.5, rel=1e-6)
    (other,) = {"fast", "slow"} - {kind}
    assert smaller[f"memory of {other}"].factor is None


def test_a_figure_that_the_cluster_does_not_have_is_refused() -> None:
    plan, _ = plan_and_rows()
    with pytest.raises(
        ValueError, match="no figure of cluster 'fast and slow' is named 'memory of gpu': expected one of"
    ):
        robustness(plan, model=MODEL, figures=("memory of gpu",), **CALL)
