"""Functions whose backward runs layers once more and differentiates: reentrant checkpoints, reversible layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import planner
from passes.capture import capture, recomputed_functions
from passes.ir.errors import CaptureError

Layer = Callable[[nn.Module, torch.Tensor], torch.Tensor]
X = torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Checkpoint(torch.autograd.Function):
    """As libraries write it: forward without gradients, backward runs the layer again, from the same random numbers."""

    @staticmethod
    def forward(ctx: Any, layer: Any, draws_anew: bool, *args: torch.Tensor) -> Any:
        ctx.layer, ctx.state = layer, None if draws_anew else torch.get_rng_state()
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return layer(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        now = torch.get_rng_state()
        if ctx.state is not None:
            torch.set_rng_state(ctx.state)
        args = [arg.detach().requires_grad_(arg.requires_grad) for arg in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.layer(*args)
        torch.set_rng_state(now)
        torch.autograd.backward(outputs, gradients)
        return None, None, *(arg.grad for arg in args)


class Kept(torch.autograd.Function):
    """Keeps the graph of a detached argument and asks ``torch.autograd.grad`` for its gradient; weights have none."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = function(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, torch.autograd.grad(ctx.y, ctx.x, gradient)[0]


class Net(nn.Module):
    def __init__(self, call: Layer, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8)) for _ in range(2)
        )
        self.call = call

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + self.call(layer, hidden)
        return {"loss": hidden.square().mean()}


class Reversible(nn.Module):
    """Two streams: ``y1 = x1 + f(x2)``, ``y2 = x2 + g(y1)``; backward computes the inputs from the outputs."""

    def __init__(self, dropout: float, factor: float) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 8))
        self.g = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.factor = factor

    def forward(self, x1: torch.Tensor, x2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            self.seed = torch.seed()
            y1 = x1 + self.f(x2)
            return y1, x2 + self.g(y1)

    def reverse(self, y1: Any, y2: Any, grad1: Any, grad2: Any) -> Any:
        with torch.enable_grad():
            y1.requires_grad = True
            g = self.g(y1)
            g.backward(grad2, retain_graph=True)
        x2, grad1 = (y2 - g).detach(), grad1 + self.factor * y1.grad
        y1.grad = None
        with torch.enable_grad():
            x2.requires_grad = True
            torch.manual_seed(self.seed)
            f = self.f(x2)
            f.backward(grad1, retain_graph=True)
        grad2 = grad2 + x2.grad
        return (y1 - f).detach(), x2.detach(), grad1, grad2


class ReversibleStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: Any) -> torch.Tensor:
        x1, x2 = x.chunk(2, -1)
        for layer in layers:
            x1, x2 = layer(x1, x2)
        ctx.save_for_backward(x1.detach(), x2.detach())
        ctx.layers = layers
        return torch.cat([x1, x2], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        state = (*ctx.saved_tensors, *gradient.chunk(2, -1))
        for layer in ctx.layers[::-1]:
            state = layer.reverse(*state)
        return torch.cat(state[2:], -1), None


class ReversibleNet(nn.Module):
    def __init__(self, dropout: float = 0.0, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Reversible(dropout, factor) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(x)
        return {"loss": ReversibleStack.apply(torch.cat([hidden, hidden], -1), self.layers).square().mean()}


def by_torch(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, hidden, use_reentrant=True)  # type: ignore[no-any-return]


def by_hand(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return Checkpoint.apply(layer, False, hidden)  # type: ignore[no-any-return, no-untyped-call]


def drawn_anew(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return Checkpoint.apply(layer, True, hidden)  # type: ignore[no-any-return, no-untyped-call]


def _operators(model: nn.Module) -> list[str]:
    return [node.op for node in capture(model.double(), kwargs={"x": X}).nodes]


def _refusal(model: nn.Module) -> str:
    with pytest.raises(CaptureError) as error:
        capture(model.double(), kwargs={"x": X})
    return str(error.value)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2"])
@pytest.mark.parametrize("build", [lambda: Net(by_torch), lambda: Net(by_hand), ReversibleNet])
def test_sharded_training_is_as_on_one_device(build: Callable[[], nn.Module], mesh: str) -> None:
    report = planner.verify(build().double(), mesh, batch={"x": X})
    assert report.ok, report.table()


@pytest.mark.parametrize("call", [by_torch, by_hand])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_graph_is_that_of_the_layers_alone(call: Layer, dropout: float) -> None:
    assert _operators(Net(call, dropout)) == _operators(Net(lambda layer, hidden: layer(hidden), dropout))
    assert capture(Net(call).double(), kwargs={"x": X}).checkpointed


def test_tracing_leaves_the_random_numbers_of_its_caller_alone() -> None:
    model = ReversibleNet(dropout=0.1)
    before = torch.get_rng_state()
    assert "aten.dropout.default" in _operators(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_halves_in_the_wrong_order_are_as_good_where_they_are_the_same() -> None:
    class Swapped(ReversibleStack):
        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return ReversibleStack.backward(ctx, gradient)[0].roll(8, -1), None

    class Model(ReversibleNet):
        joined = staticmethod(lambda hidden: torch.cat([hidden, hidden], -1))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = self.joined(self.embed(x))
            return {"loss": Swapped.apply(hidden, self.layers).square().mean()}  # type: ignore[no-untyped-call]

    report = planner.verify(Model().double(), "dp=2", batch={"x": X}, constraints={"input:*": {"dp": "S(0)"}})
    assert report.ok, report.table()
    unlike = Model()
    unlike.joined = lambda hidden: torch.cat([hidden, 2 * hidden], -1)  # type: ignore[method-assign, assignment]
    assert "the gradient of argument 0 differs" in _refusal(unlike)


def test_a_region_without_gradients_inside_of_the_layer_stays_one() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = x.abs().mean()
            return super().forward(x) / scale

    class Model(Net):
        def __init__(self) -> None:
            super().__init__(by_hand)
            self.layers = nn.ModuleList([Scaled(8, 8)])

    report = planner.verify(Model().double(), "dp=2", batch={"x": X}, constraints={"input:*": {"dp": "S(0)"}})
    assert report.ok, report.table()


def test_a_detached_argument_whose_gradient_backward_returns_keeps_it() -> None:
    model = Net(lambda layer, hidden: layer(Kept.apply(torch.sin, hidden)))  # type: ignore[no-untyped-call]
    report = planner.verify(model.double(), "dp=2", batch={"x": X})
    assert report.ok, report.table()


def test_other_gradients_than_those_of_forward_are_refused_with_the_line() -> None:
    message = _refusal(Net(drawn_anew, dropout=0.1))
    assert "the gradient of argument 2 differs" in message and "test_recomputed_functions.py" in message
    assert "gives other gradients" in _refusal(ReversibleNet(factor=1.001))
    without_weights = Net(lambda layer, hidden: Kept.apply(layer, hidden))  # type: ignore[no-untyped-call]
    assert "gives other gradients" in _refusal(without_weights)


def test_a_layer_that_reaches_another_activation_is_refused() -> None:
    message = _refusal(Net(lambda layer, hidden: by_hand(lambda x: layer(x) * hidden, hidden)))  # type: ignore[arg-type]
    assert "is no argument of its call" in message


def test_a_call_too_large_for_a_trial_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputed_functions, "_MAX_WORK", 10)
    assert "too large to compare its gradients" in _refusal(Net(by_hand))
    assert _operators(Net(by_torch))
