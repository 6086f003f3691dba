"""From the model's arithmetic at the devices' peak to the simulated step, cause by cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.simulator import StepReport
from cost_models.step import LayerSeconds
from passes.plan import Plan
from passes.plan.step_plan import StepPlan

#: Field names of ``LayerSeconds`` behind one bar of the waterfall.
_CAUSES: Mapping[str, tuple[str, ...]] = {
    "computed again for the backward pass": ("recompute",),
    "collectives inside layers": ("communication_forward", "communication_backward", "recommunicate"),
    "gradients copied and added up": ("accumulate",),
    "gathered weights laid out whole": ("unpack_forward", "unpack_backward"),
    "compute slowed by communication beside it": ("contention_forward", "contention_backward"),
    "activations on their way to the host and back": ("carry_forward", "carry_backward"),
    "waiting for the host to launch operators": ("host_forward", "host_backward"),
}


@dataclass(frozen=True)
class WaterfallBar:
    """One cause: its seconds (of the step, on the rank that computes longest), and what it is."""

    name: str
    seconds: float
    explanation: str


def waterfall(plan: Plan, report: StepReport) -> tuple[WaterfallBar, ...]:
    """The bars, in order; their seconds add up to those of the simulated step.

    The rank is the pipeline rank that computes longest. Its first bar is its even share of the model's arithmetic at
    the peak of the devices: model flops / (devices × peak), which is utilisation × seconds of the step.
    """
    step = plan.step
    rank = busiest_rank(report)
    played = report.ranks[rank]
    seconds = {name: _seconds(step, rank, fields) for name, fields in _CAUSES.items()}
    operators = _seconds(step, rank, ("compute_forward", "compute_backward"))
    ideal = step.costs.utilisation * step.costs.simulated
    causes = [
        ("all devices at their peak", ideal, "model flops / (devices × peak flops)"),
        (
            "kernels below their peak, uneven or repeated work",
            operators - ideal,
            "operators by the efficiency curves, what every rank of an axis computes, and stages longer than others; "
            "below zero where causal kernels skip more of attention, which model flops count whole, than that takes",
        ),
        *((name, amount, _explanation(name)) for name, amount in seconds.items()),
    ]
    update = max(0.0, played.compute_seconds - operators - sum(seconds.values()))
    causes += [
        ("optimizer", update, _update_text(step)),
        (
            "communication that nothing hides",
            played.exposed_seconds,
            "receives between stages, gathers that come too late, reductions behind the last backward pass",
        ),
        ("waiting for other stages", _idle_seconds(report, rank), "the pipeline's bubble"),
    ]
    return tuple(WaterfallBar(*cause) for cause in causes)


def _update_text(step: StepPlan) -> str:
    moved = "gradients, parameters and moments read and written once a step, working weights made of them"
    return f"{moved}, on the host, and carried there and back" if step.optimizer_on_host else moved


def _idle_seconds(report: StepReport, rank: int) -> float:
    """What the rank neither computes nor communicates; a difference that is only rounding is none."""
    played = report.ranks[rank]
    idle = report.seconds - played.compute_seconds - played.exposed_seconds
    return idle if idle > 1e-12 * report.seconds else 0.0


def busiest_rank(report: StepReport) -> int:
    """The pipeline rank that computes longest; of equals the first."""
    return max(range(len(report.ranks)), key=lambda rank: report.ranks[rank].compute_seconds)


def _seconds(step: StepPlan, rank: int, fields: tuple[str, ...]) -> float:
    """Seconds of a step that the rank spends on these causes, all micro-batches together."""
    total = 0.0
    for chunk in step.chunks:
        if chunk.rank == rank:
            for (_, count), parts in zip(chunk.costs.layers, chunk.parts, strict=True):
                total += count * _sum(parts, fields)
    return step.num_microbatches * total


def _sum(parts: LayerSeconds, fields: tuple[str, ...]) -> float:
    return sum(getattr(parts, field) for field in fields)


def _explanation(name: str) -> str:
    return "as each unit of the plan is priced: " + ", ".join(_CAUSES[name]).replace("_", " ")
