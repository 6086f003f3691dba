"""By which factor each of the cluster's figures must be wrong before another plan wins, and which plan that is.

A plan's seconds are a function of each figure: a link level's bandwidth, the devices' arithmetic, their memory
bandwidth; the plan's own step, priced again on the changed cluster, gives them. Another plan *wins* where it is faster
by more than ``MARGIN``, the gap at which a search stops: up to there a search might return the plan itself. A winner's
seconds are its objective, of which searches prove bounds. The plan's own are what it is simulated to take if that is
less: the simulator chose it for that among plans that the objective has near each other.

For a figure and a direction ``planner.inspection.nearest_lead`` looks for the factor nearest to 1: searches on changed
clusters say which plan wins, the root of the difference of two plans' seconds where its lead begins. A search that
finds none has a lower bound: how far it proves that there is none is said with the factor.
Memory only decides what fits: a plan breaks where its fullest device no longer holds it, and what wins with some
memory wins with more.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cost_models import Cluster
from cost_models.short_text import ShortRepr, fold
from cost_models.unequal_devices import device_kinds, kinds_of_stages, orders
from passes.ir.graph import Graph
from passes.plan import Plan
from passes.plan.text_tables import format_bytes, format_table
from planner.auditing.repriced_step import RepricedStep, reprice
from planner.inspection.cluster_figures import Figure, figures_named
from planner.inspection.nearest_lead import MAX_SEARCHES, nearest_lead
from planner.inspection.plan_graph import graph_of_plan
from planner.inspection.winner_search import winner_search
from planner.solvers.collection import no_collection
from planner.whole_step.candidates.demands import FRAMEWORK, NEVER, Demands, read_demands
from planner.whole_step.candidates.mesh_layout import MeshLayout
from planner.whole_step.candidates.training_options import TrainingOptions
from planner.whole_step.costs.fusion import fuse
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.sharding import ShardingSpace
from planner.whole_step.costs.stage_devices import level_one_of
from planner.whole_step.costs.step_prices import PIPELINE
from planner.whole_step.costs.unit_costs import StepUnits
from planner.whole_step.offloading import within_hosts
from planner.whole_step.result.plan_of_solution import extract, judge

if TYPE_CHECKING:
    from passes.capture.call_arguments import ExampleInputs

#: A plan wins where it is faster by more than this share.
MARGIN = 0.01
#: Figures are changed by at most this factor, up and down.
LARGEST = 4.0
#: Nothing may win up to this share before a factor; relative precision of a factor; steps of one root.
BEFORE, PRECISION, MAX_STEPS = 0.02, 1e-4, 40
#: What rounding may change of a bound.
_ROUNDING = 1e-9


@dataclass(frozen=True, repr=False)
class BreakEven(ShortRepr):
    """When another plan wins.

    Attributes:
        figure: what is wrong; ``factor``: its true value by the assumed one; None if no factor up to ``LARGEST`` (or
            down to its inverse) lets another plan win.
        rival: what wins there; ``plan``: the same as a plan.
        proved_to: no plan is faster by more than this share at the figures before the factor that were searched, the
            plan's own among them; ``MARGIN`` where all searches were proved.
        reason: what there is to say besides; ``searches``: how many were made.
    """

    figure: str
    larger: bool
    factor: float | None
    rival: str = ""
    plan: Plan | None = None
    proved_to: float = MARGIN
    reason: str = ""
    searches: int = 0

    def __str__(self) -> str:
        if self.factor is None:
            bound = f"none up to × {LARGEST if self.larger else 1 / LARGEST:g}"
        else:
            bound = f"× {self.factor:.3g}: {self.rival}{f' ({self.reason})' * bool(self.reason)}"
        unproved = (
            "" if self.proved else f"; not proved: nearer to 1, too, a plan may be faster by {self.proved_to:.1%}"
        )
        return fold(f"{self.figure} {'larger' if self.larger else 'smaller'}, {bound}{unproved}")

    @property
    def proved(self) -> bool:
        """Whether the searches before the factor prove that no plan wins there."""
        return self.proved_to <= MARGIN + _ROUNDING


@no_collection()
def robustness(
    plan: Plan,
    *,
    model: Any = None,
    example_inputs: ExampleInputs | None = None,
    loss_fn: Callable[..., Any] | None = None,
    figures: Sequence[str] = ("*",),
    time_limit: float | None = None,
    max_programs: float | None = None,
) -> tuple[BreakEven, ...]:
    """For each figure of the plan's cluster, smaller and larger: from which factor on another plan wins, and which.

    Args:
        figures: names, or patterns of them, of the figures to look at: ``("memory of *",)``.
        model, example_inputs, loss_fn: as ``planner.inspection.plan_graph.graph_of_plan``.
        time_limit, max_programs: of each search, as ``planner.plan`` takes them. A figure takes up to
            ``planner.inspection.nearest_lead.MAX_SEARCHES`` in each direction, mostly two to four.

    Raises:
        ValueError: for a plan on a given mesh, one within what a framework can say, a pattern that no figure has, or
            as ``graph_of_plan``.

    Example:
        >>> print(robustness_table(robustness(Plan.load("plan.json"))))
    """
    if not plan.step.decides_units:
        raise ValueError(
            "the plan is on a given mesh, where nothing but shardings was searched: plan a whole step (without --mesh)"
        )
    if FRAMEWORK in plan.certificate.demands:
        raise ValueError(
            f"the plan is the best that {plan.certificate.demands[FRAMEWORK]} can say, and others win at once: plan "
            "without --for (framework=)"
        )
    cluster = Cluster.from_dict(dict(plan.cluster))
    chosen = figures_named(cluster, figures)
    with graph_of_plan(plan, model, example_inputs=example_inputs, loss_fn=loss_fn) as graph:
        rivals = _Rivals(graph, plan, cluster, time_limit=time_limit, max_programs=max_programs)
        return tuple(rivals.break_even(figure, larger=larger) for figure in chosen for larger in (False, True))


@dataclass(frozen=True)
class _Winner:
    """A plan that wins at some factor, and what it is; ``cluster``: the one assumed, in the plan's order of devices."""

    plan: Plan
    what: str
    cluster: Cluster


