"""Capturing a model touches nothing that its user holds: before, while and after its forward is traced."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from passes.capture import CaptureError, capture
from runtime.calls.skeleton import skeleton


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Net(nn.Module):
    """Keeps modules in a list, behind a closure and behind an object; counts its calls; ``during`` looks on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(8))
        self.head = nn.Linear(4, 4)
        self.heads = [self.head]
        self.again = lambda x: self.head(x)
        self.history: list[int] = []
        self.during: Callable[[], Any] | None = None
        self.register_buffer("scale", torch.ones(4))
        self.head.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        self.history.append(1)
        if self.during is not None:
            self.during()
        return self.again(self.heads[0](x)) * self.scale


class Watch:
    """Looks at the model itself, as another thread would: tracing follows no slots."""

    __slots__ = ("model", "seen")

    def __init__(self, model: nn.Module) -> None:
        self.model, self.seen = model, []  # type: ignore[var-annotated]

    def look(self) -> None:
        self.seen.append(contents(self.model))


def contents(model: nn.Module) -> list[Any]:
    """Everything a user can see of a model: classes, attributes, hooks and modes by identity, containers by content."""
    return [
        (id(module), type(module), module.training,
         [(name, id(value), list(map(id, value)) if isinstance(value, (dict, list)) else None,
           list(map(id, value.values())) if isinstance(value, dict) else None)
          for name, value in vars(module).items()])
        for module in model.modules()
    ]  # fmt: skip


@pytest.mark.parametrize("copy_repeats", [False, True])
@pytest.mark.parametrize("training", [None, False])
def test_a_model_is_the_same_while_it_is_traced(copy_repeats: bool, training: bool | None) -> None:
    model = Net()
    watch = Watch(model)
    model.during = watch.look
    before = contents(model)
    graph = capture(model, args=(torch.ones(2, 4),), training=training, copy_repeats=copy_repeats)
    assert watch.seen and all(seen == before for seen in watch.seen) and contents(model) == before
    # What is reached through a list, a closure or an object is the model's, not a constant.
    assert {state.path for state in graph.states} == set(dict(model.named_parameters())) | {"scale"}


def test_a_model_is_the_same_after_a_capture_that_fails() -> None:
    model = Net()

    def fail() -> None:
        raise ZeroDivisionError

    model.during = fail
    before = contents(model)
    with pytest.raises(CaptureError):
        capture(model, args=(torch.ones(2, 4),), training=False)
    assert contents(model) == before


def test_a_loss_may_hold_the_model_in_a_closure() -> None:
    model = nn.Linear(4, 4)
    graph = capture(model, args=(torch.ones(2, 4),), loss_fn=lambda out, batch: out.sum() + model.weight.sum())
    assert {(state.path, state.value.kind) for state in graph.states} == {
        ("weight", "parameter"),
        ("bias", "parameter"),
    }


def test_a_weight_that_the_copy_cannot_hold_is_refused() -> None:
    """It would be a constant, never trained."""
    model = nn.Linear(4, 4)
    hidden = Watch(model)
    with pytest.raises(CaptureError, match=r"'weight' of the model itself"):
        capture(model, args=(torch.ones(2, 4),), loss_fn=lambda out, batch: out.sum() + hidden.model.weight.sum())


class Connection:
    """Leads to the model, ends when it is freed, and is not to be made from a copy; one slot is not set."""

    __slots__ = ("__dict__", "unset", "weight")

    def __init__(self, model: nn.Module, ended: list[str]) -> None:
        self.model, self.ended, self.weight = model, ended, 3.0

    def __copy__(self) -> Connection:
        raise AssertionError("a second one would be opened")

    def __del__(self) -> None:
        self.ended.append("connection")

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return outputs.square().mean() * self.weight + self.model.head.weight.sum()  # type: ignore[operator]


class Ending(nn.Module):
    def __init__(self, ended: list[str]) -> None:
        super().__init__()
        self.head, self.ended = nn.Linear(4, 4), ended

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)  # type: ignore[no-any-return]

    def __del__(self) -> None:
        self.ended.append("model")


def test_nothing_of_the_users_ends_with_the_copies() -> None:
    """A connection would be closed, though its owner still has it."""
    ended: list[str] = []
    model = Ending(ended)
    connection = Connection(model, ended)
    copied = skeleton(model)
    graph = capture(copied, args=(torch.ones(2, 4),), loss_fn=connection.loss)
    assert [state.path for state in graph.states] == ["head.weight", "head.bias"]
    assert type(copied).__name__ == "Ending" and isinstance(copied, Ending)
    del copied, graph
    gc.collect()
    assert not ended
    connection.model = nn.Identity()
    del model
    gc.collect()
    assert ended == ["model"]
