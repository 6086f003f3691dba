"""Captured graphs that are kept: the same plan from less work, and never a wrong one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import planner
from passes.ir.graph import Graph, Node, Ref, State, Value
from planner.graph_cache import graph_store, planned_graph
from planner.graph_cache.graph_json import from_plain_graph, to_plain
from planner.graph_cache.graph_store import FOLDER_VARIABLE
from planner.kept_plans import KeptPlans
from planner.planning import capture_for_planning
from planner.whole_step.costs.sharding import ShardingSpace
from planner.whole_step.plan_step import _Planner
from tests.small_models import Mlp, mlp_batch, squared_error

pytestmark = pytest.mark.usefixtures("models_traced_once")

#: Little is left to search for: these tests are of the graph.
FIX = {"pp": 1, "dp": 8, "num_microbatches": 1, "zero": 0, "recompute": "none"}
REQUEST: dict[str, Any] = {"seq_len": 16, "global_batch": 8, "fix": FIX}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    yield tmp_path / "graphs"


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that grows by each capture."""
    calls: list[Any] = []

    def counted(model: Any, **options: Any) -> Graph:
        calls.append(model)
        return capture_for_planning(model, **options)

    monkeypatch.setattr("planner.planning.capture_for_planning", counted)
    return calls


def test_a_second_plan_captures_nothing_and_is_the_same(folder: Path, captures: list[Any]) -> None:
    first = planner.plan("tiny-llama", "dgx-h100:1", **REQUEST)
    second = planner.plan("tiny-llama", "dgx-h100:1", **REQUEST)
    assert captures == ["tiny-llama"]
    assert second.to_json() == first.to_json()
    assert len(list(folder.iterdir())) == 1


def test_further_clusters_share_what_they_have_in_common_and_plan_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cluster's plan is the same after others as by itself; what is registered meanwhile is not shared."""
    request = {"seq_len": 16, "global_batch": 8}
    clusters = ("dgx-h100:1", "8x-rtx4090", "dgx-h100:1")
    spaces: list[ShardingSpace] = []
    pose = _Planner.posed

    def counted(*arguments: Any) -> Any:
        spaces.append(pose(*arguments)[0])
        return pose(*arguments)

    planner.plan("tiny-llama", "dgx-h100:1", **request)
    planner.plan("tiny-llama", "8x-rtx4090", **request)  # now all that is asked of torch is kept
    monkeypatch.setattr(_Planner, "posed", counted)
    planned_graph._last.clear()
    together = [planner.plan("tiny-llama", cluster, **request) for cluster in clusters]
    assert len(spaces) == 1
    for cluster, plan in zip(clusters, together):
        planned_graph._last.clear()
        assert planner.plan("tiny-llama", cluster, **request).to_json() == plan.to_json()
    assert len(spaces) == 4
    planner.plan("tiny-llama", "8x-rtx4090", **request, compiled=True)
    assert len(spaces) == 5


def test_other_clusters_and_meshes_use_the_same_graph(folder: Path, captures: list[Any]) -> None:
    planner.plan("tiny-gpt2", "dgx-h100:1", **REQUEST)
    planner.plan("tiny-gpt2", "dgx-a100-80g:1", **REQUEST)
    planner.plan("tiny-gpt2", "dgx-h100:1", mesh="dp=2,tp=4", seq_len=16, global_batch=8)
    assert captures == ["tiny-gpt2"]


@pytest.mark.parametrize("change", [{"seq_len": 32}, {"fuse": False}])
def test_what_a_graph_depends_on_is_in_its_key(folder: Path, captures: list[Any], change: dict[str, Any]) -> None:
    planner.plan("tiny-llama", "dgx-h100:1", **REQUEST)
    planner.plan("tiny-llama", "dgx-h100:1", **{**REQUEST, **change})
    assert len(captures) == 2


def test_a_config_that_was_edited_is_captured_again(folder: Path, captures: list[Any], tmp_path: Path) -> None:
    from planner.library.configs import config_file

    config = tmp_path / "config.json"
    content = json.loads(config_file("tiny-llama").read_text())
    config.write_text(json.dumps(content))
    planner.plan(str(config), "dgx-h100:1", **REQUEST)
    config.write_text(json.dumps({**content, "intermediate_size": 2 * content["intermediate_size"]}))
    planner.plan(str(config), "dgx-h100:1", **REQUEST)
    assert len(captures) == 2


