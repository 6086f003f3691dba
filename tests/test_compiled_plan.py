"""``planner.compile(compiled=True)`` trains as one device does; checkpoints inside a model become recomputation."""

from __future__ import annotations

from typing import Any

import pytest

import planner
from planner.library import build_model, load_config
from tests.ranks import run_on_ranks
from tests.small_models import TiedClassifier, seeded, token_batch

MESHES = ("dp=2", "pp=1,tp=2")


@pytest.fixture(scope="module")
def ranks() -> dict[str, Any]:
    return run_on_ranks("compiled_plan_worker", 2, list(MESHES))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_of_compiled_blocks_is_that_of_one_device(ranks: dict[str, Any], mesh: str) -> None:
    """The block between embedding and output is a kernel of the source, in a module that is in no file."""
    assert ranks[mesh]["error"] <= 1e-9 and ranks[mesh]["compared"] == 4
    assert ranks[mesh]["graphs"] >= 1


def test_checkpoints_inside_a_model_are_planned_as_recomputation(ranks: dict[str, Any]) -> None:
    assert "recompute='full'" in ranks["checkpoints"]["source"]
    assert ranks["checkpoints"]["error"] <= 1e-9


def test_checkpoints_are_planned_on_a_given_mesh_if_inputs_show_them_before_the_first_call(
    ranks: dict[str, Any],
) -> None:
    assert "recompute='full'" in ranks["checkpoints"]["on mesh"]
    assert "fix={'recompute': 'full'}" in ranks["checkpoints"]["refusal"]


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("dp=1", {"time_limt": 3}, "compile has no option 'time_limt', did you mean 'time_limit'?"),
        ("pp=1,dp=1", {"fold": False}, "fold is an option of plans on a given mesh alone"),
    ],
)
def test_options_that_compile_does_not_have_are_refused(target: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        planner.compile(seeded(TiedClassifier), target, **options)
    assert words in str(caught.value)


def test_options_of_whole_steps_that_ask_for_nothing_go_with_any_mesh() -> None:
    asks_nothing = {"fix": None, "forbid": {}, "compiled": False, "objective": "time"}
    parallel = planner.compile(seeded(TiedClassifier), "tp=1", example_inputs=token_batch(batch=2), **asks_nothing)
    assert parallel.plan.mesh.as_dict() == {"tp": 1}
    assert planner.verify(seeded(TiedClassifier), "tp=1", batch=token_batch(batch=2), fix=None).ok


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_ranks_of_a_compiled_plan_run_in_one_process_uncompiled(recompute: str) -> None:
    """Torch compiles no whole graph in a dispatch mode, which is what runs all ranks."""
    options = {"compiled": True, "fix": {"recompute": recompute}}
    assert planner.verify(seeded(TiedClassifier), "dp=2,tp=2", batch=token_batch(batch=4), **options).ok


@pytest.mark.parametrize(
    ("name", "size"), [("hidden_size", -64), ("num_attention_heads", 0), ("vocab_size", 0), ("num_hidden_layers", -1)]
)
def test_sizes_that_no_model_has_are_refused(name: str, size: int) -> None:
    config = load_config("tiny-llama")
    setattr(config, name, size)
    with pytest.raises(ValueError, match=f"the llama config says {name}={size}: expected"):
        build_model(config)
