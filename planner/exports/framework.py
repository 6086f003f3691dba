"""What a table of a framework is made of: settings, limits, and the choices that its search may make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from planner.exports.plan_facts import PlanFacts
from planner.whole_step.candidates.expert_layouts import Splitter


@dataclass(frozen=True)
class SettingRow:
    """One setting: its name (dots for nesting), its value for a plan, and what of the plan it says.

    ``value`` gives None where the setting is left out. ``place`` says where it belongs: in the configuration, or in the
    training script, of which the exported file can only tell.
    """

    name: str
    value: Callable[[PlanFacts], Any]
    says: str
    place: Literal["configuration", "script"] = "configuration"


@dataclass(frozen=True)
class LimitRow:
    """Something that the framework cannot say: ``lacks`` gives a sentence for each case in a plan."""

    says: str
    lacks: Callable[[PlanFacts], Iterable[str]]


@dataclass(frozen=True)
class Framework:
    """One framework: its settings, its limits, and what a search for it may choose.

    Attributes:
        name: its name on the command line.
        project, version, documentation: whose settings these are, and where they are documented.
        settings, limits: the table.
        choices: values that choices of a plan may take, by ``demands.CHOICES`` names; others may take any.
        cases: further restrictions, one search for each (a pipeline without ZeRO 3, or ZeRO 3 without a pipeline).
        splitter: whose rules split layers on the tensor axis; None: no tensor axis.
        form: the file's format.
        divides_within: the ZeRO stages whose pieces it can divide over neighbours of the data ranks (``zero_ranks``).
        overlaps_tensor: whether a setting of it lets layers exchange their rows beside their products.
    """

    name: str
    project: str
    version: str
    documentation: str
    settings: tuple[SettingRow, ...]
    limits: tuple[LimitRow, ...]
    choices: Mapping[str, tuple[Any, ...]]
    form: Literal["shell", "yaml", "json"]
    cases: tuple[Mapping[str, tuple[Any, ...]], ...] = ({},)
    splitter: Splitter | None = None
    command: tuple[str, ...] = field(default_factory=tuple)
    divides_within: tuple[int, ...] = ()
    overlaps_tensor: bool = False

    @property
    def title(self) -> str:
        """Project and version."""
        return f"{self.project} {self.version}"


def at(facts: PlanFacts, axis: str) -> int | None:
    """Size of an axis, None if it has one rank."""
    size = facts.size(axis)
    return size if size > 1 else None


#: Values of a plan by the names of ``demands.CHOICES``.
PLAN_CHOICES: Mapping[str, Callable[[PlanFacts], Iterable[Any]]] = {
    "pp": lambda facts: (facts.size("pp"),),
    "dp": lambda facts: (facts.size("dp"),),
    "ep": lambda facts: (facts.size("ep"),),
    "cp": lambda facts: (facts.size("cp"),),
    "tp": lambda facts: (facts.size("tp"),),
    "schedule": lambda facts: (facts.schedule,),
    "recompute": lambda facts: facts.layer_recompute,
    "zero": lambda facts: facts.zero,
}


def inexpressible(framework: Framework, facts: PlanFacts) -> tuple[str, ...]:
    """Sentences about everything in the plan that ``framework`` cannot say; none if the layout is the same there."""
    sentences = [
        f"{name}={value}: {framework.project} has {name}={', '.join(map(str, allowed))}"
        for name, allowed in framework.choices.items()
        for value in PLAN_CHOICES[name](facts)
        if value not in allowed
    ]
    zero_ranks = facts.plan.step.zero_ranks
    if zero_ranks and facts.main_zero not in framework.divides_within:
        stages = " or ".join(map(str, framework.divides_within))
        where = f" but with zero={stages}" if stages else ""
        sentences.append(
            f"zero_ranks={zero_ranks}: an export to {framework.project} divides over all data ranks{where}"
        )
    for row in framework.limits:
        sentences.extend(row.lacks(facts))
    return tuple(dict.fromkeys(sentences))
