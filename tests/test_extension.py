"""Things added from outside of the package: planned, verified, used; a package on ``sys.path``, a folder of TOML."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import planner
from cost_models.presets import efficiency_names
from cost_models.registered_schedules import KIND as SCHEDULE_KIND
from cost_models.registrations import forget, registrations_in_words
from cost_models.schedules import SCHEDULES, remove_schedule
from passes.capture import capture
from passes.fuse import fuse
from passes.fuse.registered_fusions import forget_fusions
from passes.plan import Plan
from passes.rules import forward_flops
from passes.rules.registered_rules import REGISTRY
from planner.cli import main
from planner.extensions import load_extensions
from planner.graph_cache.planned_graph import _key
from planner.verification.verify_model import slow_devices
from tests.rooms import ROOT
from tests.small_models import Mlp, mlp_batch, seeded, squared_error
from tests.test_docs import python_of

PLAN_ON_RACK = ("plan", "tiny-llama", "--cluster", "rack:2", "--seq-len", "8", "--global-batch", "2")
RACK = """
name = "rack"
[device]
name = "chip"
memory_bytes = 4e9
memory_bandwidth = 1e10
launch_overhead = 1e-6
efficiency = "chip"
[device.flops]
float32 = 1e11
[[levels]]
name = "bus"
size = 2
latency = 1e-6
bandwidth = 1e9
"""


def forget_all() -> None:
    forget_fusions()
    if "waves" in SCHEDULES:
        remove_schedule("waves")
        forget(SCHEDULE_KIND, "waves")
    if REGISTRY.pop("outside.swish.default", None):
        forget("sharding rules", "outside.swish.default")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package, ``outside``: the Python of ``docs/extension.md``, and a folder of presets."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "__init__.py").write_text(python_of(ROOT / "docs" / "extension.md"))
    for path, text in {"rack.toml": RACK, "efficiency/chip.toml": "[matmul]\nflops = 0.5\n"}.items():
        file = tmp_path / "outside" / "clusters" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "outside" / "clusters" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "outside"
    forget_all()
    for name in [name for name in sys.modules if name.partition(".")[0] == "outside"]:
        del sys.modules[name]
    load_extensions.cache_clear()


@pytest.fixture
def outside(package: Path) -> ModuleType:
    return importlib.import_module("outside")


def install(package: Path, entry_points: str) -> None:
    folder = package.parent / "outside-1.0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(entry_points)
    importlib.invalidate_caches()


class Swishes(torch.nn.Module):
    """Two ways to write one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        x = self.down(torch.sigmoid(x * 1.7) * x)
        return (x * torch.sigmoid(1.7 * x)).square().mean()


def swishes() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    return seeded(Swishes), (torch.randn(8, 16, generator=torch.Generator().manual_seed(0)),)


def test_a_pattern_and_its_operator_are_planned_verified_and_used(outside: ModuleType, tmp_path: Path) -> None:
    model, batch = swishes()
    report = planner.verify(model, "tp=2", batch=batch)
    assert report.ok, report.table()
    assert report.plan.fusion is not None
    assert [(entry.pattern, entry.count) for entry in report.plan.fusion.matches] == [("swish", 2)]
    assert report.plan.fusion.registered == ("swish: x * sigmoid(x * $beta) → ops.outside.swish(x, $beta)",)
    assert report.plan.states["up.weight"].placement == ("S(0)",)  # cut through the operator, by its rule
    report.plan.save(tmp_path / "plan.json")
    forget_all()
    with pytest.raises(ValueError, match=r"made with the pattern 'swish: x \* .*not registered here"):
        planner.verify(model, tmp_path / "plan.json", batch=batch)
    without = planner.verify(model, "tp=2", batch=batch)
    assert without.ok and without.plan.fusion is not None and without.plan.fusion.matches == ()


def test_flops_of_an_operator_are_what_its_rule_says(outside: ModuleType) -> None:
    model, batch = swishes()
    graph = fuse(capture(model, args=batch)).graph
    calls = [node for node in graph.nodes if node.op == "outside.swish.default"]
    assert [forward_flops(node, graph.values) for node in calls] == [5 * 8 * 32, 5 * 8 * 16]


