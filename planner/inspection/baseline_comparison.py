"""Layouts that experts take, beside a plan: the same model, cluster, prices and simulator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cost_models import Cluster
from cost_models.step_time import step_memory
from passes.ir.graph import Graph
from passes.plan import Plan
from passes.plan.text_tables import format_bytes, format_seconds, format_table
from planner.whole_step.candidates.demands import Demands, read_demands
from planner.whole_step.candidates.expert_layouts import (
    BASELINES,
    BaselineSpace,
    Missing,
    baseline_named,
    best_of_baseline,
)
from planner.whole_step.candidates.training_options import TrainingOptions

#: Layouts that people ask for and that no plan here can say, with what is lacking.
INEXPRESSIBLE = {"hsdp": "ZeRO over a part of the data axis cannot be said in a plan"}


@dataclass(frozen=True)
class ComparedLayout:
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
        if name not in INEXPRESSIBLE:
            baseline_named(name)


def needs_config(names: Sequence[str]) -> bool:
    """Whether one of the baselines reads the model's transformers config."""
    return any(name.startswith("transformers") for name in names)


def compare(
    plan: Plan, graph: Graph, names: Sequence[str], *, config: Any = None, max_programs: float = math.inf
) -> tuple[ComparedLayout, ...]:
    """The best layout of each of the baselines ``names``, whose open choices are decided in its favour.

    Args:
        graph: the one that ``plan`` was made of.
        config: the model's transformers config, which two of the baselines read.
        max_programs: how many integer programs the search of each may solve, as ``planner.plan`` takes it.

    Raises:
        ValueError: for an unknown name, and for a plan on a given mesh.
    """
    check_names(names)
    if not plan.step.decides_units:
        raise ValueError("experts' layouts are of whole steps: plan without --mesh, or fix a choice beside it")
    return tuple(_layouts(plan, graph, names, config, _demands(plan, max_programs)))


def _layouts(plan: Plan, graph: Graph, names: Sequence[str], config: Any, demands: Demands) -> Iterator[ComparedLayout]:
    cluster = Cluster.from_dict(dict(plan.cluster))
    space = BaselineSpace(graph, config=config, compiled=plan.step.compiled)
    for name in names:
        if name in INEXPRESSIBLE:
            yield ComparedLayout(name, None, 0.0, INEXPRESSIBLE[name])
            continue
        best = best_of_baseline(name, space, cluster, demands)
        if isinstance(best, Missing):
            yield ComparedLayout(name, None, 0.0, best.reason)
        else:
            solution = best.judged.solution
            units = {label for groups in solution.assignment for label in _labels(solution, groups)}
            what = f"{solution.candidate}; {', '.join(sorted(units))}"
            yield ComparedLayout(name, best.simulated, max(step_memory(best.judged.step)), what)


def _labels(solution: Any, groups: Any) -> Iterator[str]:
    for run, choice, _ in groups:
        yield " ".join(solution.problem.runs[run].choices[choice].label)


def _demands(plan: Plan, max_programs: float) -> Demands:
    """What the plan leaves to every layout: memory, training, kernels; not its own choices."""
    step = plan.step
    return read_demands(
        headroom=step.headroom,
        training=TrainingOptions(step.optimizer, step.gradient_dtype or None),
        compiled=step.compiled,
        memory_limit=plan.certificate.demands.get("memory_limit"),
        max_programs=max_programs,
    )


def comparison_table(plan: Plan, layouts: Sequence[ComparedLayout]) -> str:
    """The layouts beside the plan as text; ``+10.00%``: takes a tenth longer than the plan."""
    ours = plan.step.costs.simulated
    rows = [["this plan", format_seconds(ours), "", format_bytes(max(rank.total for rank in plan.step.memory)), ""]]
    for layout in layouts:
        if layout.seconds is None:
            rows.append([layout.name, "—", "", "", layout.what])
        else:
            change = f"{layout.seconds / ours - 1.0:+.2%}"
            rows.append([layout.name, format_seconds(layout.seconds), change, format_bytes(layout.memory), layout.what])
    return format_table("Experts' layouts, simulated", ("layout", "seconds", "against it", "memory", "what"), rows)


def baseline_names(text: str) -> tuple[str, ...]:
    """``all``, or names separated by commas.

    Raises:
        ValueError: for the name of no baseline.
    """
    names = (*BASELINES, *INEXPRESSIBLE) if text == "all" else tuple(name.strip() for name in text.split(","))
    check_names(names)
    return names
