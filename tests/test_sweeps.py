"""Sweeps: every row is planned once, whoever plans it and however often the sweep is killed."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import planner
from passes.plan import Plan
from planner.graph_cache.graph_store import FOLDER_VARIABLE
from planner.sweeps import row_request, sweep_files
from planner.sweeps.plan_row import plan_row
from planner.sweeps.results_folder import ResultsFolder
from planner.sweeps.row_processes import RowProcesses, WorkerDied
from planner.sweeps.row_request import RowRequest, study_rows
from planner.sweeps.run_sweep import sweep
from planner.sweeps.study_format import read_study
from planner.sweeps.sweep_row import SweepRow
from planner.sweeps.sweep_table import fewest_devices, pareto_front
from tests.patience import PATIENCE
from tests.ranks import ROOT

#: Three rows of one graph; the last has fewer devices than it is planned for.
STUDY: Mapping[str, Any] = {
    "title": "Tiny",
    "models": ["tiny-gpt2"],
    "global_batches": [8],
    "seq_lens": [16],
    "price_per_device_hour": {"dgx-h100": 2.0, "dgx-a100-80g": 1.0},
    "target_tokens_per_second": [1.0, 1e12],
    "layouts": {"today": {"tp": 2, "pp": 1}},
    "grids": [
        {"clusters": ["dgx-h100:1"], "devices": [2], "baselines": ["ddp", "hsdp"]},
        {"clusters": ["dgx-a100-80g:1"], "devices": [16], "layouts": ["searched"]},
    ],
}


class Inline(Executor):
    """Plans in the calling process as soon as a row is submitted, and counts."""

    def __init__(self, function: Callable[[RowRequest], Any] = plan_row) -> None:
        self.function, self.submitted = function, 0

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.submitted += 1
        future.set_result(self.function(*arguments))
        return future


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The results of the study, planned in this process; its graph is kept for all tests here."""
    folder = tmp_path_factory.mktemp("sweep")
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = str(folder / "cache")
    sweep(STUDY, folder / "results", executor=Inline())
    yield folder / "results"
    if before is None:
        del os.environ[FOLDER_VARIABLE]
    else:
        os.environ[FOLDER_VARIABLE] = before


def tables(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "table.csv").read_bytes(), (folder / "table.md").read_bytes()


def results_of(folder: Path) -> dict[str, Any]:
    """Key of each row → what ``plan_row`` returned for it."""
    results = {}
    for request in study_rows(read_study(STUDY)):
        saved_row = json.loads((folder / "rows" / f"{request.key}.json").read_text())
        plan = folder / "plans" / request.plan_file
        results[request.key] = {**saved_row, "plan": plan.read_text() if plan.exists() else None}
    return results


def test_every_combination_is_a_row_with_its_gap_or_its_error(uninterrupted: Path) -> None:
    rows = list(csv.DictReader((uninterrupted / "table.csv").open()))
    assert [(row["cluster"], row["layout"]) for row in rows] == [
        ("dgx-h100:1", "searched"),
        ("dgx-h100:1", "today"),
        ("dgx-a100-80g:1", "searched"),
    ]
    assert rows[2]["error"] == "dgx-a100-80g:1 has 8 devices, fewer than 16"
    for row in rows[:2]:
        plan = Plan.load(uninterrupted / row["plan"])
        assert float(row["step_seconds"]) == plan.step.costs.simulated
        assert float(row["gap"]) == plan.certificate.gap
        for figure, interval in (
            ("step_seconds", plan.step.interval),
            ("memory_bytes", plan.step.memory_interval),
        ):
            assert (float(row[f"{figure}_low"]), float(row[f"{figure}_high"])) == interval
        expected = 2.0 * 2 / 3600 * 1e6 / (8 * 16 / plan.step.costs.simulated)
        assert float(row["cost_per_million_tokens"]) == pytest.approx(expected, rel=1e-12)
    assert Plan.load(uninterrupted / rows[1]["plan"]).step.axes["tp"] == 2
    assert float(rows[0]["ddp_ratio"]) <= 1.0
    assert float(rows[1]["over_searched"]) >= 1.0
    assert rows[0]["hsdp_is"] and not rows[0]["hsdp_seconds"]
    table = (uninterrupted / "table.md").read_text()
    assert "| tiny-gpt2 dgx-h100 8 16 default today | 1,000,000,000,000 | — |" in table


def test_the_page_stands_alone(uninterrupted: Path) -> None:
    page = (uninterrupted / "sweep.html").read_text()
    for title in ("Step time", "Memory", "Gap", "Cost", "Planning time", "Beside experts", "Cost and time"):
        assert title in page
    assert not re.search(r"<script[^>]* src=|<link", page)
    assert "dgx-a100-80g:1 has 8 devices" in page


