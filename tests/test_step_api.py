"""Plans of whole steps through the public API: compiled on a cluster, refused, saved, read as text."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import planner
from passes.capture import keep_float64
from passes.plan import Plan
from tests.cells import cells
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks, run_script
from tests.small_models import Mlp, TiedClassifier, mlp_batch, seeded, squared_error, token_batch
from tests.step_worker import SCENARIOS

pytestmark = pytest.mark.usefixtures("models_traced_once")

#: Nothing but a mesh of data, context and tensor ranks.
PLAIN = {"pp": 1, "num_microbatches": 1, "recompute": "none", "zero": 0}
NAMES = [scenario.__name__ for scenario in SCENARIOS]
CASES: dict[str, tuple[type[nn.Module], Any, Any]] = {
    "tied classifier": (TiedClassifier, token_batch(), None),
    "mlp": (Mlp, mlp_batch(), squared_error),
}


@functools.cache
def results() -> dict[str, bool]:
    return run_on_ranks("step_worker", 4, NAMES)


@pytest.mark.parametrize("scenario", NAMES)
def test_on_four_processes(scenario: str) -> None:
    assert results()[scenario]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("axes", [{"dp": 4}, {"dp": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}], ids=str)
def test_steps_that_can_be_run_compute_what_one_device_does(case: str, axes: dict[str, int]) -> None:
    """On every rank, with exactly the collectives that were planned; axes of size 1 are in the mesh too."""
    build, batch, loss_fn = CASES[case]
    with keep_float64():
        step_plan = planner.plan(
            seeded(build), "cpu-local:4", example_inputs=batch, loss_fn=loss_fn, fix={**PLAIN, **axes}
        )
    assert step_plan.mesh.as_dict() == {"dp": 1, "cp": 1, "tp": 1, **axes}
    report = planner.verify(seeded(build), step_plan, batch=batch, loss_fn=loss_fn, steps=1)
    assert report.ok, report.table()


def test_a_plan_is_the_same_when_read_back(tmp_path: Path) -> None:
    step_plan = planner.plan(
        seeded(TiedClassifier), "cpu-local:8", example_inputs=token_batch(), fix={"pp": 2}, num_alternatives=3
    )
    step_plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == step_plan and again.summary(operators=True) == step_plan.summary(operators=True)


def test_the_least_memory_is_less_than_the_fastest_takes() -> None:
    def most(**options: Any) -> float:
        fix = {"pp": 1, "cp": 1, "tp": 1}
        step_plan = planner.plan(
            seeded(TiedClassifier), "cpu-local:4", example_inputs=token_batch(), fix=fix, **options
        )
        assert step_plan.step is not None
        return max(memory.total for memory in step_plan.step.memory)

    least = most(objective="memory")
    assert least < most()
    with pytest.raises(ValueError, match="no plan fits in memory"):
        most(memory_limit=0.9 * least)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": "dp=4", "fix": {"zero": 1}, "forbid_collectives": ("all_gather",)}, "forbid_collectives means"),
        ({"mesh": "dp=4", "fix": {"tp": 2}}, "fix says tp=2, but the mesh has tp=1"),
        ({"mesh": "dp=4", "num_devices": 2}, "num_devices is 2, but mesh dp=4 has 4"),
        ({"mesh": "x=4", "fix": {"zero": 1}}, "a step has no mesh axis 'x'"),
        ({"forbid_collectives": ("all_gather",)}, "forbid_collectives means something only if a mesh is given"),
        ({"objective": "money"}, "time, devices, memory"),
        ({"target_seconds": 1.0}, "give both or neither"),
        ({"batch_size": 4, "global_batch": 8}, "same thing"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        planner.plan(seeded(TiedClassifier), "cpu-local:4", example_inputs=token_batch(), **options)


def test_one_process_is_a_cluster_of_one(tmp_path: Path) -> None:
    script = (
        "import planner\n"
        "from tests.small_models import Mlp, mlp_batch, seeded, squared_error\n"
        "options = {'example_inputs': mlp_batch(), 'loss_fn': squared_error}\n"
        "parallel = planner.compile(seeded(Mlp), 'cpu-local:1', **options)\n"
        "parallel(*mlp_batch()).loss.backward()\n"
        "assert parallel.plan.mesh.num_devices == 1\n"
        "try:\n    planner.compile(seeded(Mlp), 'cpu-local:2', **options)\n"
        "except ValueError as error:\n    assert 'world size is 1' in str(error), error\n"
        "else:\n    raise SystemExit('not refused')\n"
    )
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    run_script(tmp_path / "script.py", [{}], folder=tmp_path, timeout=PATIENCE)  # raises what it says if it fails


@pytest.mark.parametrize(
    ("model", "cluster", "seq_len", "global_batch"),
    cells(
        [("gpt2-xl", "8x-rtx3090", 1024, 64), ("vit-large", "dgx-a100-40g:2", None, 512)],
        [("bert-large", "8x1080ti", 512, 64)],
    ),
)
def test_plans_are_proved_within_one_percent(model: str, cluster: str, seq_len: int | None, global_batch: int) -> None:
    """Also where the simulator prefers another plan than the search: a closer search then proves that one."""
    plan = planner.plan(model, cluster, seq_len=seq_len, global_batch=global_batch)
    assert plan.certificate.status == "optimal with alike copies"
    assert plan.certificate.gap <= 0.01