@pytest.mark.parametrize("damage", ["{", '{"graph": {}, "fusion": null, "facts": {}}'])
def test_a_damaged_file_is_captured_again_and_mended(folder: Path, captures: list[Any], damage: str) -> None:
    first = planner.plan("tiny-llama", "dgx-h100:1", **REQUEST)
    (path,) = folder.iterdir()
    path.write_text(damage)
    assert planner.plan("tiny-llama", "dgx-h100:1", **REQUEST).to_json() == first.to_json()
    planner.plan("tiny-llama", "dgx-h100:1", **REQUEST)
    assert len(captures) == 2


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    assert planner.plan("tiny-llama", "dgx-h100:1", **REQUEST).step.num_devices == 8


def test_an_empty_variable_keeps_nothing(folder: Path, captures: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    for _ in range(2):
        planner.plan("tiny-llama", "dgx-h100:1", **REQUEST)
    assert len(captures) == 2 and not folder.exists()


def test_the_folder_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_store, "MAX_FILES", 3)
    folder.mkdir()
    (folder / ".graph9.json.1.partial").write_text("{")  # of a process that was killed
    os.utime(folder / ".graph9.json.1.partial", (0, 0))
    for place in range(5):
        graph_store.keep_graph(f"graph{place}", {"place": place})
        os.utime(folder / f"graph{place}.json", (place, place))
    assert {path.stem for path in folder.iterdir()} == {"graph2", "graph3", "graph4"}


def test_a_kept_graph_is_planned_without_torch(folder: Path) -> None:
    """In processes of their own, the second for another layout; the collectives of the whole step are counted, too.

    The first has planned the model before it keeps the graph, so that it has all rules in memory."""
    code = (
        "import os, sys, planner\n"
        "fix = {'schedule': '1f1b', 'zero': 1, **eval(sys.argv[1])}\n"
        "for os.environ['MESHWRIGHT_CACHE'] in sys.argv[2:]:\n"
        "    planner.plan('tiny-llama', 'dgx-h100:1', seq_len=16, global_batch=8, fix=fix)\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    kept = str(folder.parent)
    run = [
        subprocess.run(
            [sys.executable, "-c", code, repr(fix), *folders], capture_output=True, text=True, check=True
        ).stdout
        for fix, folders in (({"dp": 8}, ("", kept)), ({"pp": 2, "dp": 2, "tp": 2, "recompute": "full"}, (kept,)))
    ]
    assert run == ["True True\n", "False False\n"]


def test_a_graph_is_the_same_after_json() -> None:
    x, out = Value("x", (2, 3), "float32", "input"), Value("y", (2,), "float32")
    weight = State(Value("w", (3,), "float32", "parameter", True), "layer.0.w", ("tied.w",))
    arguments = (Ref("x"), (1, [Ref("w"), None], ()), float("-inf"), 1.5, True)
    keywords = {"dtype": "dtype:float32", "dims": [0, -1]}
    key = "layer.0:aten.thing.default:0"
    node = Node("y", "aten.thing.default", arguments, keywords, (out,), "layer.0", "Layer", False, key, 3)
    graph = Graph("M", (x,), (("batch", 0),), (weight,), (node,), {"loss": "y"}, "loss")
    again = from_plain_graph(json.loads(json.dumps(to_plain(graph))))
    assert again == graph
    assert again.nodes[0].constants == node.constants


def test_what_json_cannot_say_is_refused() -> None:
    node = Node("y", "aten.thing.default", (1j,), {}, (Value("y", (), "complex64"),))
    with pytest.raises(ValueError, match="complex"):
        to_plain(Graph("M", (), (), (), (node,), {}))


def test_a_plan_is_kept_for_the_same_model_options_and_frozen_parameters_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    model, options = Mlp(), {"loss_fn": squared_error, "example_inputs": mlp_batch()}
    trains = {name: True for name, _ in model.named_parameters()}
    plan = planner.compile(model, "dp=1", **options).plan
    KeptPlans(model, options).note("dp=1", trains, plan, writes=True)
    anew = KeptPlans(model, options)
    assert anew.read("dp=1", trains) == plan
    assert anew.read("dp=2", trains) is None
    assert anew.read("dp=1", {**trains, next(iter(trains)): False}) is None
    assert KeptPlans(model, {**options, "precision": "bfloat16"}).read("dp=1", trains) is None
    assert KeptPlans(model, {**options, "loss_fn": mlp_batch}).read("dp=1", trains) is None
    (file,) = (tmp_path / "plans").iterdir()
    file.write_text("{}")
    assert KeptPlans(model, options).read("dp=1", trains) is None
