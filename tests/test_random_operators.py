"""Random numbers in forward: what torch calls them, of one device under every plan, refused where they cannot be."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from random_oracle import words
from torch import nn
from torch.utils.checkpoint import checkpoint

import planner
from passes.capture import CaptureError, capture, interpret, keep_float64
from passes.ir.types import I
from planner.compilation import parallelise
from planner.planning import plan as make_plan
from planner.verification.verify_model import slow_devices
from runtime import ops
from runtime.execution.rank_mapping import VirtualPlaces
from runtime.mesh.layout import VirtualLayout, virtual_ranks

pytestmark = pytest.mark.usefixtures("models_traced_once")

Numbers = Callable[[torch.Tensor], torch.Tensor]
Normal, Bernoulli = torch.distributions.Normal, torch.distributions.Bernoulli
#: Made of a tensor [rows, columns]; all give a tensor of that shape, or one that broadcasts to it.
LIKE: dict[str, Numbers] = {
    "randn_like": torch.randn_like,
    "rand_like": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, -3, 5),
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "rand": lambda x: torch.rand(x.shape[0], 1, dtype=x.dtype),
    "randint": lambda x: torch.randint(10, x.shape),
    "normal": lambda x: torch.normal(2.0 * torch.ones_like(x), 3.0),
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, 2.0),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1.0, 2.0),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.5, 0.2),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "random_": lambda x: torch.empty_like(x).random_(2, 9),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "bernoulli of a number": lambda x: torch.bernoulli(x, 0.7),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.2),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(torch.full_like(x[:1], 0.4)),
    "gumbel": lambda x: F.gumbel_softmax(torch.zeros_like(x)),
    "rsample": lambda x: Normal(torch.ones_like(x), 2.0 * torch.ones_like(x)).rsample(),
    "sample": lambda x: Bernoulli(torch.full_like(x, 0.6)).sample(),
    "multinomial": lambda x: torch.multinomial(torch.ones_like(x).cumsum(-1), 1).to(x.dtype),
    "multinomial, several": lambda x: torch.multinomial(torch.ones_like(x).cumsum(-1), 4).to(x.dtype).sum(-1, True),
    "multinomial, replaced": lambda x: torch.multinomial(x.abs() + 1.0, 9, True).to(x.dtype).mean(-1, True),
    "randperm": lambda x: torch.randperm(x.shape[1]).to(x.dtype),
    "alpha_dropout": lambda x: F.alpha_dropout(torch.ones_like(x), 0.3, True),
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.3),
    "rrelu": lambda x: F.rrelu(-torch.ones_like(x), 0.1, 0.5, True),
    "dropout2d": lambda x: F.dropout2d(torch.ones_like(x)[:, :, None, None].expand(-1, -1, 3, 3), 0.4).mean((2, 3)),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(torch.ones_like(x)[:, :, None], 0.4, True)[:, :, 0],
}


class Noisy(nn.Module):
    """Numbers of a kind for the output of a layer."""

    def __init__(self, *kinds: Numbers, width: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.kinds = kinds

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        drawn = [kind(y).to(y.dtype) * y for kind in self.kinds]
        outputs = {str(place): numbers for place, numbers in enumerate(drawn)}
        return {"loss": torch.stack([numbers.sum() for numbers in drawn]).sum(), **outputs}


@pytest.mark.parametrize("name", LIKE)
def test_the_numbers_are_those_that_torch_describes(name: str) -> None:
    """Mean and deviation of the written-out operator, by torch's own draws, are those of torch's operator."""
    torch.manual_seed(0)
    x = torch.randn(3000, 40)

    def drawn(x: torch.Tensor) -> torch.Tensor:
        return LIKE[name](x).to(x.dtype).expand(x.shape)

    class Drawn(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return drawn(x)

    graph = capture(Drawn(), args=(x,))
    named_inputs = {value.name: x for value in graph.inputs}
    (actual,) = interpret(graph, named_inputs, lambda state: state.data).values()
    expected = drawn(x)
    for statistic in (torch.mean, torch.std):
        scale = float(expected.std()) + 0.05 * abs(float(expected.mean()))
        assert abs(float(statistic(actual)) - float(statistic(expected))) < 0.06 * scale + 0.02


def joined(tensor: torch.Tensor, layout: VirtualLayout) -> torch.Tensor:
    whole = tensor if type(tensor) is torch.Tensor else layout.join(tensor, (I,) * len(layout.mesh.names))
    return whole.detach()


def trained(model: nn.Module, x: torch.Tensor, options: dict[str, Any], num_ranks: int) -> dict[str, torch.Tensor]:
    """Loss and gradients of a step on virtual ranks."""
    with keep_float64():
        plan = make_plan(model, slow_devices(num_ranks), example_inputs={"x": x}, **options)
        with virtual_ranks(plan.mesh) as layout:
            whole = copy.deepcopy(model)
            stages = plan.step.axes["pp"] if plan.step is not None else 1
            places = VirtualPlaces(layout, num_stages=stages)
            parallel = parallelise(whole, places, plan=plan, example_inputs={"x": x})
            ops.seed(7)
            loss = joined(parallel.train_step(x=x), layout)
            return {"loss": loss, **parallel.full_gradients()}


def test_every_kind_is_that_of_one_device_on_a_mesh() -> None:
    torch.manual_seed(0)
    model, x = Noisy(*LIKE.values()).double().train(), torch.randn(4, 8).double()
    expected = trained(model, x, {"mesh": {"dp": 1}}, 1)
    actual = trained(model, x, {"mesh": {"dp": 2, "tp": 2}, "constraints": {"input:*": {"dp": "S(0)"}}}, 4)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-9, atol=1e-9)


class Denoiser(nn.Module):
    """A diffusion model's step on masked samples of a variational encoder, in three layers: times, noise, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.times = nn.Embedding(10, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        mean, deviation = self.encode(x).chunk(2, -1)
        z = mean + deviation.exp() * torch.randn_like(mean)
        time = torch.randint(0, 10, (x.shape[0],))
        noise = torch.randn(z.shape, dtype=z.dtype)
        order = torch.rand(x.shape[0], 8, dtype=z.dtype).argsort(-1)
        h = (z + 0.1 * noise).gather(-1, order) + self.times(time)
        for layer in self.layers:
            h = layer(h).tanh() + 0.1 * torch.rand_like(h)
        return {"loss": F.mse_loss(h, noise)}