class _Rivals:
    """Searches for other plans of a graph, under the demands of its plan, on changed clusters."""

    def __init__(
        self, graph: Graph, plan: Plan, cluster: Cluster, *, time_limit: float | None, max_programs: float | None
    ) -> None:
        self.graph, self.plan, self.cluster = graph, plan, cluster
        step = plan.step
        asked = plan.certificate.demands
        self.demands: Demands = read_demands(
            asked.get("fix"),
            asked.get("forbid"),
            headroom=step.headroom,
            memory_limit=asked.get("memory_limit"),
            training=TrainingOptions(step.optimizer, step.gradient_dtype or None, step.optimizer_on_host),
            offload=step.offload or NEVER,
            compiled=step.compiled,
            overlap_tensor=step.overlap_tensor,
            time_limit=time_limit,
            max_programs=max_programs,
        )
        fusion = fuse(graph) if step.compiled else None
        self.orders = tuple(orders(cluster))
        self.space = ShardingSpace.of(graph, fusion=fusion, pins=plan.constraints, overlap_tensor=step.overlap_tensor)
        self.step_units = StepUnits.of(self.space, compiled=step.compiled, offload=step.offloads_activations)
        #: Shardings on the plan's own cluster, which other memory does not change where devices are equal.
        self.level_one = level_one_of(cluster, self.space, self.step_units)

    def break_even(self, figure: Figure, *, larger: bool) -> BreakEven:
        """The factor nearest to 1 from which on another plan wins."""
        if figure.is_memory and not larger:
            return self._where_the_plan_breaks(figure)
        way = _Way(self, figure, larger)
        lead = nearest_lead(
            way.winner_at,
            way.fits_from if figure.is_memory else way.lead_begins,
            farthest=math.log(LARGEST),
            tolerance=way.tolerance,
            leads_on=figure.is_memory,
        )
        proved_to = way.proved_to(math.inf if lead.distance is None else lead.distance)
        if lead.distance is None or lead.winner is None:
            return BreakEven(figure.name, larger, None, proved_to=proved_to, searches=lead.searches)
        reason = "" if lead.ended else f"nearer ones may win: stopped after {MAX_SEARCHES} searches"
        factor, winner = way.factor(lead.distance), lead.winner
        return BreakEven(figure.name, larger, factor, winner.what, winner.plan, proved_to, reason, lead.searches)

    def _where_the_plan_breaks(self, figure: Figure) -> BreakEven:
        """The factor of memory at which the plan still fits: with less nothing is faster."""
        held, proved_to = self.fullest(figure, self.plan, self.cluster), max(MARGIN, gap_of(self.plan))
        limit = held / self.usable(figure)
        if limit < 1.0 / LARGEST:
            return BreakEven(figure.name, False, None, proved_to=proved_to)
        reason = f"its fullest device holds {format_bytes(held)}"
        winner, _ = self.search(figure, limit * (1.0 - BEFORE))
        rival = "nothing fits" if winner is None else winner.what
        plan = winner.plan if winner else None
        return BreakEven(figure.name, False, limit, rival, plan, proved_to, reason, searches=1)

    def usable(self, figure: Figure) -> float:
        """Bytes that a plan may take on each device whose memory ``figure`` is."""
        assert figure.device is not None
        return figure.device.usable_bytes * (1.0 - self.plan.step.headroom)

    def fullest(self, figure: Figure, plan: Plan, cluster: Cluster) -> float:
        """Bytes that a plan takes on the fullest device that ``figure`` is of; ``cluster``: in the plan's order."""
        if not cluster.has_unequal_devices:
            return max(rank.total for rank in plan.step.memory)
        kinds, layout = device_kinds(cluster), MeshLayout.of_sizes(plan.step.axes)
        stages = kinds_of_stages(kinds, num_stages=layout.pipeline, stride=layout.stride(PIPELINE))
        alike = {index for index, kind in enumerate(kinds) if kind.device == figure.device}
        return max(rank.total for rank, stage in zip(plan.step.memory, stages, strict=True) if stage & alike)

    def level_one_at(self, figure: Figure, cluster: Cluster) -> LevelOne:
        """Shardings on a cluster with another figure."""
        if figure.is_memory and not cluster.has_unequal_devices:
            return self.level_one
        return level_one_of(cluster, self.space, self.step_units)

    def search(self, figure: Figure, factor: float, limit: float = math.inf) -> tuple[_Winner | None, float]:
        """The best plan that takes less than ``limit`` seconds where a figure is ``factor`` times what is assumed, its
        devices in any order, and the searches' lower bound of all."""
        winner, bound = None, math.inf
        for ordered in self.orders:
            changed = figure.at(ordered, factor)
            search = winner_search(self.level_one_at(figure, changed), changed, self.demands, limit=limit)
            outcome = within_hosts(search, search.run())
            bound = min(bound, outcome.proved)
            if outcome.solutions:
                limit = outcome.solutions[0].seconds
                judged = judge(outcome.solutions[0])
                plan = extract(search, outcome, judged, [], cluster=changed, constraints=self.plan.constraints)
                winner = _Winner(plan, _what(plan, str(judged.solution.candidate)), ordered)
        return winner, bound

    def priced(self, plan: Plan, cluster: Cluster) -> RepricedStep:
        """A plan's step on a changed cluster."""
        return reprice(self.graph, plan, cluster)


