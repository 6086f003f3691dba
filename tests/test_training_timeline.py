"""A whole training that freezes on the way: when it replans, and what all of it takes."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cost_models import Cluster
from planner.changing.freeze_schedule import FreezePhase, FreezeSchedule
from planner.changing.freezing import CacheRoom
from planner.cli import main
from planner.training_programs import PhaseProgram
from planner.training_timeline import TrainingTimeline, freeze_first, layers_of, plan_training, shortest
from tests.small_models import Mlp, mlp_batch, seeded, squared_error

pytestmark = pytest.mark.usefixtures("models_traced_once")

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
    plans = [
        [PhaseProgram(_plan(2, seconds[phase.frozen][0], 1e9)), PhaseProgram(_plan(4, seconds[phase.frozen][1], 2e9))]
        for phase in phases
    ]
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


def test_a_cache_is_filled_in_an_epoch_and_is_read_while_its_program_stays() -> None:
    """Against all combinations: computed, behind the first boundary or the second, which is filled from the first."""
    phases = (FreezePhase(0, 100, 0), FreezePhase(100, 130, 2), FreezePhase(230, 400, 3))
    computes = [PhaseProgram(_plan(2, seconds, 0.0)) for seconds in (0.3, 0.2, 0.15)]
    first = PhaseProgram(_plan(2, 0.1, 0.0), "two", 0.01, filling_steps=120, filling_seconds=0.2)
    for reading, from_first, first_steps in ((0.01, 0.07, 130), (0.01, 0.14, 130), (0.2, 0.07, 130), (0.01, 0.07, 90)):
        phases = (phases[0], FreezePhase(100, first_steps, 2), phases[2])
        second = PhaseProgram(_plan(2, 0.05, 0.0), "three", reading, 120, 0.15 + reading, {"two": from_first})
        still_first = PhaseProgram(_plan(2, 0.08, 0.0), "two", 0.01, filling_steps=120, filling_seconds=0.15)
        programs = [[computes[0]], [computes[1], first], [computes[2], still_first, second]]
        totals = []
        for before, after in itertools.product((None, *programs[1]), (None, *programs[2])):
            total = 100 * 0.3 + (before is not None) + (after is not None)
            one = before or computes[0]
            filled = min(one.filling_steps, first_steps)
            total += filled * one.filling_seconds + (first_steps - filled) * one.step_seconds
            left, filling = one.filling_steps - filled, one.filling_seconds
            if after is not None and after.behind and after.behind != one.behind:
                converting = {} if left else after.converting_seconds
                filling = min(after.filling_seconds, converting.get(one.behind, after.filling_seconds))
                left = after.filling_steps
            elif after is not None:
                left, filling = (left if after.behind else 0), after.filling_seconds
            other = after or one
            totals.append(total + left * filling + (400 - left) * other.step_seconds)
        path = shortest(phases, programs, CLUSTER, 1.0)
        assert sum(phase.seconds for phase in path) == pytest.approx(min(totals))


def test_a_timeline_prices_hits_and_says_where_nothing_is_cached() -> None:
    """Three layers; outputs of eight samples, 1,024 bytes each in an epoch of five steps."""
    batch = {"x": mlp_batch()[0]}

    def timeline(frozen: dict[int, int], memory_bytes: float, speed: float) -> TrainingTimeline:
        schedule = FreezeSchedule(1000, frozen, replan_seconds=0.0, steps_of_epoch=5)
        room = CacheRoom(memory_bytes, bytes_per_second=speed)
        options = {"example_inputs": batch, "loss_fn": sum_of_squares, "fix": {"pp": 1, "tp": 1, "cp": 1}}
        return plan_training(seeded(Mlp), CLUSTER, schedule, cache=room, **options)

    cached = timeline({300: 1, 600: 2}, 1e6, 1e12)
    assert [phase.program.behind for phase in cached.phases] == ["", "layers.0", "layers.1"]
    second, third = cached.phases[1:]
    assert (second.filling_steps, third.filling_steps) == (5, 5)
    assert third.filling_seconds == third.program.converting_seconds["layers.0"] < third.program.filling_seconds
    assert "cached behind layers.1 (replanned)" in cached.summary()
    for memory_bytes, speed, words in (
        (1e3, 1e12, "layers.1: an epoch's outputs take 5,120 bytes on each node, the cache has 1,000"),
        (1e6, 1e3, "1.024 s of it to read, computed "),
    ):
        computed = timeline({600: 2}, memory_bytes, speed)
        assert not any(phase.program.behind for phase in computed.phases) and words in computed.summary()
        assert cached.seconds < computed.seconds
    with pytest.raises(ValueError, match="give it steps_of_epoch"):
        plan_training(seeded(Mlp), CLUSTER, FreezeSchedule(10, {3: 1}), cache=CacheRoom(1e6), example_inputs=batch)


def sum_of_squares(outputs: Any, batch: Any) -> Any:
    return outputs.square().sum()


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


def test_the_command_prices_a_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = tmp_path / "schedule.toml"
    schedule.write_text("steps = 100\nsteps_of_epoch = 10\nreplan_seconds = 0\n[[freeze]]\nstep = 20\nlayers = 1\n")
    command = ["plan", "tiny-llama", "--seq-len", "16", "--global-batch", "4", "--cluster", "cpu-local:1"]
    assert main([*command, "--freeze", str(schedule), "--cache-memory", "0.1", "--cache-speed", "1000"]) == 0
    output = capsys.readouterr().out
    assert "one device, cached behind model.layers.0 (replanned)" in output and "10 × " in output
    for options, words in (
        (["--cache-memory", "1"], "--cache-memory is of a training that freezes: give --freeze"),
        (["--freeze", str(schedule), "--cache-speed", "1"], "--cache-speed is of a cache that has room"),
        (
            ["--freeze", str(schedule), "--cache-disk", "none"],
            "--cache-disk takes a positive number of GiB, got",
        ),
    ):
        assert main([*command, *options]) == 2
        assert words in capsys.readouterr().err


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
        f"steps = 10\nlayer = 1\n{freeze}": r"schedule\.toml': the schedule has an unknown field 'layer'",
        f"steps = 10\n{freeze}{freeze.replace('3', '5')}": "1 layers .* from step 5 on, and 1 from step 3 on",
        f"steps = 10\nsteps_of_epoch = 0\n{freeze}": "steps_of_epoch",
        "steps = 10\n[adaptive]\nalpha = 1.5\nevery = 2\n": "alpha",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            FreezeSchedule.from_toml(path).phases(12)
    with pytest.raises(ValueError, match="5 layers are to be frozen from 3 on: give numbers from 0 to 2"):
        FreezeSchedule(10, {3: 5}).phases(2)
