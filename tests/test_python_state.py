"""A program computes what one call of the model did: what a call leaves in Python for the next one is refused."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import planner
from passes.capture import CaptureError, capture
from passes.capture.capture import trace_shapes
from passes.capture.state_holders import state_holders
from runtime.calls import surroundings
from tests import python_state_models as models
from tests.python_state_models import CACHED, READ_BY_THE_NEXT_CALL, Holding

X = torch.arange(8.0).reshape(2, 4) / 8


@pytest.mark.parametrize("compute", READ_BY_THE_NEXT_CALL, ids=lambda compute: compute.__name__)
def test_what_the_next_call_reads_is_refused(compute: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"forward changes .* of module '' \(.*next call"):
        capture(Holding(compute, **READ_BY_THE_NEXT_CALL[compute]()), args=(X,))
    assert (models.CALLS, Holding.calls_of_class) == (0, 0)


@pytest.mark.parametrize("compute", CACHED, ids=lambda compute: compute.__name__)
def test_what_every_call_would_compute_alike_is_no_change(compute: Callable[..., torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = capture(Holding(compute, **CACHED[compute]()), args=(X,))
    assert graph.parameters


def test_what_nothing_reads_is_announced() -> None:
    model = Holding(models.remembers, held=[])
    with pytest.warns(UserWarning, match="changes 'held'.*does not change it any more"):
        capture(model, args=(X,))
    assert model.held == []


@pytest.mark.filterwarnings("ignore")
def test_objects_that_a_user_holds_are_what_they_were() -> None:
    shared = SimpleNamespace(calls=0, seen=[], last={"output": None})

    def compute(model: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model.linear(x)
        shared.calls += 1
        shared.seen.append(out)
        shared.last["output"] = out
        shared.new = out
        return out

    capture(Holding(compute), args=(X,))
    assert vars(shared) == {"calls": 0, "seen": [], "last": {"output": None}}


def test_state_of_a_loss_function_is_refused() -> None:
    calls = 0

    def loss(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return outputs * calls

    with pytest.raises(CaptureError, match=r"forward changes 'calls' of module '' \(0 → 1\)"):
        capture(Holding(lambda model, x: model.linear(x)), args=(X,), loss_fn=loss)
    assert calls == 0


def test_a_replaced_buffer_is_written() -> None:
    model = Holding(models.running_mean, buffer=torch.zeros(4)).double()
    reference = copy.deepcopy(model)
    x = X.double()
    parallel = planner.compile(model, "dp=1", example_inputs={"x": x})
    for _ in range(3):
        torch.testing.assert_close(parallel(x=x), reference(x), rtol=1e-12, atol=0)
    torch.testing.assert_close(parallel.full_state_dict()["buffer"], reference.buffer, rtol=1e-12, atol=0)


def test_open_sizes_are_left_to_one_trace_for_each_shape() -> None:
    with pytest.raises(CaptureError, match="traced for each shape"):
        trace_shapes(Holding(models.remembers, held=[]), {("x",): [0]}, args=(), kwargs={"x": X}, loss_fn=None)


@pytest.mark.parametrize(("packed", "is_watched"), [("scaled_by-1.0.dist-info", False), ("notes", True)])
def test_variables_of_packages_that_pip_put_elsewhere_are_not_watched(
    packed: str, is_watched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an environment with the system's packages: torch counts in variables of its own, on each rank apart."""
    (tmp_path / packed).mkdir()
    (tmp_path / "scaled_by.py").write_text(SCALED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "scaled_by", raising=False)
    for function in (surroundings._installed, surroundings._is_installed):
        function.cache_clear()
    package = importlib.import_module("scaled_by")
    around = surroundings.Surroundings(package.Scaled())
    package.SCALE = 3.0
    around.update()
    assert bool(around.changed) == is_watched
    for function in (surroundings._installed, surroundings._is_installed):
        function.cache_clear()


SCALED = """
import torch

SCALE = 2.0


class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * SCALE
"""


def test_a_trainers_plans_and_programs_are_no_state_of_its_loss() -> None:
    """However many a training has made: what a loss leaves is looked for in what it reaches before and after a call."""
    parallel = planner.compile(
        torch.nn.Linear(4, 4), "dp=1", example_inputs=(X,), loss_fn=lambda outputs, _: outputs.sum()
    )
    trainer = SimpleNamespace(model=parallel, calls=[])
    parallel.train_step(X)
    before = state_holders(torch.nn.Linear(4, 4), lambda outputs, _: trainer.calls).values()
    parallel.train_step(X[:1].repeat(6, 1))
    after = state_holders(torch.nn.Linear(4, 4), lambda outputs, _: trainer.calls).values()
    assert any(holder.thing is trainer.calls for holder in after)
    assert len(after) == len(before) < 200
