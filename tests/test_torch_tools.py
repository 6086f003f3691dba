"""PyTorch's own tools on the parameters of a parallel module do what they do on one device, or say that they cannot."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.parameters.choices_by_place import chose_by_place
from runtime.torch_compat.dtensors import are_subclasses_dispatched
from tests.cells import cells
from tests.ranks import run_on_ranks
from tests.torch_tools_cases import OPTIMIZERS


def some(*names: str) -> list[str]:
    """Optimizers, those that this torch has."""
    return cells([name for name in OPTIMIZERS if name in names], [name for name in OPTIMIZERS if name not in names])


#: Ranks → plan → the optimizers that step under it; all where tensors are cut on two ranks.
PLANS = {
    2: {
        "tp": [*OPTIMIZERS],
        "dp": some("AdamW", "Adafactor", "Muon", "Adafactor of transformers, its own rates"),
        "zero 3": [*OPTIMIZERS],
        "pp": some("AdamW, fused", "SGD", "Muon", "Adafactor of transformers, its own rates"),
    },
    4: {
        "tp, zero 1": some("AdamW", "Muon", "Adafactor of transformers"),
        "zero 2, empty pieces": some(
            "AdamW, fused", "Adafactor", "Adafactor, foreach", "Muon", "Adafactor of transformers, its own rates"
        ),
        "zero 3, in pairs": some("SGD", "Adafactor, foreach"),
        "pp, zero 1": some("AdamW, fused", "Adafactor of transformers"),
    },
}
#: From one plan to another.
RESUMED = {
    2: [("tp", "zero 1"), ("zero 3", "pp"), ("pp", "tp")],
    4: [("tp, zero 1", "pp, zero 1"), ("zero 3, in pairs", "tp, zero 1")],
}
ADOPTED = {2: ["tp", "zero 1", "pp"], 4: []}
REFUSALS = {
    "early optimizer": "optimizer=optimizer",
    "LBFGS": "one vector of all parameters",
    "pickle": "cannot be pickled",
    "copy": "copy.deepcopy copies it",
    "DDP": "without DistributedDataParallel",
    "fully_shard": "without fully_shard",
    "FSDP": "without FSDP",
    "hook": "change the gradients after train_step",
    "plain gradient": "distribute it first",
    "thawed": "or call parallel.replan(target, optimizer) to train it",
    "replaced": "was replaced by another tensor",
    "clip": "clip by parallel.clip_grad_norm_",
    "method": "runs forward alone",
    "weight elsewhere": "in pipeline chunk 2, which training does not",
    "loss outside": "must be the model's own loss, of a call in training mode",
    "one parameter": "clip by parallel.clip_grad_norm_",
    "twice": "call the model again before each backward",
    "second": "cannot be differentiated again",
}
if are_subclasses_dispatched():
    REFUSALS["noise"] = "has other values on other ranks"


def on_ranks(count: int) -> Any:
    asked = {"plans": PLANS[count], "dcp": RESUMED[count], "adopted": ADOPTED[count], "refusals": count == 2}
    return run_on_ranks("torch_tools_worker", count, asked)


@pytest.mark.parametrize(("count", "plan"), [(count, plan) for count, plans in PLANS.items() for plan in plans])
def test_clipping_and_optimizers_are_those_of_one_device(count: int, plan: str) -> None:
    errors = on_ranks(count)["one device"][plan]
    assert {name: error for name, error in errors.items() if not error < 1e-9} == {}
    assert max(on_ranks(count)["whole"][plan].values()) < 1e-9


@pytest.mark.parametrize(("count", "plan"), [(count, plan) for count, plans in PLANS.items() for plan in plans])
def test_all_ranks_skip_a_step_that_one_of_them_has_an_infinite_gradient_in(count: int, plan: str) -> None:
    assert on_ranks(count)["scaled"][plan] == []


@pytest.mark.parametrize("count", PLANS)
def test_checkpoints_of_torch_resume_under_another_plan(count: int) -> None:
    assert max(on_ranks(count)["dcp"]) < 1e-9


@pytest.mark.skipif(not are_subclasses_dispatched(), reason="torch 2.11 refuses on DTensors what Adafactor computes")
@pytest.mark.parametrize("count", PLANS)
def test_statistics_of_rows_and_columns_resume_under_another_plan(count: int) -> None:
    assert max(on_ranks(count)["statistics"]) < 1e-9


def test_an_optimizer_made_before_compile_is_taken_over() -> None:
    assert max(on_ranks(2)["adopted"]) < 1e-9


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_right_is_refused(case: str) -> None:
    assert REFUSALS[case] in on_ranks(2)["refusals"][case]


@pytest.mark.parametrize(("choice", "times"), [("by_place", 1), ("frozen_by_place", 1), ("by_name", 0)])
def test_parameters_chosen_by_their_place_in_a_stage_are_warned_of(choice: str, times: int) -> None:
    assert len(on_ranks(2)["warned"][choice]) == times


def test_stages_that_choose_the_same_places_are_told_from_a_division_of_the_model() -> None:
    names = list("abcdef")

    def of_two(first: str, second: str) -> bool:
        """What two stages of three parameters choose, a letter a parameter."""
        return chose_by_place([dict(zip(names, first)), dict(zip(names[3:], second))], names)

    assert of_two("xyy", "xyy") and of_two("xxy", "xxy") and of_two("xyz", "xyz")
    assert not of_two("xxx", "xxy"), "a head apart"
    assert not of_two("xyy", "zzz"), "a rate by layer"
    assert not of_two("xyx", "xyx"), "weights apart from biases"
    assert not of_two("xxy", "xyy"), "other places"
    assert chose_by_place([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"c": 1, "d": 2, "e": 2}], names), "ranks of one stage"
    assert chose_by_place([{"a": 2, "b": 1}, {"c": 2, "d": 2, "e": 1}], names), "counted from the end"


@pytest.mark.skipif(not are_subclasses_dispatched(), reason="in torch 2.11 DTensor decides alone what operators do")
@pytest.mark.parametrize(("count", "plan"), [(count, plan) for count, plans in PLANS.items() for plan in plans])
def test_operators_and_writes_through_views_are_those_of_one_device(count: int, plan: str) -> None:
    assert on_ranks(count)["operators"][plan] == []


@pytest.mark.skipif(not are_subclasses_dispatched(), reason="refused under torch 2.11")
@pytest.mark.parametrize(
    ("count", "plan"), [(n, plan) for n, plans in PLANS.items() for plan in plans if plan[:2] != "pp"]
)
def test_numbers_drawn_on_parameters_are_those_of_one_device(count: int, plan: str) -> None:
    assert on_ranks(count)["draws"][plan] == []


@pytest.mark.parametrize(("count", "plan"), [(count, plan) for count, plans in PLANS.items() for plan in plans])
def test_weights_whose_data_was_exchanged_come_back(count: int, plan: str) -> None:
    assert on_ranks(count)["exchanged"][plan] < 1e-9


@pytest.mark.parametrize("count", PLANS)
def test_averages_are_copies_that_run_for_themselves(count: int) -> None:
    assert max(on_ranks(count)["averages"].values()) < 1e-9


@pytest.mark.parametrize("of", ["asked for", "asked for with inputs"])
def test_autograd_gives_gradients_that_are_asked_for(of: str) -> None:
    assert {plan: error for plan, error in on_ranks(2)[of].items() if not error < 1e-9} == {}


def test_outputs_that_a_script_holds_outlive_their_plan() -> None:
    assert max(on_ranks(2)["held outputs"]) < 1e-9


def test_torch_compile_leaves_it_as_it_is() -> None:
    assert on_ranks(2)["torch.compile"]


def test_a_model_that_recomputes_itself_is_planned_so_on_a_mesh() -> None:
    recompute, error = on_ranks(2)["recomputed"]
    assert set(recompute) == {"full"} and error < 1e-9


def test_a_penalty_on_parameters_adds_to_their_gradients() -> None:
    assert on_ranks(2)["penalty"]


@pytest.mark.parametrize("plan", [plan for plan in PLANS[2] if not plan.startswith("pp")])
def test_hooks_see_whole_gradients(plan: str) -> None:
    assert on_ranks(2)["hooks"][plan] < 1e-9


@pytest.mark.parametrize("plan", PLANS[2])
def test_layers_may_be_frozen_under_any_plan(plan: str) -> None:
    assert on_ranks(2)["frozen"][plan] < 1e-9


@pytest.mark.parametrize("plan", [plan for plan in PLANS[2] if not plan.startswith("pp")])
def test_a_backward_pass_that_raised_leaves_nothing_behind(plan: str) -> None:
    assert on_ranks(2)["raised"][plan] < 1e-9


@pytest.mark.parametrize("plan", ["tp", "dp", "zero 1", "zero 3"])
def test_several_forwards_have_one_backward(plan: str) -> None:
    assert on_ranks(2)["several"][plan] < 1e-9
