"""The trainer on two processes: every scenario answers how far it is from a loop by hand on one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import planner
from planner.trainer import decay_groups, warmup_cosine
from planner.trainer.evaluation import check_number
from planner.trainer.trainer_batches import count_valid
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks
from tests.small_models import Mlp
from tests.trainer_worker import SCENARIOS


@pytest.fixture(scope="module")
def results() -> dict[str, float]:
    return run_on_ranks("trainer_worker", 2, [scenario.__name__ for scenario in SCENARIOS], timeout=PATIENCE)


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_scenario(scenario: str, results: dict[str, float]) -> None:
    assert results[scenario] <= 1e-9


def test_labels_that_a_mean_is_over() -> None:
    labels = torch.tensor([[1, 2, -100], [3, -100, -100]])
    assert count_valid({"labels": labels}, ["labels"], shifted=False) == 3
    assert count_valid({"labels": labels}, ["labels"], shifted=True) == 1
    assert count_valid((torch.zeros(5, 2), torch.zeros(5)), ["labels"], shifted=False) == 5


def test_norms_and_biases_do_not_decay() -> None:
    decayed, undecayed = decay_groups(Mlp().parameters(), weight_decay=0.1)
    assert {parameter.dim() for parameter in decayed["params"]} == {2} and decayed["weight_decay"] == 0.1
    assert {parameter.dim() for parameter in undecayed["params"]} == {1} and undecayed["weight_decay"] == 0.0


def test_warm_up_then_half_a_cosine() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup_cosine(2, 10, final=0.1)(optimizer)
    rates = []
    for _ in range(12):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:3] == [0.5, 1.0, 1.0] and math.isclose(rates[6], 0.55) and rates[10:] == [0.1, 0.1]
    with pytest.raises(ValueError, match="shorter"):
        warmup_cosine(10, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 0}, "global_batch=0"),
        ({"global_batch": 8.0}, "global_batch=8.0: give a whole number"),
        ({"global_batch": 8, "save_every": 0}, "save_every=0"),
        ({"global_batch": 8, "log_every": -1}, "log_every=-1"),
        ({"global_batch": 8, "max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
        ({"global_batch": 8, "max_grad_norm": math.nan}, "max_grad_norm=nan"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planner.Trainer(Mlp(), "dp=1", **options)


def test_what_needs_more_than_is_there() -> None:
    trainer = planner.Trainer(Mlp(), "dp=1", global_batch=8)
    with pytest.raises(ValueError, match="num_epochs or num_steps"):
        trainer.fit([])
    for length in ({"num_epochs": -1}, {"num_epochs": 1.5}, {"num_steps": True}, {"num_steps": math.nan}):
        with pytest.raises(ValueError, match="give a whole number, at least 0"):
            trainer.fit([], **length)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="call fit"):
        _ = trainer.parallel
    with pytest.raises(ValueError, match="checkpoint_dir"):
        trainer.load_best()
    with pytest.raises(ValueError, match="dataset is empty"):
        trainer.evaluate([])


@pytest.mark.parametrize(
    ("outputs", "words"), [(torch.zeros(()), "a single number"), (None, "a NoneType"), (torch.zeros(1), "1 output")]
)
def test_a_prediction_without_an_output_for_each_sample_is_refused(outputs: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"the model gives {words} for a batch of 4 samples: give .* a predict_fn"):
        check_number(outputs, 4, "the model gives")
