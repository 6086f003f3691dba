"""Numbers of weights that Python reads and gives back as places: looked up, exact with gradients; else refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import planner
from passes.capture import CaptureError, capture, keep_float64
from tests.capture_parity import graph_loss

Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def kept_places(scores: torch.Tensor) -> torch.Tensor:
    return torch.topk(scores, 3).indices


def rolled_by_the_best(y: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Autoformer's aggregation of delays."""
    total = torch.zeros_like(y)
    for place in range(len(places)):
        total = total + y.roll(shifts=-int(places[place]), dims=1) * y[:, int(places[place])].unsqueeze(1)
    return total


def written(y: torch.Tensor, place: int) -> torch.Tensor:
    result = y.clone()
    result[:, place] = 0.0
    return result


FORMS: dict[str, Form] = {
    "delays": rolled_by_the_best,
    "item": lambda y, places: y.roll(places[0].item(), 1),
    "int of item": lambda y, places: y.roll(int(places[0].item()), 1),
    "two dims": lambda y, places: y.roll((int(places[0]), 1), (1, 2)),
    "two numbers": lambda y, places: torch.roll(y, (places[0].item(), -places[1].item()), (1, -1)),
    "of all entries": lambda y, places: y.roll(places[0].item()),
    "behind the number": lambda y, places: y[:, (places[0].item() + 2 * places[1].item() - 1) % y.shape[1]],
    "difference": lambda y, places: y.roll(3 - places[0].item(), dims=[1]),
    "select": lambda y, places: y.select(1, places[2].item()),
    "narrow": lambda y, places: y.narrow(1, places[0].item() % 4, 2),
    "written": lambda y, places: written(y, places[1].item()),
    "told from a list": lambda y, places: y.roll(places[0].item() if isinstance(places[0].item(), int) else 9, 1),
}


class Delays(nn.Module):
    """Places of the largest scores, which weights decide, in ``form``."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.scale = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scale(x)
        z = self.form(y, kept_places(y.mean((0, 2))))
        return (z * torch.arange(z.numel(), dtype=z.dtype).reshape(z.shape)).square().sum()  # each place counts apart


@pytest.mark.parametrize("name", FORMS)
def test_a_number_that_weights_decide_is_a_place_like_any_other(name: str) -> None:
    torch.manual_seed(0)
    model = Delays(FORMS[name]).double()
    with keep_float64():
        graph = capture(model, args=(torch.randn(2, 6, 4).double(),))
        for _ in range(3):  # other places each time
            x = torch.randn(2, 6, 4).double()
            losses = graph_loss(graph, model, (x,), {}), model(x)
            gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
            torch.testing.assert_close([losses[0], *gradients[0]], [losses[1], *gradients[1]], rtol=1e-12, atol=1e-12)


REFUSED: dict[str, Form] = {
    "compared": lambda y, places: y if int(places[0]) > 2 else y * 2,
    "compared with another": lambda y, places: y if places[0].item() == places[1].item() else y * 2,
    "a flag": lambda y, places: y if places[0].item() else y * 2,
    "a size": lambda y, places: y[:, : places[0].item()],
    "two ends": lambda y, places: y[:, places[0].item() : places[0].item() + 2],
    "how many": lambda y, places: y * sum(1 for _ in range(places[0].item())),
    "a factor": lambda y, places: y * places[0].item(),
    "of a list": lambda y, places: y * [1, 2, 3, 4, 5, 6][places[0].item()],
    "a key": lambda y, places: y * {1: 2.0}.get(places[0].item(), 1.0),
    "a name": lambda y, places: y * len(f"{places[0].item()}"),
    "a fraction": lambda y, places: y * (places[0].item() / 2),
    "a float": lambda y, places: y * float(places[0].item()),
    "a new tensor's": lambda y, places: y * torch.full((1,), places[0].item()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_else_python_does_with_a_number_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match=r"a tensor's value is read in Python .*, which depends on the parameter"):
        capture(Delays(REFUSED[name]), args=(torch.randn(2, 6, 4),))


class Remembering(Delays):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.best = kept_places(self.scale(x).mean((0, 2)))[0].item()
        return super().forward(x)


class Telling(Delays):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        return super().forward(x), kept_places(self.scale(x).mean((0, 2)))[0].item()  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [Remembering, Telling])
def test_a_number_that_a_call_leaves_behind_is_refused(kind: type[Delays]) -> None:
    with pytest.raises(CaptureError, match="a tensor's value is read in Python"):
        capture(kind(FORMS["item"]), args=(torch.randn(2, 6, 4),))


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,dp=2"])
def test_a_model_that_rolls_by_what_weights_decide_trains_as_on_one_device(mesh: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Delays(rolled_by_the_best))
    report = planner.verify(model, mesh, batch=(torch.randn(4, 6, 4),), loss_fn=lambda loss, _: loss)
    assert report.ok and report.largest_error < 1e-9
