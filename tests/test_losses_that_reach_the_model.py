"""Loss functions that reach the model, hold tensors or state of their own, or reach what nobody would train."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from passes.capture import CaptureError
from passes.capture.flat_call import FlatCall
from passes.capture.model_copy import note_original
from tests.ranks import run_on_ranks
from tests.small_models import seeded

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8) % 5
Loss = Callable[[Any, Any], torch.Tensor]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def penalty(model: nn.Module) -> torch.Tensor:
    return sum((parameter.square().sum() for parameter in model.parameters()), torch.zeros(()).double())


def closure(model: nn.Module) -> Loss:
    return lambda outputs, batch: F.cross_entropy(outputs, batch["labels"]) + 0.1 * penalty(model)


class Script:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(outputs, batch["labels"]) + self.model.first.weight.abs().sum()


class Criterion(nn.Module):
    """Has the model as a submodule, class weights as a buffer, and a frozen parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("weights", torch.arange(1.0, 6.0, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(0.5).double(), requires_grad=False)

    def forward(self, outputs: Any, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(outputs, batch["labels"], weight=self.weights)
        return loss + self.scale * self.model.second.weight.square().sum()


def with_model(model: nn.Module, outputs: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, batch["labels"]) + model.second.bias.sum()


LOSSES: dict[str, Callable[[nn.Module], Loss]] = {
    "closure": closure,
    "method": lambda model: Script(model).loss,
    "module": Criterion,
    "partial": lambda model: functools.partial(with_model, model),
}


def errors(kind: str, mesh: str, *, lazy: bool, **options: Any) -> list[str]:
    """Names of what differs from torch after three steps of SGD."""
    model = seeded(Classifier)
    own = copy.deepcopy(model)
    example = {} if lazy else {"example_inputs": {"x": X, "labels": LABELS}}
    parallel = planner.compile(model, mesh, loss_fn=LOSSES[kind](model), **example, **options)
    loss_fn, wrong = LOSSES[kind](own), []
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (parallel, own)]
    for step in range(3):
        expected = loss_fn(own(X), {"labels": LABELS})
        expected.backward()
        if not torch.allclose(parallel.train_step(x=X, labels=LABELS), expected.detach(), rtol=1e-12):
            wrong.append(f"loss {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = parallel.full_state_dict()
    return [*wrong, *(name for name, one in own.state_dict().items() if not torch.allclose(state[name], one))]


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("lazy", [False, True], ids=["example", "first call"])
def test_what_a_loss_computes_with_the_models_weights_trains_them(kind: str, lazy: bool) -> None:
    assert errors(kind, "dp=1", lazy=lazy) == []


def test_so_it_does_under_every_layout() -> None:
    results = run_on_ranks("losses_of_weights_worker", 2, list(LOSSES))
    assert {case: wrong for case, wrong in results.items() if wrong} == {}


OUTSIDE = nn.Parameter(torch.tensor(0.5).double())


class LearnedScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5).double())

    def forward(self, outputs: Any, batch: Any) -> torch.Tensor:
        return (outputs * self.scale).square().mean()


class OfGlobal(Classifier):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * OUTSIDE


class OfList(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [torch.ones(5, dtype=torch.float64, requires_grad=True)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([super().forward(x), self.scales[0].expand(8, 5)]).sum(0)


def of_outputs(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return outputs.square().mean()


@pytest.mark.parametrize(
    ("kind", "loss_fn"),
    [
        (Classifier, lambda outputs, batch: (outputs * OUTSIDE).square().mean()),
        (Classifier, LearnedScale()),
        (OfGlobal, of_outputs),
        (OfList, of_outputs),
    ],
    ids=["closure", "loss module", "global", "list"],
)
def test_what_learns_outside_of_the_model_is_refused(kind: type[nn.Module], loss_fn: Loss) -> None:
    with pytest.raises(CaptureError, match="requires a gradient and is neither a parameter of the model nor an input"):
        planner.compile(seeded(kind), "dp=1", loss_fn=loss_fn, example_inputs=(X,))


def test_a_detached_tensor_from_outside_is_a_constant() -> None:
    model = seeded(Classifier)
    parallel = planner.compile(
        copy.deepcopy(model),
        "dp=1",
        loss_fn=lambda outputs, batch: (outputs * OUTSIDE.detach()).square().mean(),
        example_inputs=(X,),
    )
    torch.testing.assert_close(parallel.train_step(X), (model(X) * 0.5).square().mean().detach())


def test_a_loss_that_reaches_the_parallel_module_is_told_to_reach_the_model() -> None:
    held: list[Any] = []
    parallel = planner.compile(
        seeded(Classifier), "dp=1", loss_fn=lambda outputs, batch: outputs.square().mean() + penalty(held[0])
    )
    held.append(parallel)
    with pytest.raises(CaptureError, match="reaches a parallel module"):
        parallel.train_step(X)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: Any, batch: Any) -> torch.Tensor:
        self.calls += 1
        return outputs.square().mean() * self.calls


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting()

    def forward(self, outputs: Any, batch: Any) -> torch.Tensor:
        return self.inner(outputs, batch)


class Centring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(5).double())

    def forward(self, outputs: Any, batch: Any) -> torch.Tensor:
        loss = (outputs - self.centre).square().mean()
        self.centre = (0.9 * self.centre + 0.1 * outputs.mean(0)).detach()
        return loss


def called(module: Any) -> Loss:
    return lambda outputs, batch: module(outputs, batch)


@pytest.mark.parametrize(
    ("loss_fn", "state"),
    [
        (Counting(), "'loss_fn.calls'"),
        (called(Counting()), "'module.calls'"),
        (Outer(), "'loss_fn.inner.calls'"),
        (Centring(), "loss_fn.*centre"),
    ],
    ids=["number", "closure", "inside", "buffer"],
)
def test_a_loss_module_whose_next_call_computes_something_else_is_refused(loss_fn: Any, state: str) -> None:
    with pytest.raises(CaptureError, match=f"{state}.*computes something else at the next call"):
        planner.compile(seeded(Classifier), "dp=1", loss_fn=loss_fn, example_inputs=(X,))


def test_a_call_knows_the_tensors_of_the_model_itself_only_while_they_live() -> None:
    """Another tensor may have the address of one that was freed."""
    model = Classifier()
    copied = copy.deepcopy(model)
    note_original(copied, model)
    call = FlatCall(copied, (X,), {}, None)
    own, names = [*model.parameters()], {name for name, _ in model.named_parameters()}
    assert {call.originals[parameter] for parameter in own} == names and len(call.originals) == 2 * len(names)
    del model, own
    assert {id(tensor) for tensor in call.originals} == {id(parameter) for parameter in copied.parameters()}
