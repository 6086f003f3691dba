"""By which factor each of the cluster's figures must be wrong before another plan wins, and which plan that is.

A plan's objective is a function of each figure: a link level's bandwidth, the devices' arithmetic, their memory
bandwidth; the plan's own step, priced again on the changed cluster, gives it. Another plan *wins* where it is faster
by more than ``MARGIN``, the gap at which a search stops: up to there a search might return the plan itself.

For a figure and a direction the cluster is changed by the largest factor, and searched for a plan that wins there.
Where its lead begins is a root of the difference of the two objectives. Just before that factor the cluster is searched
again: if a third plan wins there, its root is nearer and takes the place; else the factor holds.
Memory only decides what fits: a plan breaks where its fullest device no longer holds it, and what wins with some
memory wins with more, so that the factor is found by bisection.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from cost_models import Cluster
from cost_models.hardware import Device, LinkLevel
from cost_models.unequal_devices import refuse_unequal
from passes.ir.graph import Graph
from passes.plan import Plan
from passes.plan.text_tables import format_bytes, format_table
from planner.auditing.repriced_step import reprice
from planner.inspection.plan_graph import graph_of_plan
from planner.solvers.collection import no_collection
from planner.solvers.linear import TIME_LIMIT
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import NEVER, Demands, read_demands
from planner.whole_step.candidates.expert_layouts import CappedSearch
from planner.whole_step.candidates.training_options import TrainingOptions
from planner.whole_step.costs.fusion import fuse
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.sharding import ShardingSpace
from planner.whole_step.costs.unit_costs import StepUnits
from planner.whole_step.result.outcome import Outcome
from planner.whole_step.result.plan_of_solution import extract, judge

#: A plan wins where it is faster by more than this share.
MARGIN = 0.01
#: Figures are changed by at most this factor, up and down.
LARGEST = 4.0
#: Nothing may win up to this share before a factor; relative precision of a factor.
BEFORE, PRECISION = 0.02, 1e-4
#: Plans that may take each other's place for one figure and direction; steps of one root.
MAX_ROUNDS, MAX_STEPS = 6, 40
#: Of memory: so many plans may take each other's place just before their factors, then the rest is halved.
NEAR_ROUNDS = 2


@dataclass(frozen=True)
class Figure:
    """An input of the cost model: its name, and the cluster with it at ``factor`` times what it is."""

    name: str
    at: Callable[[Cluster, float], Cluster]
    is_memory: bool = False


@dataclass(frozen=True)
class BreakEven:
    """When another plan wins.

    Attributes:
        figure: what is wrong; ``factor``: its true value by the assumed one; None if no factor up to ``LARGEST`` (or
            down to its inverse) lets another plan win.
        rival: what wins there; ``plan``: the same as a plan.
        proved: whether the searches before the factor were complete.
        reason: what there is to say besides.
    """

    figure: str
    larger: bool
    factor: float | None
    rival: str = ""
    plan: Plan | None = None
    proved: bool = True
    reason: str = ""


def figures_of(cluster: Cluster) -> tuple[Figure, ...]:
    """The figures of ``cluster`` that are looked at."""
    sizes = [level.group_size for level in cluster.levels]
    levels = (
        Figure(f"bandwidth of {level.name}", partial(_with_bandwidth, place=place))
        for place, (inner, level) in enumerate(zip((1, *sizes), cluster.levels))
        if level.group_size > inner
    )
    return (
        *levels,
        Figure("arithmetic of a device", partial(_with_devices, change=_faster)),
        Figure("memory bandwidth of a device", partial(_with_devices, change=_wider)),
        Figure("memory of a device", partial(_with_devices, change=_larger), is_memory=True),
    )


def _with_devices(cluster: Cluster, factor: float, *, change: Callable[[Device, float], Device]) -> Cluster:
    groups = (dataclasses.replace(group, device=change(group.device, factor)) for group in cluster.groups)
    return dataclasses.replace(cluster, groups=tuple(groups))


def _faster(device: Device, factor: float) -> Device:
    return dataclasses.replace(device, flops={dtype: factor * rate for dtype, rate in device.flops.items()})


def _wider(device: Device, factor: float) -> Device:
    return dataclasses.replace(device, memory_bandwidth=factor * device.memory_bandwidth)


def _larger(device: Device, factor: float) -> Device:
    return dataclasses.replace(device, memory_bytes=device.reserved_bytes + factor * device.usable_bytes)


def _with_bandwidth(cluster: Cluster, factor: float, *, place: int) -> Cluster:
    def changed(level: LinkLevel) -> LinkLevel:
        return dataclasses.replace(
            level,
            bandwidth=factor * level.bandwidth,
            exceptions=tuple(dataclasses.replace(each, bandwidth=factor * each.bandwidth) for each in level.exceptions),
            wires=tuple(dataclasses.replace(wire, bandwidth=factor * wire.bandwidth) for wire in level.wires),
        )

    levels = (changed(level) if index == place else level for index, level in enumerate(cluster.levels))
    return dataclasses.replace(cluster, levels=tuple(levels))


@no_collection()
def robustness(
    plan: Plan,
    *,
    model: Any = None,
    example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    time_limit: float = 90.0,
) -> tuple[BreakEven, ...]:
    """For each figure of the plan's cluster, smaller and larger: from which factor on another plan wins, and which.

    Args:
        model, example_inputs, loss_fn: as ``planner.inspection.plan_graph.graph_of_plan``.
        time_limit: seconds of each search (a few a figure).

    Raises:
        ValueError: for a plan on a given mesh, or as ``graph_of_plan``.

    Example:
        >>> print(robustness_table(robustness(Plan.load("plan.json"))))
    """
    if not plan.step.decides_units:
        raise ValueError(
            "the plan is on a given mesh, where nothing but shardings was searched: plan a whole step (without --mesh)"
        )
    cluster = Cluster.from_dict(dict(plan.cluster))
    refuse_unequal(cluster, "robustness")
    with graph_of_plan(plan, model, example_inputs=example_inputs, loss_fn=loss_fn) as graph:
        rivals = _Rivals(graph, plan, cluster, time_limit)
        return tuple(
            rivals.break_even(figure, larger=larger) for figure in figures_of(cluster) for larger in (False, True)
        )


@dataclass(frozen=True)
class _Winner:
    """A plan that wins at some factor, what it is, and whether its search was complete."""

    plan: Plan
    what: str


class _Rivals:
    def __init__(self, graph: Graph, plan: Plan, cluster: Cluster, time_limit: float) -> None:
        self.graph, self.plan, self.cluster = graph, plan, cluster
        step = plan.step
        asked = plan.certificate.demands
        self.demands: Demands = read_demands(
            asked.get("fix"),
            asked.get("forbid"),
            headroom=step.headroom,
            memory_limit=asked.get("memory_limit"),
            training=TrainingOptions(step.optimizer, step.gradient_dtype or None, bool(step.offload)),
            offload=step.offload or NEVER,
            compiled=step.compiled,
            time_limit=time_limit,
        )
        fusion = fuse(graph) if step.compiled else None
        self.space = ShardingSpace.of(graph, fusion=fusion, pins=plan.constraints)
        self.step_units = StepUnits.of(self.space, compiled=step.compiled)
        self.fullest = max(rank.total for rank in step.memory)

    def break_even(self, figure: Figure, *, larger: bool) -> BreakEven:
        """The factor nearest to 1 from which on another plan wins."""
        if figure.is_memory and not larger:
            limit = self._last_fit()
            if limit < 1.0 / LARGEST:
                return BreakEven(figure.name, larger, None)  # less memory makes nothing faster
            reason = f"its fullest device holds {format_bytes(self.fullest)}"
            winner, _ = self._winner(figure, limit * (1.0 - BEFORE), capped=False)
            rival = "nothing fits" if winner is None else winner.what
            return BreakEven(figure.name, larger, limit, rival, winner.plan if winner else None, reason=reason)
        if figure.is_memory:
            factor, best, proved = least_memory(partial(self._winner, figure), self._fits_from)
            rival, plan = (best.what, best.plan) if best else ("", None)
            return BreakEven(figure.name, larger, factor, rival, plan, proved)
        factor, best = None, None
        tried = LARGEST if larger else 1.0 / LARGEST
        proved = True
        for _ in range(MAX_ROUNDS):
            winner, complete = self._winner(figure, tried)
            proved = complete
            if winner is None:
                break
            factor, best = self._lead_begins(figure, winner, tried), winner
            tried = factor / (1.0 + BEFORE if larger else 1.0 - BEFORE)
            if (tried - 1.0) * (factor - 1.0) <= 0.0:
                break  # nothing lies between the plan's own figures and this factor
        else:
            proved = False
        if best is None:
            return BreakEven(figure.name, larger, None, proved=proved)
        return BreakEven(figure.name, larger, factor, best.what, best.plan, proved)

    def _last_fit(self) -> float:
        """The factor of memory at which the plan still fits: its limit is a share of what a device has."""
        return self.fullest / self._usable()

    def _fits_from(self, winner: _Winner) -> float:
        """The factor of memory from which on the winner fits."""
        return max(1.0, max(rank.total for rank in winner.plan.step.memory) / self._usable())

    def _usable(self) -> float:
        return self.cluster.device.usable_bytes * (1.0 - self.plan.step.headroom)

    def _winner(self, figure: Figure, factor: float, *, capped: bool = True) -> tuple[_Winner | None, bool]:
        """The best plan that wins at ``factor`` (not ``capped``: the best at all), and whether all were looked at."""
        cluster = figure.at(self.cluster, factor)
        level_one = LevelOne(cluster, self.space, self.step_units)
        limit = self.objective(self.plan, cluster) * (1.0 - MARGIN) if capped else math.inf
        search = CappedSearch(level_one, cluster, self.demands, limit=limit)
        outcome = search.run()
        complete = TIME_LIMIT not in outcome.status
        solutions = [solution for solution in outcome.solutions if solution.seconds < limit]
        if not solutions:
            return None, complete
        return _as_winner(search, dataclasses.replace(outcome, solutions=solutions), cluster, self.plan), complete

    def objective(self, plan: Plan, cluster: Cluster) -> float:
        """Seconds of a plan's step on a changed cluster."""
        return reprice(self.graph, plan, cluster).seconds.total

    def _lead_begins(self, figure: Figure, winner: _Winner, far: float) -> float:
        """The factor between 1 and ``far`` from which on the winner is ahead."""

        def behind(factor: float) -> float:
            cluster = figure.at(self.cluster, factor)
            ours, theirs = self.objective(self.plan, cluster), self.objective(winner.plan, cluster)
            return theirs / (ours * (1.0 - MARGIN)) - 1.0

        return _root(behind, 1.0, far)


