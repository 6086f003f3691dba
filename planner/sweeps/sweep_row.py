"""A finished row of a sweep: what was asked, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_models.short_text import ShortRepr
from planner.sweeps.row_request import RowRequest
from planner.sweeps.study import Study, family_of


@dataclass(frozen=True, repr=False)
class SweepRow(ShortRepr):
    """``result`` is what ``ResultsFolder.finished`` returns."""

    request: RowRequest
    result: Mapping[str, Any]

    @property
    def error(self) -> str | None:
        """Why there is no plan, None if there is one."""
        error: str | None = self.result["record"].get("error")
        return error

    def figure(self, name: str) -> Any:
        """A figure of ``planner.sweeps.plan_row.figures``; None for a row without a plan."""
        return self.result["record"].get("figures", {}).get(name)

    @property
    def num_devices(self) -> int:
        """Devices of the plan, or those that were asked for."""
        return self.figure("devices") or self.request.num_devices

    @property
    def plan(self) -> str:
        """The plan's file in the results, empty for a row without one."""
        return "" if self.error is not None else f"plans/{self.request.plan_file}"

    @property
    def planning_seconds(self) -> float:
        """Processor seconds that planning took, with its baselines, and capturing where no graph was kept."""
        return float(self.result["processor_seconds"])

    def baseline(self, name: str) -> Mapping[str, Any]:
        """Seconds, memory and description of an expert's layout; empty if the row was not compared with it."""
        layout: Mapping[str, Any] = self.result["record"].get("baselines", {}).get(name, {})
        return layout

    def ratio(self, name: str) -> float | None:
        """Seconds of the plan over those of an expert's layout, None if that cannot run."""
        seconds = self.baseline(name).get("seconds")
        return None if seconds is None else float(self.figure("step_seconds") / seconds)

    def cost_per_million(self, study: Study) -> float | None:
        """Price of a million tokens (of a thousand samples, for a model without tokens), None without a price."""
        rate, number = self.rate
        price = study.price(self.request.cluster, self.num_devices)
        if price is None or not rate:
            return None
        return price * self.num_devices / 3600.0 * number / rate

    @property
    def rate(self) -> tuple[float | None, float]:
        """Tokens a second and a million, or samples a second and a thousand for a model without tokens."""
        tokens = self.figure("tokens_per_second")
        return (tokens, 1e6) if tokens is not None else (self.figure("samples_per_second"), 1e3)

    @property
    def series(self) -> tuple[str, ...]:
        """What a curve over numbers of devices has in common."""
        request = self.request
        length = "" if request.seq_len is None else f"{request.seq_len}"
        return request.model, family_of(request.cluster), request.batch, length, request.options, request.layout
