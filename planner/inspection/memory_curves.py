"""Bytes that one device of each pipeline rank holds over the simulated step, by what they are for."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.simulator import StepReport
from passes.plan import Plan

#: Parts of a curve, from the bottom of the stack to its top.
PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "transient")


@dataclass(frozen=True)
class MemoryCurve:
    """One rank: ``parts[name][i]`` bytes from ``seconds[i]`` to ``seconds[i + 1]``; all but two parts are constant."""

    rank: int
    seconds: tuple[float, ...]
    parts: dict[str, tuple[float, ...]]

    @property
    def peak_bytes(self) -> float:
        """The most that all parts together hold at any time."""
        return max(map(sum, zip(*self.parts.values())))


def memory_curves(plan: Plan, report: StepReport) -> tuple[MemoryCurve, ...]:
    """One curve a pipeline rank.

    ``activations`` are what the backward pass still needs, ``transient`` what is alive beyond that while an action
    runs: temporaries, gathered parameters, gradients on their way. ``buffers``: those of the model, and copies of tied
    parameters.
    """
    if report.memory is None:
        raise ValueError("the step was simulated without memory: pass memory=True to simulate")
    return tuple(_curve(plan, rank, points) for rank, points in enumerate(report.memory))


def _curve(plan: Plan, rank: int, points: tuple[tuple[float, float], ...]) -> MemoryCurve:
    planned = plan.step.memory[rank]
    state = points[0][1]
    named = planned.parameters + planned.gradients + planned.optimizer
    constant = (planned.parameters, planned.gradients, planned.optimizer, max(0.0, state - named))
    # Points come in pairs: while an action runs, and after it.
    after = [num_bytes - state for _, num_bytes in points[::2]]
    times, activations, transient = [0.0], [0.0], [0.0]
    for index in range(1, len(points), 2):
        (start, running), (end, left) = points[index], points[index + 1]
        saved = max(after[index // 2], left - state)
        times += [start, end]
        activations += [saved, left - state]
        transient += [max(0.0, running - state - saved), 0.0]
    parts = {name: (amount,) * len(times) for name, amount in zip(PARTS, constant)}
    return MemoryCurve(rank, tuple(times), parts | {"activations": tuple(activations), "transient": tuple(transient)})
