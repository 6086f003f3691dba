"""Why operators are split as they are where text is generated: what each costs in a prompt and in a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cost_models import Cluster
from cost_models.short_text import ShortRepr
from passes.ir.fingerprint import fingerprint
from passes.ir.graph import Graph
from passes.plan import Plan
from passes.plan.serving import ServingPlan
from passes.plan.text_tables import format_seconds, table_in_width
from planner.inspection.operator_reasons import Explainer, PlanReasons, operators_named
from planner.inspection.plan_graph import check_model, library_model
from planner.serving_plan import Phases, generating_module


@dataclass(frozen=True, repr=False)
class ServingReasons(ShortRepr):
    """The answer to ``planner explain`` of a plan of generating text.

    Attributes:
        phases: reasons by ``"prompt"`` and ``"token"``, without one that has no such operator; ``plan``: of what.
    """

    plan: ServingPlan
    phases: Mapping[str, PlanReasons]

    def __str__(self) -> str:
        return table_in_width(self.table)

    def table(self) -> str:
        """The reasons as text of at most 80 columns."""
        legend = (
            "Other strategies leave weights and cache where they are. Where one is faster,\n"
            "operators keep what they do in the pass without a cache, for which weights were\n"
            "placed."
        )
        searched = any(each.rivals for reasons in self.phases.values() for each in reasons.operators)
        return "\n\n".join([*([legend] if searched else []), *self._tables()])

    def _tables(self) -> Iterator[str]:
        plan = self.plan
        seconds = {
            "prompt": f"A prompt of {plan.prompt_len:,}, {format_seconds(plan.first_token_seconds)}",
            "token": f"Each token behind it, {format_seconds(plan.token_seconds)}",
        }
        for phase, reasons in self.phases.items():
            yield f"== {seconds[phase]}\n\n{reasons.table()}"


def explain_serving(plan: ServingPlan, name: str, *, model: Any = None, everything: bool = False) -> ServingReasons:
    """Why the operators that ``name`` stands for are split as they are, in a prompt and in a token.

    Args:
        name, everything: as ``planner.inspection.operator_reasons.explain``.
        model: of a plan that is not of a config in the library, as ``plan_serving`` takes it.

    Raises:
        ValueError: if the name stands for nothing in either, or the model is missing or another.
    """
    cluster = Cluster.from_dict(dict(plan.token.cluster))
    phases = {}
    nothing: ValueError | None = None
    for phase, graph in graphs_of_serving_plan(plan, model, cluster).items():
        try:
            names = operators_named(graph, name)
        except ValueError as error:
            nothing = error
            continue
        explainer = Explainer(graph, plan.phases[phase], cluster, states_stay=True)
        phases[phase] = explainer.reasons(name, names, everything=everything)
    if not phases and nothing is not None:
        raise nothing
    return ServingReasons(plan, phases)


def graphs_of_serving_plan(plan: ServingPlan, model: Any, cluster: Cluster) -> dict[str, Graph]:
    """The graphs that a plan of generating text was made of, by phase.

    Raises:
        ValueError: if the plan does not name its model and none is passed, or if the model is another.
    """
    token = plan.token
    named = library_model(token) if model is None else model
    module = generating_module(named, dtype=_dtype(token))
    phases = Phases(module, cluster, plan.mesh, plan.prompt_len, plan.new_tokens, plan.batch)
    _, *planned = phases.planned
    graphs = {phase: each.graph for phase, each in zip(plan.phases, planned, strict=True)}
    for phase, graph in graphs.items():
        check_model(plan.phases[phase], fingerprint(graph))
    return graphs


def _dtype(plan: Plan) -> str | None:
    """The dtype of most floating-point weights."""
    counts = Counter(state.dtype for state in plan.states.values() if "float" in state.dtype)
    return counts.most_common(1)[0][0] if counts else None
