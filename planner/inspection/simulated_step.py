"""The training step of a saved plan, played again by the simulator."""

from __future__ import annotations

from cost_models.simulator import StepReport, simulate
from passes.plan import Plan

#: How far the simulated step may be from the seconds that the plan states, relative.
TOLERANCE = 1e-6


def simulated_step(plan: Plan, *, events: bool = True) -> StepReport:
    """The plan's step; with every event, and the bytes that each pipeline rank holds over it, if ``events``.

    Raises:
        ValueError: if the schedule cannot run the plan's chunks, or the step takes other seconds than the plan states;
            if it has too many events to show.
    """
    report = simulate(plan.step.pipeline, timeline=events, memory=events)
    stated = plan.step.costs.simulated
    if abs(report.seconds - stated) > TOLERANCE * max(report.seconds, stated):
        raise ValueError(
            f"the plan states a simulated step of {stated:.9g} s, its units play in {report.seconds:.9g} s: the file "
            "was changed, or written by another version; plan again"
        )
    return report