@dataclass
class _Way:
    """One figure in one direction; a distance is the absolute logarithm of a factor.

    ``proofs``: distances at which a search found no plan that wins, and by which share one may still be faster.
    """

    rivals: _Rivals
    figure: Figure
    larger: bool
    proofs: list[tuple[float, float]] = field(default_factory=list)

    def factor(self, distance: float) -> float:
        return math.exp(distance if self.larger else -distance)

    def at(self, cluster: Cluster, distance: float) -> Cluster:
        """The cluster with another figure."""
        return self.figure.at(cluster, self.factor(distance))

    @property
    def tolerance(self) -> float:
        """The distance of what is ``BEFORE`` before a factor."""
        return abs(math.log(1.0 + BEFORE if self.larger else 1.0 - BEFORE))

    def ours(self, distance: float) -> float:
        """Seconds of the plan itself."""
        return least_seconds(self.rivals.priced(self.rivals.plan, self.at(self.rivals.cluster, distance)))

    def theirs(self, winner: _Winner, distance: float) -> float:
        """Seconds of another plan."""
        return self.rivals.priced(winner.plan, self.at(winner.cluster, distance)).seconds.total

    def winner_at(self, distance: float) -> _Winner | None:
        ours = self.ours(distance)
        winner, bound = self.rivals.search(self.figure, self.factor(distance), limit=ours * (1.0 - MARGIN))
        if winner is None:
            self.proofs.append((distance, 1.0 - bound / ours))
        return winner

    def proved_to(self, lead: float) -> float:
        """The largest share by which a plan may be faster where searches before ``lead`` found none."""
        nearer = [share for distance, share in self.proofs if distance < lead]
        return max(MARGIN, gap_of(self.rivals.plan), *nearer)

    def lead_begins(self, winner: _Winner, near: float, far: float) -> float:
        """Where between two distances the winner begins to win."""

        def behind(distance: float) -> float:
            return self.theirs(winner, distance) / (self.ours(distance) * (1.0 - MARGIN)) - 1.0

        return _root(behind, near, far)

    def fits_from(self, winner: _Winner, near: float, far: float) -> float:
        """From which memory on the winner fits."""
        used = self.rivals.fullest(self.figure, winner.plan, winner.cluster)
        return min(max(near, math.log(used / self.rivals.usable(self.figure))), far)


