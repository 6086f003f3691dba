"""The table of all library models' kernels goes on where it stopped, and names what is at fault."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compiled_library
from benchmarks.compiled_library import DEVICES, Results, compile_models
from runtime.kernels.language import has_triton

pytestmark = pytest.mark.skipif(not has_triton(), reason="Triton is not installed here")


def entry(kernel: str, *, spilled: int = 0, error: str = "") -> dict[str, Any]:
    return {"kernel": kernel, "code": kernel, "warps": 4, "registers": 64, "shared": 2048,
            "spilled": spilled, "error": error}  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Of two models that share a call, and one that could not be captured."""
    results = Results(tmp_path / "state.json")
    results.calls = {
        "norm(x) ": {device: [entry("norm_kernel")] for device in DEVICES},
        "loss(y) ": {device: [entry("loss_kernel", spilled=8 * (device == "sm_90"))] for device in DEVICES},
    }
    figures = {"chains": 1, "for torch.compile": 0}
    results.models = {
        "first": {**figures, "calls": ["norm(x) "]},
        "second": {**figures, "calls": ["norm(x) ", "loss(y) "]},
        "third": {"error": "ValueError: no"},
    }
    return results


def test_a_spill_is_a_fault_of_the_models_that_launch_it(results: Results) -> None:
    assert results.faults(["first"]) == []
    assert results.faults(["first", "second"]) == ["loss_kernel of loss on sm_90: 8 bytes spilled; first in second"]


def test_the_page_tells_the_most_of_each_kernel_and_what_lacks(results: Results) -> None:
    page = compiled_library.page(["first", "second", "third", "fourth"], results)
    assert "2 of 4 models, 2 different calls" in page and "1 with a fault" in page
    assert "| norm_kernel | 2 | 3 | 64 · 2.0 · 0 | 64 · 2.0 · 0 | 64 · 2.0 · 0 |" in page
    assert "| loss_kernel | 1 | 3 | 64 · 2.0 · 0 | 64 · 2.0 · 8 | 64 · 2.0 · 0 |" in page
    assert "| fourth | not compiled yet | | | |" in page and "* third: ValueError: no" in page


def test_a_run_goes_on_where_the_last_one_stopped(results: Results) -> None:
    results.save()
    again = Results(results.path)
    assert (again.models, again.calls) == (results.models, results.calls)
    assert compile_models(["first", "second"], again, deadline=0.0)
    assert not compile_models(["fourth"], again, deadline=time.monotonic() - 1)


def test_a_model_of_fewer_layers_has_shorter_lists_of_them() -> None:
    from benchmarks.library_launches import _shortened

    config = {"num_hidden_layers": 12, "layer_types": ["a"] * 12, "sizes": [1, 2], "text": {"n_layer": 2}}
    short = {"num_hidden_layers": 8, "layer_types": ["a"] * 8, "sizes": [1, 2], "text": {"n_layer": 2}}
    assert _shortened(config) == short
