"""The Plan: everything that was decided and every cost that was predicted, as plain data.

It is the only thing that crosses from deciding to doing. It is frozen, saved as versioned JSON, the same for the
same inputs, and loads without torch. Its parts are in ``passes.plan.plan_data``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from cost_models.files import read_json, write_text
from cost_models.records import from_plain
from cost_models.short_text import fold
from cost_models.text import printable, printable_lines
from passes.plan.plan_checks import OtherKindOfPlan, check_plan, check_version
from passes.plan.plan_data import PLAN_VERSION, PlanData
from passes.plan.plan_grammar import check_grammar
from passes.plan.plan_summary import summarise
from passes.plan.step_summary import brief_step, headline
from passes.plan.text_tables import format_seconds

T = TypeVar("T")
#: Fields that a file has where they are not zero: of costs that few clusters price.
_OPTIONAL = frozenset(("host_forward", "host_backward"))


@dataclass(frozen=True, repr=False)
class Plan(PlanData):
    """A complete plan: its data, and how to save, load and show it.

    ``print`` shows ``brief()`` in 80 columns, a debugger one line; all of it is in ``summary()``.
    """

    def __str__(self) -> str:
        return fold(self.brief())

    def __repr__(self) -> str:
        step, gap = self.step, self.certificate.gap
        return fold(f"Plan({headline(self, step)}; {format_seconds(step.costs.simulated)} a step, gap {gap:.2%})")

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all.

        Raises:
            ValueError: if ``path`` cannot be written, or is no regular file (links are followed).
        """
        write_text(path, self.to_json())

    def summary(self, *, operators: bool = False) -> str:
        """The plan as tables of text; ``operators`` adds one line per operator."""
        return summarise(self, operators=operators)

    def brief(self) -> str:
        """The plan in about ten lines."""
        return printable_lines(brief_step(self, self.step))

    def report(self, path: str | Path, **options: Any) -> None:
        """Write the plan as one HTML file with charts, which opens without a network.

        Args:
            options: as ``planner.inspection.html_report.report_page.report_page``: ``device_hour_price=`` (what one
                device costs an hour: adds the cost per million tokens), ``source=`` (the emitted program),
                ``break_evens=`` and ``layouts=``.

        Raises:
            ValueError: if the price is negative, ``path`` cannot be written, or the plan's step does not play in the
                seconds that it states.
        """
        # The page is made in a layer above, by name: nothing here depends on it (so is what explains).
        writer = importlib.import_module("planner.inspection.html_report.report_page")
        writer.write_report(self, path, **options)

    def explain(self, name: str, **options: Any) -> Any:
        """Why the operators that ``name`` stands for are split as they are, with what every other strategy would cost.

        Args:
            name: a module's path, a parameter, an input, an output, or a pattern of them.
            options: as ``planner.inspection.operator_reasons.explain``; ``model=`` where the plan is of no config.

        Returns:
            ``PlanReasons``: ``.operators``, ``.prices`` (which sum to the objective), ``.table()``.

        Raises:
            ValueError: if the name stands for nothing, or the model is missing or another.
        """
        return importlib.import_module("planner.inspection.operator_reasons").explain(self, name, **options)

    def export(self, framework: str, path: str | Path | None = None) -> Any:
        """The configuration of another framework that runs the same layout, and what it cannot express.

        Args:
            framework: ``"torchtitan"``, ``"megatron"``, ``"accelerate-fsdp2"``, ``"deepspeed"`` or
                ``"transformers-tp"``.
            path: where to write it.

        Returns:
            A ``planner.exports.export_plan.ExportedLayout``: ``text``, ``settings``, ``script``, ``inexpressible``.

        Raises:
            ValueError: for another framework, a plan that has no counterpart there, or a path that cannot be written.
        """
        # Tables of frameworks are in a layer above, like the report.
        exported = importlib.import_module("planner.exports.export_plan").export(self, framework)
        if path is not None:
            exported.save(path)
        return exported

    def to_json(self) -> str:
        return as_json(self)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that ``save`` wrote. The file may come from a stranger: nothing in it is ever executed.

        Raises:
            ValueError: if the file is missing, is not JSON, is not a plan of this version, or has a name or a number in
                it that no plan can have.
        """
        return read_plan_file(path, Plan.from_dict)

    @staticmethod
    def from_dict(data: Any) -> Plan:
        """The plan that ``json.loads(plan.to_json())`` describes.

        Raises:
            ValueError: if a field is missing, unknown, of the wrong kind or against its grammar, or types do not fit
                the mesh.
        """
        check_version(data, PLAN_VERSION)
        plan = from_plain(Plan, data, where="plan")
        check_grammar(plan)
        check_plan(plan)
        return plan


def as_json(plan: Any) -> str:
    """A plan, a dataclass, as the text of its file."""

    def fields(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in items if value or name not in _OPTIONAL}

    return json.dumps(asdict(plan, dict_factory=fields), indent=1) + "\n"


def read_plan_file(path: str | Path, from_dict: Callable[[Any], T]) -> T:
    """What ``from_dict`` makes of a plan file's content, its errors with the file's name.

    Raises:
        ValueError: if the file is missing or is not JSON, and as ``from_dict``.
    """
    data = read_json(path, what="plan file")
    try:
        return from_dict(data)
    except OtherKindOfPlan as error:
        raise ValueError(f"plan file {printable(str(path))} {error}") from error
    except ValueError as error:
        raise ValueError(f"plan file {printable(str(path))} is corrupted or not a plan: {error}") from error
