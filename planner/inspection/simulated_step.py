"""The training step of a saved plan, played again by the simulator."""

from __future__ import annotations

import math

from cost_models.simulator import StepReport, simulate
from passes.plan import Plan

#: How far the simulated step may be from the seconds that the plan states, relative.
TOLERANCE = 1e-6
#: Seconds that are none: parts may cancel each other but for these.
NO_SECONDS = 1e-15


def simulated_step(plan: Plan, *, events: bool = True) -> StepReport:
    """The plan's step; with every event, and the bytes that each pipeline rank holds over it, if ``events``.

    Raises:
        ValueError: if the schedule cannot run the plan's chunks, or the step takes other seconds than the plan states;
            if it has too many events to show; as ``check_parts``.
    """
    check_parts(plan)
    report = simulate(plan.step.pipeline, timeline=events, memory=events)
    stated = plan.step.costs.simulated
    if abs(report.seconds - stated) > TOLERANCE * max(report.seconds, stated):
        raise ValueError(
            f"the plan states a simulated step of {stated:.9g} s, its units play in {report.seconds:.9g} s: the file "
            "was changed, or written by another version; plan again"
        )
    return report


def check_parts(plan: Plan) -> None:
    """Whether the seconds of every unit are those of their parts, which tables and charts show in their place.

    Raises:
        ValueError: for the first unit that takes other seconds.
    """
    for place, chunk in enumerate(plan.step.chunks):
        for unit, ((layer, _), parts) in enumerate(zip(chunk.costs.layers, chunk.parts, strict=True)):
            for name in ("forward", "backward"):
                stated, total = getattr(layer, name), getattr(parts, name)
                if not math.isclose(stated, total, rel_tol=TOLERANCE, abs_tol=NO_SECONDS):
                    raise ValueError(
                        f"step.chunks[{place}]: unit {unit} takes {stated:.9g} s {name}, its parts {total:.9g} s: the "
                        "file was changed, or written by another version; plan again"
                    )
