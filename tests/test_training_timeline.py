"""A whole training that freezes on the way: when it replans, and what all of it takes."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cost_models import Cluster
from planner.changing.freeze_schedule import FreezePhase, FreezeSchedule
from planner.training_timeline import freeze_first, layers_of, plan_training, shortest
from tests.small_models import Mlp, mlp_batch, seeded, squared_error

CLUSTER = Cluster.uniform(2, flops=1e9, memory_bandwidth=1e9, latency=0.0, bandwidth=1e9)


def _plan(size: int, seconds: float, state: float) -> Any:
    """What the decision looks at of a plan."""
    memory = (SimpleNamespace(parameters=state, optimizer=2 * state),)
    costs = SimpleNamespace(simulated=seconds)
    step = SimpleNamespace(axes={"dp": size}, zero_ranks=0, chunks=(), costs=costs, memory=memory)
    return SimpleNamespace(states={}, step=step)


def test_the_plans_of_a_training_are_the_least_of_all_combinations() -> None:
    phases = (FreezePhase(0, 100, 0), FreezePhase(100, 50, 2), FreezePhase(150, 400, 3))
    seconds = {0: (0.3, 0.4), 2: (0.3, 0.2), 3: (0.1, 0.15)}
    plans = [[_plan(2, seconds[phase.frozen][0], 1e9), _plan(4, seconds[phase.frozen][1], 2e9)] for phase in phases]
    for replan_seconds in (0.0, 1.0, 20.0, 200.0):
        # Each phase keeps the program there is or takes one of its two; a program is (phase that it is of, which).
        totals = []
        for choice in itertools.product((0, 1), (None, 0, 1), (None, 0, 1)):
            program, total = (0, choice[0]), 0.0
            for number, (phase, which) in enumerate(zip(phases, choice)):
                if number and which is not None:
                    total += replan_seconds + (3.0 * (1 + which) if which != program[1] else 0.0)
                    program = (number, which)
                total += phase.num_steps * seconds[phases[program[0]].frozen][program[1]]
            totals.append(total)
        path = shortest(phases, plans, CLUSTER, replan_seconds)
        assert sum(phase.seconds for phase in path) == pytest.approx(min(totals))
        assert any(phase.replanned for phase in path) is (replan_seconds < 200)


def test_a_training_that_freezes_takes_no_longer_and_leaves_the_model_as_it_is() -> None:
    model = seeded(Mlp)
    batch = mlp_batch()
    timeline = plan_training(
        model,
        CLUSTER,
        FreezeSchedule(1000, {400: 2}, replan_seconds=0.0),
        example_inputs=batch,
        loss_fn=squared_error,
    )
    first, second = timeline.phases
    assert (first.phase, second.phase) == (FreezePhase(0, 400, 0), FreezePhase(400, 600, 2))
    assert second.replanned and timeline.seconds == first.seconds + second.seconds < timeline.unfrozen_seconds
    assert timeline.summary().startswith("step 0: 0 of 3 layers frozen")
    assert all(parameter.requires_grad for parameter in model.parameters())
    freeze_first(model, layers_of(model)[:2])
    trained = {name.split(".")[1] for name, one in model.named_parameters() if one.requires_grad and "." in name}
    assert "2" in trained and not {"0", "1"} & trained


def test_schedules_from_files(tmp_path: Path) -> None:
    path = tmp_path / "schedule.toml"
    path.write_text("steps = 80\nreplan_seconds = 5\n[adaptive]\nalpha = 0.3333333333333333\nevery = 10\n")
    phases = FreezeSchedule.from_toml(path).phases(12)
    assert [phase.frozen for phase in phases] == [0, 4, 7, 9, 10, 11, 12]
    assert [phase.first_step for phase in phases] == [0, 10, 20, 30, 40, 50, 70]
    assert sum(phase.num_steps for phase in phases) == 80
    freeze = "[[freeze]]\nstep = 3\nlayers = 1\n"
    for text, message in {
        "steps = 10\n": "either",
        f"steps = 10\n{freeze}[adaptive]\nalpha = 0.5\nevery = 2\n": "either",
        f"steps = 3\n{freeze}": "freezes within 1 to 2",
        f"steps = 10\n{freeze}{freeze}": "twice",
        f"steps = 10\nlayer = 1\n{freeze}": "layer",
        "steps = 10\n[adaptive]\nalpha = 1.5\nevery = 2\n": "alpha",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            FreezeSchedule.from_toml(path).phases(12)
    with pytest.raises(ValueError, match="0 to 2 layers"):
        FreezeSchedule(10, {3: 5}).phases(2)
