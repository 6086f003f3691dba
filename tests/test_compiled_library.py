"""The table of all library models' kernels goes on where it stopped, and names what is at fault."""

from __future__ import annotations

import time
from pathlib import Path
from unittest import mock

import pytest

from runtime.kernels.language import has_triton

if not has_triton():
    pytest.skip("Triton is not installed here", allow_module_level=True)

from benchmarks import compiled_library, compiled_state
from benchmarks.compiled_gpu import Compiled
from benchmarks.compiled_library import DEVICES, STATE, compile_models
from benchmarks.compiled_state import ModelEntry, Results


def forms(kernel: str, *, spilled_on_hopper: int = 0) -> list[Compiled]:
    return [
        Compiled(kernel, f"{kernel}-{device}", device, 4, 64, 2048, spilled_on_hopper * (device == "sm_90"))
        for device in DEVICES
    ]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Of two models that share a call, and one that could not be captured."""
    results = Results(tmp_path / "state.json")
    calls = {"norm #1": forms("norm_kernel"), "loss #2": forms("loss_kernel", spilled_on_hopper=8)}
    results.forms = {form.code: form for some in calls.values() for form in some}
    results.calls = {call: [form.code for form in some] for call, some in calls.items()}
    results.models = {
        "first": ModelEntry(1, 0, ("norm #1",)),
        "second": ModelEntry(1, 0, ("norm #1", "loss #2")),
        "third": ModelEntry(error="ValueError: no"),
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
    assert (again.models, again.calls, again.forms) == (results.models, results.calls, results.forms)
    assert compile_models(["first", "second"], again, deadline=0.0)
    assert not compile_models(["fourth"], again, deadline=time.monotonic() - 1)
    with mock.patch.object(compiled_state.triton, "__version__", "0.0.0"):
        assert not Results(results.path).models


def test_the_results_that_are_kept_have_no_fault_and_are_small() -> None:
    results = Results(STATE)
    assert STATE.stat().st_size < 1_000_000
    assert results.faults(list(results.models)) == []


def test_a_model_of_fewer_layers_has_shorter_lists_of_them() -> None:
    from benchmarks.library_launches import _num_layers, _shortened

    config = {"num_hidden_layers": 12, "layer_types": ["a"] * 12, "sizes": [1, 2], "text": {"n_layer": 2}}
    short = {"num_hidden_layers": 8, "layer_types": ["a"] * 8, "sizes": [1, 2], "text": {"n_layer": 2}}
    assert _shortened(config, _num_layers(config)) == short
    assert _num_layers({"num_hidden_layers": 12, "text": {"n_layer": 12}}) == 2