def _as_winner(search: Search, outcome: Outcome, cluster: Cluster, plan: Plan) -> _Winner:
    solution = outcome.solutions[0]
    extracted = extract(search, outcome, judge(solution), [], cluster=cluster, constraints=plan.constraints)
    labels = {(group.recompute, group.zero) for chunk in extracted.step.chunks for group in chunk.groups}
    units = ", ".join(f"{recompute} zero-{zero}" for recompute, zero in sorted(labels))
    return _Winner(extracted, f"{solution.candidate}; {units}")


def least_memory(
    winner_at: Callable[[float], tuple[Any, bool]], fits_from: Callable[[Any], float]
) -> tuple[float | None, Any, bool]:
    """The factor of memory from which on a plan wins, up to ``BEFORE``, that plan, and whether all searches ended.

    Args:
        winner_at: a plan that wins with that factor of memory, if any, and whether all were looked at.
        fits_from: the factor from which on it fits.
    """
    best, proved = winner_at(LARGEST)
    if best is None:
        return None, None, proved
    none_wins, factor, rounds = 1.0, min(fits_from(best), LARGEST), 0
    while factor / none_wins > (1.0 + BEFORE) * (1.0 + PRECISION**2):
        just_before, middle = factor / (1.0 + BEFORE), math.sqrt(none_wins * factor)
        tried = just_before if rounds < NEAR_ROUNDS else middle
        winner, complete = winner_at(tried)
        proved, rounds = proved and complete, rounds + 1
        if winner is None:
            none_wins = tried
        else:
            best, factor = winner, min(fits_from(winner), tried)
    return factor, best, proved


