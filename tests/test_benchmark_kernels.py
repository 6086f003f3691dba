"""The benchmark of fused operators runs as a whole on a machine without a GPU, and its arithmetic is right."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import kernels as benchmark
from benchmarks.kernels_cases import BACKWARD, BOTH, FORWARD, LLAMA_8B, OPERATORS, TINY, Case
from benchmarks.kernels_contestants import COMPILED, EAGER, LIGER, OURS, contestants
from benchmarks.kernels_measure import Row, ratio_to_best
from benchmarks.kernels_prediction import Prediction, fitted_curves, node_of, predicted
from benchmarks.kernels_report import Results
from cost_models import Cluster, CostModel
from passes.rules import rule_for

BY_NAME = {operator.name: operator for operator in OPERATORS}
ROW = Row("rms_norm", "norms", LLAMA_8B.name, "bf16", FORWARD, OURS, 1.0, 1.0, 1.0, num_bytes=90)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    torch.set_num_threads(threads)


def results_of(*rows: Row) -> Results:
    cluster = Cluster.parse("dgx-h200:1")
    return Results({}, True, 100.0, cluster, cases=[(Case(BY_NAME["rms_norm"], LLAMA_8B, "bf16"), list(rows))])


def test_two_operators_run_on_a_processor_and_are_written(tmp_path: Path) -> None:
    status = benchmark.main(["--only", "rms_norm", "--only", "swiglu", "--output", str(tmp_path)])
    written = json.loads((tmp_path / "kernels.json").read_text())
    rows = [Row(**row) for row in written["rows"]]
    assert status == 0
    assert {row.operator for row in rows} == {"rms_norm", "swiglu"}
    assert {row.what for row in rows} == {FORWARD, BACKWARD, BOTH}
    ran = [row for row in rows if row.contestant in (EAGER, COMPILED, OURS)]
    assert all(row.seconds and row.seconds > 0 and row.num_bytes for row in ran)
    assert all(row.error is not None and row.error < (2e-2 if row.dtype == "bf16" else 1e-5) for row in ran)
    assert all(row.note for row in rows if row.contestant == LIGER and row.seconds is None)
    assert len(written["predictions"]) == 2 * 2 * 2
    assert "not comparable" in (tmp_path / "kernels.md").read_text()


def test_nothing_is_written_by_default_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    assert benchmark.main(["--only", "rms_norm", "--minutes", "0"]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", BY_NAME)
def test_every_operator_is_known_to_the_planner(name: str) -> None:
    case = Case(BY_NAME[name], LLAMA_8B, "bf16")
    node, values = node_of(case)
    assert rule_for(node, values) is not None
    passes = predicted(case, CostModel(Cluster.parse("dgx-h200:1"), {"dp": 8}))
    assert all(seconds > 0 for seconds, _ in passes.values())


@pytest.mark.parametrize("name", BY_NAME)
def test_outputs_are_as_the_planner_has_them(name: str) -> None:
    case = Case(BY_NAME[name], TINY, "fp32")
    eager = contestants(name, backend="eager")[0].function
    assert eager is not None
    results = eager(*case.tensors(torch.device("cpu")).values())
    outputs = results if isinstance(results, tuple) else (results,)
    planned = node_of(case)[0].outputs
    assert len(outputs) == len(planned)
    if "cross_entropy" not in name:  # the planner has a loss of each token, families its mean
        assert [tuple(output.shape) for output in outputs] == [value.shape for value in planned]


def test_bytes_moved_count_each_tensor_once() -> None:
    case = Case(BY_NAME["swiglu"], TINY, "bf16")
    inputs = case.tensors(torch.device("cpu"))
    whole = TINY.batch * TINY.length * TINY.intermediate * 2
    assert case.bytes_moved(inputs, [inputs["gate"]]) == {FORWARD: 3 * whole, BACKWARD: 5 * whole, BOTH: 8 * whole}


def test_the_faster_rival_counts_and_only_where_passes_compare() -> None:
    rivals = [
        replace(ROW, contestant=COMPILED, seconds=1.5),
        replace(ROW, contestant=LIGER, seconds=1.2),
        replace(ROW, contestant=EAGER, seconds=0.1),
    ]
    assert ratio_to_best([ROW, *rivals], ROW, others=(COMPILED, LIGER)) == pytest.approx(1.2)
    apart = [rivals[0], replace(rivals[1], comparable=False)]
    assert ratio_to_best([ROW, *apart], ROW, others=(COMPILED, LIGER)) == pytest.approx(1.5)
    assert ratio_to_best([ROW], ROW, others=(COMPILED, LIGER)) is None


@pytest.mark.parametrize(("seconds", "holds"), [(1.0, True), (1.1, False)])
def test_the_bandwidth_goal(seconds: float, holds: bool) -> None:
    verdict = results_of(replace(ROW, seconds=seconds)).verdicts()[0]
    assert verdict.holds is holds
    assert ("rms_norm" in verdict.details) is not holds


def test_a_failure_of_ours_fails_the_goals() -> None:
    failed = replace(ROW, what=BACKWARD, seconds=None, note="failed")
    bandwidth, ratio, *_ = results_of(ROW, replace(ROW, contestant=COMPILED, seconds=2.0), failed).verdicts()
    assert bandwidth.holds is False and ratio.holds is False


def test_what_was_not_measured_does_not_hold() -> None:
    results = results_of()
    assert [verdict.holds for verdict in results.verdicts()] == [None] * 5
    assert not benchmark.succeeded(results)


def test_curves_that_are_fitted_give_back_what_was_measured() -> None:
    bandwidth, shares = 4e12, {1e6: 0.3, 1e8: 0.7, 1e9: 0.9}
    measured = [
        Prediction("", FORWARD, "norm", 1.0, size / bandwidth / share, traffic=size) for size, share in shares.items()
    ]
    curve = fitted_curves(measured, bandwidth)["norm"]
    assert {size: curve(size) for size in shares} == pytest.approx(shares, abs=2e-3)


def test_curves_are_legal_whatever_was_measured() -> None:
    measured = [
        Prediction("", FORWARD, "norm", 1.0, seconds, traffic=size)
        for size, seconds in [(1e6, 1e-9), (1.05e6, 1e-3), (2e6, 1.0), (3e6, 1e-6), (1e9, 1e-4)]
    ]
    curve = fitted_curves(measured, 4e12)["norm"]  # whose constructor checks it
    assert curve(1e9) == 1.0
