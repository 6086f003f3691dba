"""A plan of generating text, as plain data: one placement of the weights, and two plans over it.

Its file has the form of a plan's (``passes.plan.plan``), with ``kind`` to tell it apart and a version of its own; the
two plans inside are checked as those of a step are.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.files import write_text
from cost_models.records import from_plain
from cost_models.short_text import fold
from cost_models.text import counted, printable_lines
from passes.ir.types import MeshShape
from passes.plan.plan import Plan, as_json, read_plan_file
from passes.plan.plan_checks import MAX_ELEMENTS, SERVING, check_plan, check_version
from passes.plan.plan_data import PLAN_VERSION
from passes.plan.plan_grammar import check_grammar
from passes.plan.plan_summary import collective_table, operator_table, tensor_table
from passes.plan.step_summary import certificate_lines, layout_table
from passes.plan.text_tables import format_bytes, format_list, format_seconds

SERVING_VERSION = 1


@dataclass(frozen=True, repr=False)
class ServingPlan:
    """One placement of the weights, and the programs of a prompt and of a token over it.

    Attributes:
        batch: samples at once; ``prompt_len``, ``new_tokens``: tokens of a sample before and after.
        prompt, token: their plans; the cache is among their ``states``, which only in a prompt
            are those of an encoder, too.
        weight_bytes, cache_bytes: on each device.
        first_token_bound, token_bound: seconds that no placement on this mesh can beat: each weight of a matrix product
            is read once, and (for a token) the cache, and multiplied by at the devices' peak; experts, looked-up
            embeddings and attention are left out.
        kind: always ``"serving"``: tells its file from that of a training step's plan.
    """

    mesh: MeshShape
    batch: int
    prompt_len: int
    new_tokens: int
    prompt: Plan
    token: Plan
    weight_bytes: int
    cache_bytes: int
    first_token_bound: float
    token_bound: float
    kind: str = SERVING
    version: int = SERVING_VERSION

    def __str__(self) -> str:
        return fold(self.brief())

    def __repr__(self) -> str:
        return fold(f"ServingPlan({self._headline()}; {self.tokens_per_second:,.0f} tokens/s)")

    @property
    def first_token_seconds(self) -> float:
        return self.prompt.costs.total

    @property
    def token_seconds(self) -> float:
        """Of one token for each sample."""
        return self.token.costs.total

    @property
    def device_bytes(self) -> int:
        """Of weights and cache on each device."""
        return self.weight_bytes + self.cache_bytes

    @property
    def seconds(self) -> float:
        """Of the whole answer."""
        return self.first_token_seconds + max(0, self.new_tokens - 1) * self.token_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all samples together."""
        return self.batch * self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def phases(self) -> dict[str, Plan]:
        """The plans by what they compute."""
        return {"prompt": self.prompt, "token": self.token}

    # -- text ---------------------------------------------------------------------------------------------------

    def brief(self) -> str:
        """The figures for people, in five lines."""
        least = self.first_token_bound + (self.new_tokens - 1) * self.token_bound
        first, each = format_seconds(self.first_token_seconds), format_seconds(self.token_seconds)
        most = f" (bound {self.batch * self.new_tokens / least:,.0f})" if least else ""
        return printable_lines(
            f"{self._headline()}\n"
            f"  first token  {first} (bound {format_seconds(self.first_token_bound)})\n"
            f"  each token   {each} (bound {format_seconds(self.token_bound)})\n"
            f"  throughput   {self.tokens_per_second:,.0f} tokens/s{most}\n"
            f"  on a device  {format_bytes(self.weight_bytes)} weights, {format_bytes(self.cache_bytes)} cache\n"
        )

    def summary(self, *, operators: bool = False) -> str:
        """All of it as tables of text; ``operators`` adds one line for each operator."""
        step = self.token.step
        devices = counted(step.num_devices, "device")
        parts = [
            f"{self.brief()}{devices} of {self.token.cluster.get('name', 'an unnamed cluster')}",
            layout_table(self.token, step),
            tensor_table("Weights and cache", self.token, {**self.prompt.states, **self.token.states}),
            *self._phase("A prompt", self.prompt, operators=operators),
            *self._phase("A token", self.token, operators=operators),
        ]
        return printable_lines("\n\n".join(part for part in parts if part) + "\n")

    def _headline(self) -> str:
        tokens = f"{self.batch} × ({self.prompt_len} + {self.new_tokens}) tokens"
        return f"{self.token.model} on {self.mesh}: {tokens}"

    def _phase(self, title: str, plan: Plan, *, operators: bool) -> Iterator[str]:
        """The tables of a prompt or of a token."""
        costs = plan.costs
        rows = [
            f"{format_seconds(costs.total)}: compute {format_seconds(costs.compute_forward)}, communication "
            f"{format_seconds(costs.communication_forward)}",
            *certificate_lines(plan, plan.step),
        ]
        yield format_list(title, rows)
        yield tensor_table(f"{title}: inputs", plan, plan.inputs)
        yield collective_table(plan, f"{title}: collectives")
        if operators:
            yield operator_table(plan, f"{title}: operators")

    def report(self, path: str | Path, *, device_hour_price: float | None = None) -> None:
        """Write the plan as one HTML file, which opens without a network.

        Args:
            device_hour_price: what one device costs an hour: adds the cost per million new tokens.

        Raises:
            ValueError: if the price is negative, or ``path`` cannot be written.
        """
        # By name, since it is in a layer above (so is what explains), like those of a plan of a step.
        page = importlib.import_module("planner.inspection.html_report.serving_page").serving_page
        write_text(path, page(self, device_hour_price=device_hour_price))

    def explain(self, name: str, **options: Any) -> Any:
        """What the operators that ``name`` stands for cost in a prompt and in a token; see ``Plan.explain``.

        Returns:
            ``ServingReasons``: ``.phases`` (``PlanReasons`` of ``"prompt"`` and ``"token"``), ``.table()``.

        Raises:
            ValueError: if the name stands for nothing in either, or the model is missing or another.
        """
        return importlib.import_module("planner.inspection.serving_reasons").explain_serving(self, name, **options)

    # -- files --------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        return as_json(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all.

        Raises:
            ValueError: if ``path`` cannot be written, or is no regular file (links are followed).
        """
        write_text(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> ServingPlan:
        """Read a plan that ``save`` wrote. The file may come from a stranger: nothing in it is ever executed.

        Raises:
            ValueError: if the file is missing, is not JSON, is not such a plan of this version, or has a name or a
                number in it that none can have.
        """
        return read_plan_file(path, ServingPlan.from_dict)

    @staticmethod
    def from_dict(data: Any) -> ServingPlan:
        """The plan that ``json.loads(plan.to_json())`` describes.

        Raises:
            ValueError: as ``Plan.from_dict``, and if the two plans are not of one model on one mesh of one cluster.
        """
        check_version(data, SERVING_VERSION, kind=SERVING)
        for name in ("prompt", "token"):
            if name in data:
                check_version(data[name], PLAN_VERSION, where=f"plan.{name}")
        plan = from_plain(ServingPlan, data, where="plan")
        check_grammar(plan)
        for phase in plan.phases.values():
            check_plan(phase)
        _check_sizes(plan)
        _check_together(plan)
        return plan


def read_any_plan(path: str | Path) -> Plan | ServingPlan:
    """A plan file of either kind.

    Raises:
        ValueError: as ``Plan.load`` and ``ServingPlan.load``.
    """
    return read_plan_file(path, _of_any_kind)


def _of_any_kind(data: Any) -> Plan | ServingPlan:
    is_serving = isinstance(data, dict) and data.get("kind") == SERVING
    return ServingPlan.from_dict(data) if is_serving else Plan.from_dict(data)


def _check_sizes(plan: ServingPlan) -> None:
    for name in ("batch", "prompt_len", "new_tokens"):
        if not 1 <= getattr(plan, name) <= MAX_ELEMENTS:
            raise ValueError(f"{name}: expected a number above zero, got {getattr(plan, name):,}")
    for name in ("first_token_bound", "token_bound"):
        if not 0.0 <= getattr(plan, name) < math.inf:
            raise ValueError(f"{name}: expected finite seconds, got {getattr(plan, name)}")


def _check_together(plan: ServingPlan) -> None:
    """Both plans are of one model, on the mesh, with the weights in one place."""
    for name, phase in plan.phases.items():
        if phase.mesh != plan.mesh:
            raise ValueError(f"{name}: expected a plan on mesh {plan.mesh}, got one on {phase.mesh}")
        if phase.training:
            raise ValueError(f"{name}: expected a plan without training")
    prompt, token = plan.prompt, plan.token
    for name in ("model", "config_name", "cluster"):
        if getattr(prompt, name) != getattr(token, name):
            raise ValueError(f"prompt and token: expected one {name.replace('_name', '')}, got two")
    for path in prompt.states.keys() & token.states.keys():
        if prompt.states[path] != token.states[path]:
            raise ValueError(f"prompt and token: expected one place of {path!r}, got two")
