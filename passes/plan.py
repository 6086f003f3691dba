"""The Plan: everything that was decided and every cost that was predicted, as plain data.

It is the only thing that crosses from deciding to doing. It is frozen, saved as versioned JSON, the same for the
same inputs, and loads without torch. Its parts are in ``passes.plan_data``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from passes.ir.records import from_plain
from passes.plan_checks import check_placements, check_step
from passes.plan_data import (
    PLAN_VERSION,
    BlockPlan,
    Certificate,
    CollectivePlan,
    ConversionPlan,
    Costs,
    FusionPlan,
    NodePlan,
    PatternPlan,
    PlanData,
    TensorPlan,
)
from passes.plan_summary import summarise

__all__ = [
    "PLAN_VERSION",
    "BlockPlan",
    "Certificate",
    "CollectivePlan",
    "ConversionPlan",
    "Costs",
    "FusionPlan",
    "NodePlan",
    "PatternPlan",
    "Plan",
    "TensorPlan",
]


@dataclass(frozen=True)
class Plan(PlanData):
    """A complete plan: its data, and how to save, load and show it."""

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all."""
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(self.to_json(), encoding="utf-8")
        partial.replace(target)

    def summary(self, *, operators: bool = False) -> str:
        """The plan as tables of text; ``operators`` adds one line per operator."""
        return summarise(self, operators=operators)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that ``save`` wrote.

        Raises:
            ValueError: if the file is missing, is not JSON, or is not a plan of this version.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read plan file {path}: {error}") from error
        except json.JSONDecodeError as error:
            raise ValueError(
                f"plan file {path} is corrupted: not JSON at line {error.lineno} ({error.msg}); make it again"
            ) from error
        try:
            return Plan.from_dict(data)
        except ValueError as error:
            raise ValueError(f"plan file {path} is corrupted or not a plan: {error}") from error

    @staticmethod
    def from_dict(data: Any) -> Plan:
        """The plan that ``json.loads(plan.to_json())`` describes.

        Raises:
            ValueError: if a field is missing, unknown or of the wrong kind, or types do not fit the mesh.
        """
        if not isinstance(data, dict):
            raise ValueError(f"expected a JSON object, got {type(data).__name__}")
        if data.get("version") != PLAN_VERSION:
            raise ValueError(
                f"plan version {data.get('version')!r} is not supported: this program reads version {PLAN_VERSION}; "
                "plan again"
            )
        plan = from_plain(Plan, data, where="plan")
        check_placements(plan)
        check_step(plan)
        return plan