def least_seconds(step: RepricedStep) -> float:
    """Seconds by the objective, or as simulated if that is less."""
    return min(step.seconds.total, step.simulated().seconds)


def gap_of(plan: Plan) -> float:
    """The share of those seconds that another plan may be faster by."""
    seconds = min(plan.certificate.objective, plan.step.costs.simulated)
    return max(0.0, 1.0 - plan.certificate.bound / seconds) if seconds else 0.0


def _what(plan: Plan, candidate: str) -> str:
    """A plan in a line: its candidate, what is recomputed, and ZeRO."""
    labels = {(group.recompute, group.zero) for chunk in plan.step.chunks for group in chunk.groups}
    units = ", ".join(f"{recompute} zero-{zero}" for recompute, zero in sorted(labels))
    devices = " → ".join(dict.fromkeys(stage.name for stage in plan.step.stage_devices))
    return f"{candidate}; {units}{f'; on {devices}' if devices else ''}"


def _root(behind: Callable[[float], float], near: float, far: float) -> float:
    """Where ``behind`` becomes negative on the way from ``near`` (where it is not) to ``far`` (where it is).

    Regula falsi, halving the weight of an end that stays (Illinois).
    """
    a, b = near, far
    at_a, at_b = behind(a), behind(b)
    if at_a <= 0.0 or at_b >= 0.0:
        return near if at_a <= 0.0 else far
    for _ in range(MAX_STEPS):
        if abs(b - a) <= PRECISION:
            break
        middle = (a * at_b - b * at_a) / (at_b - at_a)
        value = behind(middle)
        if value > 0.0:
            a, at_a, at_b = middle, value, at_b / 2
        else:
            b, at_b, at_a = middle, value, at_a / 2
    return b


def robustness_table(rows: tuple[BreakEven, ...]) -> str:
    """The factors as text of at most 80 columns, the plans that win below."""
    title = f"Another plan is faster by more than {MARGIN:.0%} if the true figure is"
    table = format_table(title, ("figure", "smaller", "larger"), list(_rows(rows)))
    return "\n".join([table, *_whats(rows), *_unproved(rows)])


def _rows(rows: tuple[BreakEven, ...]) -> Iterator[list[str]]:
    for figure in dict.fromkeys(row.figure for row in rows):
        by_side = {row.larger: row for row in rows if row.figure == figure}
        yield [figure, *(_factor(by_side.get(larger), rows) for larger in (False, True))]


def _factor(row: BreakEven | None, rows: tuple[BreakEven, ...]) -> str:
    if row is None:
        return ""
    unsure = "" if row.proved else " *"
    if row.factor is None:
        return f"none up to × {LARGEST if row.larger else 1 / LARGEST:g}{unsure}"
    numbered = [each for each in rows if each.factor is not None]
    return f"× {row.factor:.3g} [{numbered.index(row) + 1}]{unsure}"


def _whats(rows: tuple[BreakEven, ...]) -> Iterator[str]:
    for number, row in enumerate((row for row in rows if row.factor is not None), start=1):
        reason = f" ({row.reason})" if row.reason else ""
        text = textwrap.fill(f"[{number}] {row.rival}{reason}", 78, subsequent_indent="    ")
        yield textwrap.indent(text, "  ")


def _unproved(rows: tuple[BreakEven, ...]) -> Iterator[str]:
    """What the searches leave open."""
    shares = [row.proved_to for row in rows if not row.proved]
    if shares:
        text = f"* not proved: nearer to 1, too, a plan may be faster by up to {max(shares):.1%}"
        yield textwrap.indent(textwrap.fill(text, 78, subsequent_indent="  "), "  ")
