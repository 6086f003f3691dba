"""Layouts that experts take, or that somebody runs, beside a plan: the same model, cluster, prices and simulator."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cost_models import Cluster
from cost_models.short_text import ShortRepr
from cost_models.step_time import step_memory
from cost_models.unequal_devices import orders
from passes.ir.graph import Graph
from passes.plan import Plan
from passes.plan.text_tables import format_bytes, format_change, format_seconds, format_table
from planner.inspection.plan_graph import graph_of_plan, library_model
from planner.whole_step.candidates.demands import NEVER, Demands, read_demands
from planner.whole_step.candidates.expert_layouts import (
    BASELINES,
    BaselineSpace,
    Missing,
    Priced,
    baseline_named,
    best_of_baseline,
)
from planner.whole_step.candidates.training_options import TrainingOptions
from planner.whole_step.candidates.user_layout import UserLayout, best_of_layout

#: Characters of a layout's name in the table; below it the whole name stands.
MAX_NAME = 36


@dataclass(frozen=True, repr=False)
class ComparedLayout(ShortRepr):
    """The best that an expert's rules allow: seconds as simulated, bytes on the fullest device, what it is.

    ``seconds`` is None where there is none; ``what`` then says why.
    """

    name: str
    seconds: float | None
    memory: float
    what: str


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError for the name of no baseline."""
    for name in names:
        baseline_named(name)


def needs_config(names: Sequence[str]) -> bool:
    """Whether one of the baselines reads the model's transformers config."""
    published = {name for name, row in BASELINES.items() if row.model_type is not None}
    return any(name.startswith("transformers") or name in published for name in names)


def compare(
    plan: Plan,
    graph: Graph,
    names: Sequence[str],
    *,
    layouts: Sequence[UserLayout] = (),
    config: Any = None,
    max_programs: float | None = None,
) -> tuple[ComparedLayout, ...]:
    """The best layout of each of the baselines ``names``, whose open choices are decided in its favour.

    Args:
        graph: the one that ``plan`` was made of.
        layouts: others, by what the user says of them.
        config: the model's transformers config, which some of the baselines read.
        max_programs: how many integer programs the search of each may solve, as ``planner.plan`` takes it.

    Raises:
        ValueError: for an unknown name, and for a plan on a given mesh.
    """
    check_names(names)
    if not plan.step.decides_units:
        raise ValueError("experts' layouts are of whole steps: plan without --mesh, or fix a choice beside it")
    return tuple(_layouts(plan, graph, names, layouts, config, _demands(plan, max_programs)))


def compare_saved(plan: Plan, names: Sequence[str], *, model: Any = None) -> tuple[ComparedLayout, ...]:
    """``compare`` for a plan from a file; ``model`` and errors besides as ``graph_of_plan``."""
    from planner.planning import config_of

    check_names(names)
    source = library_model(plan) if model is None else model
    config = config_of(source) if needs_config(names) else None
    with graph_of_plan(plan, model) as graph:
        return compare(plan, graph, names, config=config)


def _layouts(
    plan: Plan, graph: Graph, names: Sequence[str], layouts: Sequence[UserLayout], config: Any, demands: Demands
) -> Iterator[ComparedLayout]:
    space = BaselineSpace(graph, config=config, compiled=plan.step.compiled)
    in_orders = [
        [
            *(best_of_layout(layout, space, cluster, demands) for layout in layouts),
            *(best_of_baseline(name, space, cluster, demands) for name in names),
        ]
        for cluster in orders(Cluster.from_dict(dict(plan.cluster)))
    ]
    for name, results in zip([*(layout.text for layout in layouts), *names], zip(*in_orders)):
        yield _compared(name, _best(results))


def _best(results: Sequence[Priced | Missing]) -> Priced | Missing:
    """The best of a layout's orders of unequal devices."""
    priced = [each for each in results if isinstance(each, Priced)]
    return min(priced, key=lambda each: each.simulated, default=results[0])


def _compared(name: str, best: Priced | Missing) -> ComparedLayout:
    if isinstance(best, Missing):
        return ComparedLayout(name, None, 0.0, best.reason)
    solution = best.judged.solution
    units = {label for groups in solution.assignment for label in _labels(solution, groups)}
    devices = " → ".join(dict.fromkeys(name for name, _ in best.search.device_limits(solution.candidate)))
    what = f"{solution.candidate}; {', '.join(sorted(units))}{f'; on {devices}' if devices else ''}"
    return ComparedLayout(name, best.simulated, max(step_memory(best.judged.step)), what)


def _labels(solution: Any, groups: Any) -> Iterator[str]:
    for run, choice, _ in groups:
        yield " ".join(solution.problem.runs[run].choices[choice].label)


def _demands(plan: Plan, max_programs: float | None) -> Demands:
    """What the plan leaves to every layout: memory, training, kernels; not its own choices."""
    step = plan.step
    return read_demands(
        headroom=step.headroom,
        training=TrainingOptions(step.optimizer, step.gradient_dtype or None, step.optimizer_on_host),
        offload=step.offload or NEVER,
        compiled=step.compiled,
        memory_limit=plan.certificate.demands.get("memory_limit"),
        max_programs=max_programs,
    )


def comparison_table(plan: Plan, layouts: Sequence[ComparedLayout]) -> str:
    """The layouts beside the plan as text of 80 columns; ``+10.00%``: takes a tenth longer than the plan."""
    ours = plan.step.costs.simulated
    fullest = max(rank.total for rank in plan.step.memory)
    rows = [["this plan", format_seconds(ours), "", format_bytes(fullest)]]
    for layout in layouts:
        if layout.seconds is None:
            rows.append([_short(layout.name), "—", "", ""])
        else:
            change = format_change(layout.seconds, ours)
            rows.append([_short(layout.name), format_seconds(layout.seconds), change, format_bytes(layout.memory)])
    table = format_table("Other layouts, simulated", ("layout", "seconds", "against it", "memory"), rows)
    whats = [textwrap.fill(f"{layout.name}: {layout.what}", 78, subsequent_indent="    ") for layout in layouts]
    return "\n".join([table, *(textwrap.indent(what, "  ") for what in whats)])


def _short(name: str) -> str:
    """A name that leaves room beside it."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


def baseline_names(text: str) -> tuple[str, ...]:
    """``all``, or names separated by commas.

    Raises:
        ValueError: for the name of no baseline.
    """
    names = tuple(BASELINES) if text == "all" else tuple(name.strip() for name in text.split(","))
    check_names(names)
    return names