def _root(behind: Callable[[float], float], near: float, far: float) -> float:
    """Where ``behind`` becomes negative on the way from ``near`` (where it is not) to ``far`` (where it is).

    Regula falsi in the logarithm of the factor, halving the weight of an end that stays (Illinois).
    """
    a, b = math.log(near), math.log(far)
    at_a, at_b = behind(near), behind(far)
    if at_a <= 0.0:
        return near
    for _ in range(MAX_STEPS):
        if abs(b - a) <= PRECISION:
            break
        middle = (a * at_b - b * at_a) / (at_b - at_a)
        value = behind(math.exp(middle))
        if value > 0.0:
            a, at_a, at_b = middle, value, at_b / 2
        else:
            b, at_b, at_a = middle, value, at_a / 2
    return math.exp(b)


def robustness_table(rows: tuple[BreakEven, ...]) -> str:
    """The factors as text of at most 80 columns, the plans that win below."""
    title = f"Another plan is faster by more than {MARGIN:.0%} if the true figure is"
    table = format_table(title, ("figure", "smaller", "larger"), list(_rows(rows)))
    return "\n".join([table, *_whats(rows)])


def _rows(rows: tuple[BreakEven, ...]) -> Iterator[list[str]]:
    for figure in dict.fromkeys(row.figure for row in rows):
        by_side = {row.larger: row for row in rows if row.figure == figure}
        yield [figure, *(_factor(by_side.get(larger), rows) for larger in (False, True))]


def _factor(row: BreakEven | None, rows: tuple[BreakEven, ...]) -> str:
    if row is None:
        return ""
    unsure = "" if row.proved else " (out of time)"
    if row.factor is None:
        return f"none up to × {LARGEST if row.larger else 1 / LARGEST:g}{unsure}"
    numbered = [each for each in rows if each.factor is not None]
    return f"× {row.factor:.3g} [{numbered.index(row) + 1}]{unsure}"


def _whats(rows: tuple[BreakEven, ...]) -> Iterator[str]:
    for number, row in enumerate((row for row in rows if row.factor is not None), start=1):
        reason = f" ({row.reason})" if row.reason else ""
        text = textwrap.fill(f"[{number}] {row.rival}{reason}", 78, subsequent_indent="    ")
        yield textwrap.indent(text, "  ")
