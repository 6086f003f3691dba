"""``Plan.export`` and ``planner export``: a plan as another framework's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.fields import suggest
from cost_models.files import write_text
from cost_models.short_text import ShortRepr
from cost_models.text import counted
from passes.plan import Plan
from passes.plan.host_memory import on_hosts
from planner.exports.accelerate_table import ACCELERATE_FSDP2
from planner.exports.configuration_files import FORMS
from planner.exports.deepspeed_table import DEEPSPEED
from planner.exports.framework import Framework, inexpressible
from planner.exports.megatron_table import MEGATRON
from planner.exports.plan_facts import PlanFacts
from planner.exports.torchtitan_table import TORCHTITAN
from planner.exports.transformers_table import TRANSFORMERS_TP

FRAMEWORKS: Mapping[str, Framework] = {
    framework.name: framework for framework in (TORCHTITAN, MEGATRON, ACCELERATE_FSDP2, DEEPSPEED, TRANSFORMERS_TP)
}


@dataclass(frozen=True, repr=False)
class ExportedLayout(ShortRepr):
    """A plan in another framework's words.

    Attributes:
        framework: whose.
        settings: names (dots for nesting) and values, in the order of the framework's table.
        script: what the training script has to do, as it has no setting.
        inexpressible: what of the plan the framework cannot say; empty if the same layout runs there.
    """

    framework: Framework
    settings: dict[str, Any]
    script: dict[str, Any]
    inexpressible: tuple[str, ...]
    heading: tuple[str, ...]

    def __str__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        """The file, with what is inexpressible as comments."""
        return FORMS[self.framework.form](self.framework, self.settings, tuple(self.comments()))

    def comments(self) -> Iterator[str]:
        """Lines that say what the file is of, what belongs into the script, and what is not expressed."""
        yield from self.heading
        for name, value in self.script.items():
            yield f"in the training script: {name.replace('…', repr(value)) if '…' in name else name}" + (
                f": {value}" if "…" not in name and value is not True else ""
            )
        if self.inexpressible:
            yield f"{self.framework.project} cannot express of this plan:"
            yield from (f"  * {sentence}" for sentence in self.inexpressible)
        else:
            yield f"{self.framework.project} expresses all of this plan's layout"

    def save(self, path: str | Path) -> None:
        """Write the file; it appears whole or not at all."""
        write_text(path, self.text)


def framework_named(name: str) -> Framework:
    """The framework ``name``.

    Raises:
        ValueError: if there is no table of it.
    """
    if name not in FRAMEWORKS:
        hint = suggest(name, FRAMEWORKS) or f": expected one of {', '.join(FRAMEWORKS)}"
        raise ValueError(f"unknown framework {name!r}{hint}")
    return FRAMEWORKS[name]


def export(plan: Plan, framework: str) -> ExportedLayout:
    """``plan`` as the configuration of ``framework`` that runs the same layout, and what that cannot express.

    Raises:
        ValueError: for a framework without a table, a plan of inference or one that offloads, and a plan on axes that
            have no counterpart.

    Example:
        >>> print(export(Plan.load("plan.json"), "megatron").text)
    """
    table = framework_named(framework)
    stored = " and ".join(on_hosts(plan.step))
    if stored:
        raise ValueError(f"the plan has {stored} in the hosts' memory, which no export says: plan without offload")
    facts = PlanFacts.of(plan)
    rows = [(row, row.value(facts)) for row in table.settings]
    step = plan.step
    axes = ", ".join(f"{axis}={size}" for axis, size in step.axes.items() if size > 1) or "one device"
    return ExportedLayout(
        framework=table,
        settings={row.name: value for row, value in rows if row.place == "configuration" and value is not None},
        script={row.name: value for row, value in rows if row.place == "script" and value is not None},
        inexpressible=inexpressible(table, facts),
        heading=(
            f"{plan.config_name or plan.model} on {counted(step.num_devices, 'device')} of {plan.cluster.get('name')}: "
            f"{axes}; "
            f"{counted(step.num_microbatches, 'micro-batch')} of {step.local_batch}",
            f"plan {plan.fingerprint}; settings of {table.title}, {table.documentation}",
            *_places(plan),
        ),
    )


def _places(plan: Plan) -> Iterator[str]:
    """Of unequal devices: where the ranks of the pipeline have to be started, of which no framework is told."""
    devices = plan.step.stage_devices
    if len({device.name for device in devices}) > 1:
        on = ", ".join(f"{rank}: {device.name}" for rank, device in enumerate(devices))
        yield f"start the ranks so that those of the pipeline are on these devices: {on}"