def on_one_device(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss and gradients with torch's functions replaced by the specification."""
    numbers = itertools.count()

    def word(size: Any, lane: int, draw: int) -> Any:
        return words(tuple(size), lane=lane, draw=draw, step=1, seed=7).astype(np.float64)

    def uniform(size: Any) -> torch.Tensor:
        draw = next(numbers)
        low = np.floor(word(size, 1, draw) / 2**11)
        return torch.from_numpy((word(size, 0, draw) * 2**21 + low) * 2.0**-53)

    def normal(size: Any) -> torch.Tensor:
        draw = next(numbers)
        radius = np.sqrt(-2.0 * np.log((word(size, 0, draw) + 1) / 2**32))
        return torch.from_numpy(radius * np.cos(2.0 * np.pi * word(size, 1, draw) / 2**32))

    def integers(low: int, high: int, size: Any) -> torch.Tensor:
        draw = next(numbers)
        parts = [words(tuple(size), lane=lane, draw=draw, step=1, seed=7) for lane in (0, 1)]
        number = parts[0] + ((parts[1] & np.uint64(2**31 - 1)) << np.uint64(32))
        return torch.from_numpy(low + (number % np.uint64(high - low)).astype(np.int64))

    replaced = {
        "randn_like": lambda x: normal(x.shape),
        "rand_like": lambda x: uniform(x.shape),
        "randn": lambda size, dtype: normal(size),
        "rand": lambda *size, dtype: uniform(size),
        "randint": integers,
    }
    with mock.patch.multiple(torch, **replaced):
        loss = model(x)["loss"]
    loss.backward()
    return {"loss": loss.detach(), **{name: weight.grad for name, weight in model.named_parameters()}}


@pytest.mark.parametrize(
    "fix",
    [
        {"dp": 2, "num_microbatches": 2, "recompute": "full"},
        {"dp": 1, "tp": 2, "zero": 0},
        {"pp": 2, "num_microbatches": 4, "schedule": "1f1b"},
    ],
    ids=str,
)
def test_a_denoiser_draws_what_the_specification_says(fix: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Denoiser().double().train(), torch.randn(8, 8).double()
    actual = trained(model, x, {"fix": fix}, 2)
    for name, tensor in on_one_device(model, x).items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("draws", "says"),
    [
        (lambda x: torch.poisson(x.exp()), "poisson"),
        (lambda x: torch.distributions.Dirichlet(x.exp()).sample(), "dirichlet"),
        (lambda x: torch.randn(8, generator=torch.Generator()), "leave generator= out"),
    ],
)
def test_what_no_plan_can_draw_is_refused(draws: Numbers, says: str) -> None:
    with pytest.raises(CaptureError, match=f"in module ''.*{says}"):
        capture(Noisy(draws), args=(torch.randn(4, 8),))


class Verified(Noisy):
    """A class of its own, whose graph is no other test's."""


def verified(*draws: Numbers) -> bool:
    torch.manual_seed(0)
    return planner.verify(Verified(*draws), "dp=2,tp=2", batch={"x": torch.randn(4, 8)}).ok


def test_verify_draws_on_one_device_what_programs_do() -> None:
    """Torch has no derivative of the one that is left out, and draws for ``rrelu`` inside of an operator."""
    state = ops.get_random_state()
    assert verified(*(draw for name, draw in LIKE.items() if name not in ("bernoulli of a number", "rrelu")))
    assert ops.get_random_state() == state


def test_verify_says_what_it_cannot_compare() -> None:
    with pytest.raises(ValueError, match="Verified draws random numbers in forward that on one device cannot be those"):
        verified(LIKE["rrelu"])


class DrawsTooMuch(nn.Module):
    """Nothing depends on the second of three draws."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.shape = shape

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        y = y + torch.rand_like(y) * y
        torch.rand(self.shape)
        return {"loss": (torch.rand_like(y) * y).square().mean()}


def test_verify_compares_what_draws_more_than_its_program_needs() -> None:
    report = planner.verify(DrawsTooMuch(), "dp=2,tp=2", batch={"x": torch.randn(4, 8)})
    assert report.ok and report.largest_error < 1e-9


def test_verify_says_that_a_program_leaves_draws_out_where_shapes_do_not_tell_which() -> None:
    with pytest.raises(ValueError, match=r"in forward .* program \[\(4, 8\), \(4, 8\)\] \(what"):
        planner.verify(DrawsTooMuch(4, 8), "dp=2,tp=2", batch={"x": torch.randn(4, 8)})


def test_verify_refuses_draws_of_layers_that_run_again() -> None:
    def again(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: y * torch.rand_like(y), x, use_reentrant=False)

    with pytest.raises(ValueError, match="draws random numbers while backward runs"):
        verified(again)


def test_outside_of_training_nothing_is_refused() -> None:
    model = nn.Sequential(nn.LSTM(8, 8, 2, dropout=0.5)).eval()
    assert not any(node.draw is not None for node in capture(model, args=(torch.randn(4, 8),)).nodes)