@pytest.mark.parametrize(
    ("name", "pattern", "fused", "complaint"),
    [
        ("rms_norm", "x * sigmoid(x)", "silu(x)", "comes with this package"),
        ("my swish", "x * sigmoid(x)", "silu(x)", "one word"),
        ("mine", "x * ", "silu(x)", "invalid syntax"),
        ("mine", "x", "silu(x)", "expected an operator"),
        ("mine", "x * nothing(x)", "silu(x)", "no operator 'aten.nothing.default'"),
        ("mine", "x * sigmoid(x)", "ops.nowhere.op(x)", "no operator 'nowhere.op.default'"),
        ("mine", "x * sigmoid(x)", "silu(y)", "has no y, which"),
        ("mine", "x * sigmoid(x)", "leaky_relu(x, $slope)", r"has no \$slope, which"),
        ("mine", "max(x, 0)[x]", "silu(x)", "cannot read"),
        ("mine", 3, "silu(x)", "one line of text"),
    ],
)
def test_bad_patterns_are_refused(name: Any, pattern: Any, fused: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        planner.register_fusion(name, pattern, fused)


def test_a_pattern_that_computes_something_else_is_no_match(outside: ModuleType) -> None:
    forget_all()
    planner.register_fusion("wrong", "x * sigmoid(x * $beta)", "leaky_relu(x, $beta)")
    model, batch = swishes()
    fusion = planner.plan(model, mesh="dp=1", example_inputs=batch).fusion
    assert fusion is not None and fusion.matches == ()
    with pytest.raises(ValueError, match="registered as 'wrong'"):
        planner.register_fusion("other", "x * sigmoid(x * $beta)", "ops.outside.swish(x, $beta)")


def test_captured_graphs_are_kept_apart_by_what_is_registered(package: Path) -> None:
    before = _key("tiny-llama", {}), registrations_in_words()
    importlib.import_module("outside")
    after = _key("tiny-llama", {}), registrations_in_words()
    assert before[0] != after[0]
    assert {"fusions", "schedules", "sharding rules"} <= set(after[1])
    assert "waves: outside.waves " in after[1]["schedules"]


def test_a_schedule_is_planned_verified_and_read_back(outside: ModuleType, tmp_path: Path) -> None:
    model, batch = seeded(Mlp, layers=2), mlp_batch(batch=4)
    fix = {"pp": 2, "schedule": "waves", "micro_batch": 1}
    plan = planner.plan(model, slow_devices(2), example_inputs=batch, loss_fn=squared_error, fix=fix)
    assert plan.step.schedule == "waves" and plan.step.num_microbatches == 4
    assert plan.step.costs.simulated == pytest.approx(plan.step.costs.seconds)  # priced by its order
    report = planner.verify(model, plan, batch=batch, loss_fn=squared_error)
    assert report.ok, report.table()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    forget_all()
    with pytest.raises(ValueError, match=r"schedule.*registered before"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"'schedule' must be one of gpipe, 1f1b.*got 'waves'"):
        planner.plan(model, slow_devices(2), example_inputs=batch, loss_fn=squared_error, fix=fix)


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        (
            lambda r, p, m, c: [("F", r, i) for i in range(m)],
            "runs F of micro-batch 0 of chunk 0; expected F",
        ),
        (lambda r, p, m, c: [(k, r, i) for i in range(m) for k in "BF"], "runs B F of micro-batch 0"),
        (lambda r, p, m, c: [(k, 0, i) for i in range(m) for k in "FB"], "rank 1 runs .* its chunks are"),
        (
            lambda r, p, m, c: [(k, r, i) for i in (range(m) if r else range(m - 1, -1, -1)) for k in "FB"],
            "rank 0 waits for ever before B of micro-batch 1 of chunk 0",
        ),
        (lambda r, p, m, c: [3], "expected actions"),
        (lambda r, p, m, c: [("X", 0, 0)], "the kind of"),
        ("1f1b", "expected a function"),
    ],
)
def test_orders_that_cannot_run_are_refused(order: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        planner.register_schedule("broken", order)
    assert "broken" not in SCHEDULES


def test_schedules_have_names_and_places_of_their_own(outside: ModuleType) -> None:
    planner.register_schedule("waves", outside.waves)  # the same again
    for name, options, complaint in (
        ("gpipe", {}, "comes with this package"),
        ("a b", {}, "expected letters"),
        ("waves", {"chunks_per_rank": None}, "registered with another order"),
        ("mine", {"placement": "ring"}, "expected 'loop' or 'vee'"),
        ("mine", {"placement": "vee"}, "needs chunks_per_rank=2"),
        ("mine", {"chunks_per_rank": 0}, "positive integer"),
    ):
        with pytest.raises(ValueError, match=complaint):
            planner.register_schedule(name, outside.waves, **options)


def test_a_folder_adds_clusters_and_curves(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_PATH", str(package / "clusters"))
    model, batch = seeded(Mlp), mlp_batch()
    plan = planner.plan(model, "rack:2", example_inputs=batch, loss_fn=squared_error)
    assert plan.cluster["name"].startswith("rack")
    assert planner.Cluster.parse("rack").device.efficiency["matmul"].flops(1e9) == 0.5
    monkeypatch.delenv("MESHWRIGHT_PATH")
    assert "chip" not in efficiency_names()
    assert Plan.from_dict(json.loads(plan.to_json())) == plan  # a plan keeps the figures
    with pytest.raises(ValueError, match="unknown cluster 'rack'"):
        planner.Cluster.parse("rack:2")


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("dgx-h100.toml", RACK, "both named 'dgx-h100'"),
        ("rack.toml", "name = ", r"rack.toml"),
        ("rack.toml", 'name = "rack"', "cluster 'rack': the cluster needs 'levels'"),
        ("rack.toml", RACK.replace('"chip"\n[', '"chap"\n['), "no set of curves 'chap'"),
        ("efficiency/chip.toml", "[matmul]\nflops = 2.0\n", "efficiency.matmul.flops"),
    ],
)
def test_bad_files_are_refused(
    package: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, complaint: str
) -> None:
    monkeypatch.setenv("MESHWRIGHT_PATH", str(package / "clusters"))
    (package / "clusters" / file).write_text(text)
    with pytest.raises(ValueError, match=complaint):
        planner.Cluster.parse("rack:2")


def test_a_path_of_no_folder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHWRIGHT_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="which is no folder"):
        planner.Cluster.parse("dgx-h100:1")


def test_installed_packages_bring_both(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(package, "[meshwright.presets]\nmine = outside.clusters\n[meshwright.extensions]\nmine = outside\n")
    load_extensions.cache_clear()
    assert main([*PLAN_ON_RACK, "--forbid", "schedule=waves"]) == 0, capsys.readouterr().err
    assert "on rack" in capsys.readouterr().out or "waves" in SCHEDULES


@pytest.mark.parametrize("group", ["meshwright.presets", "meshwright.extensions"])
def test_entry_points_that_lead_nowhere_are_named(
    package: Path, capsys: pytest.CaptureFixture[str], group: str
) -> None:
    install(package, f"[{group}]\nmine = nowhere.at_all\n")
    load_extensions.cache_clear()
    assert main(["cluster", "show", "cpu-local:2"]) == 2
    assert f"entry point 'mine' of '{group}' names 'nowhere.at_all'" in capsys.readouterr().err
