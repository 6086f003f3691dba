"""Programs run with their device as torch's default only if they make tensors on it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import planner
from planner.library import build_model, load_config, random_batch
from runtime.execution.chunk import ProgramRunner
from runtime.programs.tensor_makers import makes_tensors
from runtime.torch_compat.dispatcher import tensor_constructors

pytestmark = pytest.mark.usefixtures("models_traced_once")


@pytest.mark.parametrize(
    ("body", "makes"),
    [
        ("torch.ones(3)", True),
        ("x + torch.tensor([1.0])", True),
        ("torch.full((2,), fill_value=torch.arange(2).sum())", True),
        ("ops.rand((8, 1), dtype=torch.float32, draw=0, of=self)", True),
        ("ops.rand_like(x)", False),
        ("torch.ones(3, device=x.device)", False),
        ("x.new_zeros(3)", False),
        ("torch.where(x > 0, x, 1.0)", False),
        ("F.linear(x, w.ones)", False),
    ],
)
def test_calls_that_make_tensors_are_found(body: str, makes: bool) -> None:
    assert makes_tensors(f"class A(Block):\n    def forward(self, x):\n        return {body}\n") is makes


def test_constants_are_made_by_themselves() -> None:
    source = "class Program(Block):\n    def constants(self):\n        return (torch.ones(3),)\n"
    assert not makes_tensors(source)


class Noting(TorchFunctionMode):
    """Notes what is called that makes tensors on the default device."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in tensor_constructors() and (kwargs or {}).get("device") is None:
            self.calls.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * torch.rand(8, 1) + torch.linspace(0.0, 1.0, 8)).square().mean()


class SecondStep(NamedTuple):
    """Of a step whose constants are there: what programs are said to do, and what they call."""

    said_to_make: set[bool]
    constructor_calls: list[str]


def second_step(parallel: nn.Module, batch: dict[str, torch.Tensor], patch: pytest.MonkeyPatch) -> SecondStep:
    parallel.train_step(**batch)
    step = SecondStep(set(), [])
    run = ProgramRunner.__call__

    def noted(runner: ProgramRunner, *arguments: Any) -> Any:
        step.said_to_make.add(runner._makes_tensors)
        with Noting(step.constructor_calls):
            return run(runner, *arguments)

    patch.setattr(ProgramRunner, "__call__", noted)
    parallel.train_step(**batch)
    return step


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "whisper", "bloom"])
def test_programs_of_models_make_nothing_but_constants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(f"tiny-{name}")
    batch = random_batch(config, batch_size=2, seq_len=8)
    parallel = planner.compile(build_model(config, device="cpu").eval(), example_inputs=batch)
    assert second_step(parallel, batch, monkeypatch) == ({False}, [])


def test_a_program_that_draws_makes_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"x": torch.randn(8, 8)}
    step = second_step(planner.compile(Noisy(), example_inputs=batch), batch, monkeypatch)
    assert step.said_to_make == {True} and "empty" in step.constructor_calls
