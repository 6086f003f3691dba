"""What was traced does not outlive what it was traced from: arguments, attributes, counters; programs are bounded."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from passes.capture import CaptureError, capture
from tests.capture_parity import assert_parity
from tests.ranks import run_on_ranks
from tests.stale_programs_worker import SCENARIOS, TARGETS

NAMES = [scenario.__name__ for scenario in SCENARIOS]
X = torch.ones(2, 4)


@functools.cache
def results() -> dict[str, bool]:
    return run_on_ranks("stale_programs_worker", 2, list(TARGETS))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scenario", NAMES)
def test_scenario(scenario: str, target: str) -> None:
    assert results()[f"{scenario} {target}"]


class Counting(nn.Module):
    """Counts its calls; ``draws`` says by what else it multiplies."""

    def __init__(self, *, uses_count: bool = False, draws: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0
        self.uses_count = uses_count
        self.draws = draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        factor = self.calls if self.uses_count else 1
        if self.draws:
            factor *= random.random() if self.draws == "random" else np.random.rand()
        return (self.linear(x) * factor).sum()


def test_a_count_that_the_next_call_computes_with_is_refused() -> None:
    model = Counting(uses_count=True)
    with pytest.raises(CaptureError, match=r"changes 'calls' of module '' \(0 → 1\) and computes something else"):
        capture(model, args=(X,))
    assert model.calls == 0


def test_a_count_that_nothing_depends_on_is_announced() -> None:
    with pytest.warns(UserWarning, match="changes 'calls'"):
        capture(Counting(), args=(X,))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("draws", ["random", "numpy"])
def test_numbers_drawn_outside_of_torch_are_refused(draws: str) -> None:
    with pytest.raises(CaptureError, match="would be drawn once"):
        capture(Counting(draws=draws), args=(X,))


class DropsLayers(nn.Module):
    """Leaves out its layer at random in training, by what a configuration and an attribute say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.config = SimpleNamespace(encoder_layerdrop=0.25, decoder_layerdrop=0.0)
        self.layerdrop = self.config.encoder_layerdrop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x if torch.rand([]) < self.layerdrop else self.layer(x)).sum()


def test_what_leaves_out_layers_at_random_is_named() -> None:
    model = DropsLayers()
    named = r"set model\.layerdrop \(now 0\.25\), model\.config\.encoder_layerdrop \(now 0\.25\) to 0 before"
    with pytest.raises(CaptureError, match=named):
        capture(model, args=(X,))
    model.layerdrop = 0.0
    assert not capture(model, args=(X,)).guards


#: Whether a layer is left out, by a number from [0, 1) → whether that depends on the number.
SKIPS: dict[str, tuple[Callable[[], Any], bool]] = {
    "below zero": (lambda: random.random() < 0.0, False),
    "at least zero": (lambda: random.uniform(0, 1) >= 0, False),
    "below one": (lambda: random.random() < 1.0, False),
    "one is above": (lambda: 1.0 > random.uniform(0.0, 1.0), False),  # noqa: SIM300
    "below a tenth": (lambda: random.random() < 0.1, True),
    "of another range": (lambda: random.uniform(0, 2) < 0.0, True),
    "twice": (lambda: 2 * random.random() < 0.0, True),
    "as a number": (lambda: float(random.random()) < 0.0, True),
    "of a tensor": (lambda: torch.ones(()) * random.random(), True),
    "chosen": (lambda: random.choice([True, False]), True),
}


class Skipping(nn.Module):
    def __init__(self, skips: Callable[[], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.skips = skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x if self.skips() is True else self.linear(x)).sum()


@pytest.mark.parametrize("name", SKIPS)
def test_numbers_that_decide_nothing_may_be_drawn(name: str) -> None:
    skips, depends = SKIPS[name]
    model, state, functions = Skipping(skips), random.getstate(), (random.random, random.uniform)
    with pytest.raises(CaptureError, match="would be drawn once") if depends else contextlib.nullcontext():
        graph = capture(model, args=(X,))
        assert ("aten.linear.default" in [node.op for node in graph.nodes]) is (skips() is False)
    assert (random.random, random.uniform) == functions
    random.setstate(state)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * 0.5


def test_models_are_captured_in_threads_beside_other_work() -> None:
    """Each thread its own model, and custom functions of a thread that captures nothing stay as they are."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Halved.apply(self.linear(x)).square().sum()

    errors: list[BaseException] = []
    stop = threading.Event()

    def beside() -> None:
        while not stop.is_set():
            x = torch.ones(3, requires_grad=True)
            y = Halved.apply(x)
            if type(y.grad_fn).__name__ != "HalvedBackward":
                errors.append(AssertionError(type(y.grad_fn).__name__))

    def captures() -> None:
        try:
            for _ in range(2):
                assert_parity(Half(), args=(X.double(),))
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=beside)
    threads = [threading.Thread(target=captures) for _ in range(3)]
    other.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    other.join()
    assert not errors
