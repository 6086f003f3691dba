"""Under ``precision="bfloat16"`` inputs keep their digits up to a product, and losses are those of autocast."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import planner
from passes.capture.loss_of_call import calling_model
from tests.autocast_models import (
    FIRST_LAYERS,
    LOSSES,
    Batch,
    OwnLoss,
    Perceptron,
    Reconstruction,
    batch_of,
    by_hand,
    under_autocast,
)
from tests.ranks import run_on_ranks


def planned(model: nn.Module, batch: Batch, **options: Any) -> Any:
    return planner.compile(model, "dp=1", example_inputs=batch, precision="bfloat16", **options)


def assert_trains_as_under_autocast(model: nn.Module, loss: str, *, tolerance: float) -> None:
    """The loss to float32's digits, and gradients to ``tolerance``."""
    parallel = planned(model, batch_of(), loss_fn=LOSSES[loss])
    actual = parallel.train_step(**batch_of())
    expected = under_autocast(model, LOSSES[loss], batch_of())
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-6, atol=0)
    expected.backward()
    gradients = parallel.full_gradients()
    errors = {name: (gradients[name] - one.grad).norm() / one.grad.norm() for name, one in model.named_parameters()}
    assert {name: error for name, error in errors.items() if error > tolerance} == {}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_that_of_autocast(loss: str) -> None:
    torch.manual_seed(0)
    assert_trains_as_under_autocast(Perceptron(), loss, tolerance=1e-6)


@pytest.mark.parametrize("layer", FIRST_LAYERS)
def test_an_input_in_float32_may_meet_any_layer(layer: str) -> None:
    torch.manual_seed(0)
    # Weights of norms are rounded here, and gates of recurrent layers are added up in another order.
    assert_trains_as_under_autocast(FIRST_LAYERS[layer](), "squares by hand", tolerance=1e-2)


@pytest.mark.parametrize(("kind", "names"), [(OwnLoss, ("x", "target")), (Reconstruction, ("x",))])
def test_targets_of_a_models_own_loss_keep_their_digits(kind: type[nn.Module], names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, batch = kind(), {name: batch_of()[name] for name in names}
    actual = planned(model, batch).train_step(**batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch)["loss"]
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-6, atol=0)


def test_the_model_of_a_loss_that_calls_it_answers_in_float32() -> None:
    torch.manual_seed(0)
    model = Perceptron()

    @calling_model
    def loss_fn(called: Any, batch: Batch) -> torch.Tensor:
        return called(batch["x"]).square().mean()

    actual = planned(model, batch_of(), loss_fn=loss_fn).train_step(**batch_of())
    expected = under_autocast(model, LOSSES["of outputs alone"], batch_of())
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-6, atol=0)


def test_a_product_of_floats_of_the_batch_alone_stays_in_float32() -> None:
    class Distances(Perceptron):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x @ x.T

    batch = {"x": batch_of()["x"]}
    parallel = planned(Distances(), batch, loss_fn=lambda outputs, _: outputs[0].sum())
    with torch.no_grad():
        products = parallel(**batch).outputs[1]
    torch.testing.assert_close(products, batch["x"] @ batch["x"].T)


LAYOUTS = {"dp": {"dp": 2}, "tp": {"tp": 2}, "zero": {"dp": 2, "zero": 3, "micro_batch": 2}, "pp": {"pp": 2}}


@functools.cache
def results() -> dict[str, dict[str, list[float]]]:
    return dict(zip(LAYOUTS, run_on_ranks("autocast_losses_worker", 2, list(LAYOUTS.values()))))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", ["mse", "squares by hand", "weighted"])
def test_ranks_compute_the_loss_of_one_device(layout: str, loss: str) -> None:
    actual, expected = results()[layout][loss]
    # Outputs are summed over tp in bfloat16: 1e-5 of a loss whose targets, rounded so, would change it by 1e-3.
    assert actual == pytest.approx(expected, rel=5e-5 if layout == "tp" else 1e-6)


def test_rounded_targets_would_be_seen() -> None:
    model, batch = Perceptron(), batch_of()
    rounded = {**batch, "target": batch["target"].bfloat16().float()}
    losses = [float(under_autocast(model, by_hand, one).detach()) for one in (batch, rounded)]
    assert losses[1] != pytest.approx(losses[0], rel=1e-3)