def test_processes_of_any_executor_plan_the_same(uninterrupted: Path, tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        sweep(STUDY, tmp_path / "pool", executor=pool)
    assert tables(tmp_path / "pool") == tables(uninterrupted)


def test_a_sweep_killed_at_any_write_goes_on_to_the_same_table(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed as it opens, renames or removes its n-th file, for random n, until it comes to its end."""
    monkeypatch.setattr(sweep_files, "sweep_page", lambda *_: "page")  # the slowest part, of which a test is above
    results, draw, kills = results_of(uninterrupted), random.Random(0), 0
    for attempt in range(6):
        folder = tmp_path / f"{attempt}"
        while not _sweeps_to_its_end(folder, results, events=draw.randrange(1, 25)):
            kills += 1
        assert tables(folder) == tables(uninterrupted)
        assert not list(folder.rglob("*.partial"))
    assert kills >= 6


def _sweeps_to_its_end(folder: Path, results: Mapping[str, Any], *, events: int) -> bool:
    """Whether a process came to its end that is killed at its ``events``-th change of the file system."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or status == 0
        return status == 0
    left = [events]

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "os.mkdir") and str(folder) in str(arguments[0]):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(count)
        sweep(STUDY, folder, executor=Inline(lambda request: results[request.key]))
        os._exit(0)
    finally:
        os._exit(1)


def test_the_command_goes_on_after_a_kill(uninterrupted: Path, tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    study.write_text(
        'title = "Tiny"\nmodels = ["tiny-gpt2"]\nglobal_batches = [8]\nseq_lens = [16]\n'
        "price_per_device_hour = { dgx-h100 = 2.0, dgx-a100-80g = 1.0 }\ntarget_tokens_per_second = [1.0, 1e12]\n"
        '[layouts.today]\ntp = 2\npp = 1\n[[grids]]\nclusters = ["dgx-h100:1"]\ndevices = [2]\n'
        'baselines = ["ddp", "hsdp"]\n[[grids]]\nclusters = ["dgx-a100-80g:1"]\ndevices = [16]\n'
        'layouts = ["searched"]\n'
    )
    command = [sys.executable, "-m", "planner", "sweep", str(study), "-o", str(tmp_path / "results"), "--jobs", "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline().startswith("[1/3] tiny-gpt2 on 2 devices of dgx-h100:1")
        first.kill()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "[1/3]" not in done.stdout and "3 rows, 1 without a plan" in done.stdout
    assert tables(tmp_path / "results") == tables(uninterrupted)


def test_only_what_changed_is_planned_again(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = results_of(uninterrupted)
    first = next(iter(results.values()))

    def planned(study: Mapping[str, Any]) -> int:
        executor = Inline(lambda request: results.get(request.key, first))
        sweep(study, tmp_path, executor=executor)
        return executor.submitted

    assert planned(STUDY) == 3
    assert planned({**STUDY, "price_per_device_hour": 3.0, "title": "Others"}) == 0
    assert planned({**STUDY, "layouts": {"today": {"tp": 2, "pp": 1}, "yesterday": {"tp": 1}}}) == 1
    (tmp_path / "plans" / next(iter(study_rows(read_study(STUDY)))).plan_file).write_text("{}")
    assert planned(STUDY) == 1
    monkeypatch.setattr(row_request, "_versions", lambda: {"torch": "3.0"})
    assert planned(STUDY) == 3


def test_a_worker_that_dies_takes_one_row_with_it(uninterrupted: Path) -> None:
    request = study_rows(read_study(STUDY))[2]
    workers = RowProcesses(1)
    try:
        first = workers.submit(plan_row, request)
        while not workers._workers:
            pass
        next(iter(workers._workers)).kill()
        with pytest.raises(WorkerDied, match="ended by SIGKILL"):
            first.result(PATIENCE)
        assert "fewer than 16" in workers.submit(plan_row, request).result(PATIENCE)["record"]["error"]
    finally:
        workers.shutdown()


def test_an_error_that_may_be_the_machines_is_tried_again(uninterrupted: Path, tmp_path: Path) -> None:
    results = results_of(uninterrupted)

    class Flaky(Inline):
        def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
            future: Future[Any] = Future()
            self.submitted += 1
            future.set_exception(MemoryError("no room"))
            return future

    done = sweep(STUDY, tmp_path, executor=Flaky())
    assert {row.error for row in done.rows} == {"MemoryError: no room"}
    again = Inline(lambda request: results[request.key])
    sweep(STUDY, tmp_path, executor=again)
    assert again.submitted == 3
    assert tables(tmp_path) == tables(uninterrupted)


def test_two_sweeps_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with ResultsFolder(tmp_path).locked(), pytest.raises(ValueError, match="another sweep is writing"):
        sweep(STUDY, tmp_path, executor=Inline())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modles": ["tiny-gpt2"]}, "study has an unknown field 'modles', did you mean 'models'?"),
        ({"models": []}, "study.models is an empty list"),
        ({"models": ["tiny-gtp2"]}, "did you mean 'tiny-gpt2'"),
        ({"clusters": ["dgx-h100:x"]}, "dgx-h100"),
        ({"clusters": None}, "needs 'clusters'"),
        ({"devices": [0]}, r"devices\[0\] must be an integer of at least 1, got 0"),
        ({"devices": [2, 2]}, "study.devices has 2 twice"),
        ({"samples_per_device": [2]}, "global_batches and samples_per_device: give one"),
        ({"baselines": ["megatorn"]}, "unknown baseline 'megatorn': expected one of megatron"),
        ({"options": {"fast": {"compield": True}}}, "options.fast has an unknown field 'compield'"),
        ({"options": {"fast": {"compiled": "yes"}}}, "options.fast.compiled must be true or false"),
        ({"options": {"fast": {"fix": {"tpp": 2}}}}, "options.fast: fix: unknown name 'tpp'"),
        ({"layouts": {"today": {"zero": 7}}}, "layouts.today: fix: 'zero' must be one of"),
        ({"layouts": {"today": {}}}, "layouts.today fixes nothing"),
        ({"grids": [{"layouts": ["tomorrow"]}]}, r"grids\[0\].layouts: the study has no layouts 'tomorrow'"),
        ({"price_per_device_hour": -1}, "price_per_device_hour must be a number above 0, got -1"),
        ({"price_per_device_hour": {"dgx-h10": 2}}, "has an unknown cluster 'dgx-h10', did you mean 'dgx-h100'?"),
        ({"price_per_device_hour": {"mine": 2}}, "unknown cluster 'mine': expected a cluster as the study names it"),
    ],
)  # fmt: skip
def test_a_wrong_field_says_what_is_expected(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    study = {"models": ["tiny-gpt2"], "clusters": ["dgx-h100:1"], "global_batches": [8], "seq_lens": [16], **change}
    with pytest.raises(ValueError, match=message):
        planner.sweep({name: value for name, value in study.items() if value is not None}, tmp_path)


def test_the_fewest_devices_and_the_front_of_cost_and_speed() -> None:
    study = read_study({**STUDY, "grids": [{"clusters": ["dgx-h100:1"], "devices": [1, 2, 4, 8]}],
                        "layouts": {"today": {"tp": 1}}, "target_tokens_per_second": [150, 350, 900]})  # fmt: skip
    requests = [request for request in study_rows(study) if request.layout == "searched"]
    speeds = {1: 100.0, 2: 200.0, 4: 360.0, 8: 350.0}
    rows = [
        SweepRow(request, {"record": {"figures": {"tokens_per_second": speeds[request.num_devices]}}})
        for request in requests
    ]
    answers = [(answer.target, answer.row and answer.row.num_devices) for answer in fewest_devices(study, rows)]
    assert answers == [(150, 2), (350, 4), (900, None)]
    # 1 and 2 devices cost the same a token: the faster one is on the front; 8 are slower and dearer than 4.
    assert [row.num_devices for row in rows if id(row) in pareto_front(study, rows)] == [2, 4]


def test_devices_of_unlike_presets_cost_what_their_presets_do() -> None:
    both = "dgx-a100-80g:2+dgx-v100-32g:1"
    grid = {"models": ["tiny-gpt2"], "clusters": [both, "dgx-a100-80g:2"], "devices": [16], "global_batches": [16]}
    prices = {"dgx-a100-80g": 2.0, "dgx-v100-32g": 0.5}
    study = read_study({**grid, "price_per_device_hour": prices})
    assert study.price(both, 24) == (16 * 2.0 + 8 * 0.5) / 24
    assert study.price(both, 16) == 2.0
    assert read_study({**grid, "price_per_device_hour": {"dgx-a100-80g": 2.0}}).price(both, 24) is None
    assert read_study({**grid, "price_per_device_hour": {**prices, both: 1.0}}).price(both, 24) == 1.0
    rows = [SweepRow(request, {"record": {"figures": {}}}) for request in study_rows(study)]
    assert len({row.series for row in rows}) == 2  # no curve leads from the one cluster to the other


def test_a_study_for_each_device_has_batches_in_proportion() -> None:
    study = {"models": ["tiny-gpt2"], "clusters": ["dgx-h100:1"], "devices": [2, 8], "samples_per_device": [4]}
    assert [row.global_batch for row in study_rows(read_study(study))] == [8, 32]


def test_max_programs_stops_a_search_at_the_same_point(uninterrupted: Path) -> None:
    request: dict[str, Any] = {"global_batch": 8, "seq_len": 16, "num_devices": 2}
    plans = [planner.plan("tiny-gpt2", "dgx-h100:1", max_programs=1, **request) for _ in range(2)]
    assert "effort limit" in plans[0].certificate.status
    assert plans[0].to_json() == plans[1].to_json()
    best = planner.plan("tiny-gpt2", "dgx-h100:1", **request)
    assert plans[0].certificate.bound <= best.certificate.objective
    assert dataclasses.asdict(best.certificate)["status"].startswith("optimal")
