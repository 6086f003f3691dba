"""Calls in every form of Python: by position, by name, both, defaults left out, ``*args`` and ``**kwargs``."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.compilation import planned_inputs
from tests.small_models import seeded

Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def rows(seed: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Shared(nn.Module):
    """One layer for all inputs, each weighted by its place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=torch.float64)

    def sum_of(self, inputs: Any) -> torch.Tensor:
        return sum((self.layer(one).tanh() * (place + 1) for place, one in enumerate(inputs)), torch.zeros(()).double())


class AnyNumber(Shared):
    def forward(self, *images: torch.Tensor, target: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (self.sum_of(images) * scale - target).square().mean()


class Defaults(Shared):
    def forward(
        self, first: torch.Tensor, second: torch.Tensor | None = None, third: torch.Tensor | None = None
    ) -> torch.Tensor:
        minus = 0 if third is None else 3 * third
        return (self.sum_of([first] if second is None else [first, second]) - minus).square().mean()


class ByPlaceOnly(Shared):
    def forward(self, x: torch.Tensor, /, y: torch.Tensor, *, z: torch.Tensor | None = None) -> torch.Tensor:
        return (self.sum_of([x]) - 2 * y + (0 if z is None else z)).square().mean()


class Anything(Shared):
    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return (self.sum_of(args) - kwargs["target"] * kwargs.get("weight", 1)).square().mean()


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    scale: float = 1.0


class ListOfSamples(Shared):
    def forward(self, samples: list[Sample]) -> torch.Tensor:
        losses = [(self.sum_of([one.x]) * one.scale - one.y).square().mean() for one in samples]
        return torch.stack(losses).mean()


CALLS: dict[type[Shared], list[Call]] = {
    AnyNumber: [
        call(rows(0), rows(1), target=rows(2)),
        call(rows(3), target=rows(4), scale=3.0),
        call(rows(5), rows(6), rows(7), target=rows(8)),
    ],
    Defaults: [
        call(rows(0), rows(1)),
        call(rows(2), third=rows(3)),
        call(third=rows(4), first=rows(5)),
        call(rows(6), None, rows(7)),
        call(rows(8), rows(9), rows(10)),
    ],
    ByPlaceOnly: [
        call(rows(0), rows(1)),
        call(rows(2), y=rows(3)),
        call(rows(4), z=rows(5), y=rows(6)),
    ],
    Anything: [call(rows(0), rows(1), target=rows(2)), call(rows(3), weight=rows(4), target=rows(5))],
    ListOfSamples: [
        call([Sample(rows(0), rows(1)), Sample(rows(2), rows(3), scale=2.0)]),
        call(samples=[Sample(rows(4), rows(5))]),
        call([Sample(rows(6), rows(7)), Sample(rows(8), rows(9)), Sample(rows(0), rows(2))]),
    ],
}


def check(model: nn.Module, parallel: planner.ParallelModule, calls: list[Call]) -> None:
    """Every call gives the loss and gradients of ``model``."""
    for args, kwargs in calls:
        model.zero_grad()
        parallel.zero_grad()
        loss = model(*args, **kwargs)
        loss.backward()
        torch.testing.assert_close(parallel.train_step(*args, **kwargs), loss.detach())
        torch.testing.assert_close(parallel(*args, **kwargs).detach(), loss.detach())
        gradients = parallel.full_gradients()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)


@pytest.mark.parametrize("kind", CALLS, ids=lambda kind: kind.__name__)
def test_calls_in_other_forms_than_the_first_one(kind: type[Shared]) -> None:
    for first in range(len(CALLS[kind])):
        model = seeded(kind)
        check(model, planner.compile(copy.deepcopy(model)), [*CALLS[kind][first:], *CALLS[kind][:first]])


@pytest.mark.parametrize("kind", CALLS, ids=lambda kind: kind.__name__)
def test_calls_in_other_forms_than_the_example(kind: type[Shared]) -> None:
    for args, kwargs in CALLS[kind]:
        model = seeded(kind)
        example = planner.CallArguments(*args, **kwargs)
        check(model, planner.compile(copy.deepcopy(model), "dp=1", example_inputs=example), CALLS[kind])


def test_a_plan_of_places_and_names_runs_without_an_example() -> None:
    model = seeded(AnyNumber)
    args, kwargs = CALLS[AnyNumber][0]
    example = planner.CallArguments(*args, **kwargs)
    plan = planner.plan(copy.deepcopy(model), example_inputs=example)
    assert planned_inputs(plan).kwargs.keys() == {"target"} and len(planned_inputs(plan).args) == 2
    check(model, planner.compile(copy.deepcopy(model), plan), CALLS[AnyNumber])
    assert planner.audit(plan, copy.deepcopy(model)).ok


def test_verify_takes_places_and_names() -> None:
    args, kwargs = CALLS[AnyNumber][0]
    assert planner.verify(seeded(AnyNumber), "dp=2", batch=planner.CallArguments(*args, **kwargs), steps=1).ok


class Images(Shared):
    def forward(self, *images: torch.Tensor) -> torch.Tensor:
        return self.sum_of(images)


def loss_of_batch(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return (outputs - batch["target"]).square().mean() + batch["images"][-1].mean()


def test_a_loss_function_sees_what_args_took_under_its_name() -> None:
    model = seeded(Images)
    parallel = planner.compile(copy.deepcopy(model), loss_fn=loss_of_batch)
    images, target = (rows(0), rows(1)), rows(2)
    expected = loss_of_batch(model(*images), {"images": images, "target": target})
    torch.testing.assert_close(parallel.train_step(*images, target=target), expected.detach())


class OneInput(Shared):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sum_of([x])


def test_a_batch_of_which_the_loss_function_would_not_see_all_is_refused() -> None:
    parallel = planner.compile(seeded(OneInput), loss_fn=loss_of_batch)
    with pytest.raises(ValueError, match=r"2 arguments by position, of which forward names 1.*pass by name"):
        parallel.train_step(rows(0), rows(1), weight=rows(2))


def test_a_tensor_by_itself_is_no_example() -> None:
    with pytest.raises(ValueError, match=r"example_inputs is a Tensor.*\(x,\)"):
        planner.compile(seeded(OneInput), "dp=1", example_inputs=rows(0))


def test_an_argument_given_by_place_and_by_name_is_refused() -> None:
    class Twice(Shared):
        def forward(self, x: torch.Tensor, /, **more: torch.Tensor) -> torch.Tensor:
            return self.sum_of([x, *more.values()]).mean()

    parallel = planner.compile(seeded(Twice), "dp=1")
    with pytest.raises(ValueError, match="'x' is given by position and by name"):
        parallel(rows(0), x=rows(1))
