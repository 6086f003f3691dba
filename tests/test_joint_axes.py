"""Collectives over several mesh axes at once: planned, priced, emitted, and run on real processes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import planner
from cost_models import Cluster, CostModel
from cost_models.collectives import collective_seconds
from passes.ir.conversions import Step, exists
from passes.ir.graph import Value
from passes.ir.types import MeshShape
from planner.sharding_ilp.lattice import Lattices
from planner.sharding_ilp.sharding_prices import Pricing
from tests.joint_axes_worker import CONVERSIONS, PINS, Turn
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks
from tests.search_cases import UnitCosts
from tests.test_search_conversions import way

TURN = 'spmd.all_to_all(probabilities, ops.joint("dp", "tp"), src=S(1), dst=S(0))'


@dataclass(frozen=True)
class JointCosts(UnitCosts):
    """``UnitCosts`` with prices of groups over several axes."""

    prices_joint_axes = True

    def collective_seconds(self, collective: str, *, num_bytes: float, axis: str) -> float:
        size = 1
        for name in axis.split("_"):
            size *= self.axes[name]
        return collective_seconds(collective, num_bytes=num_bytes, group_size=size, latency=self.latency, bandwidth=1.0)


def test_two_axes_that_shard_a_dim_move_to_another_in_one_all_to_all() -> None:
    """Axis by axis that takes three, 147,459 s (test_search_conversions)."""
    axes = {"x": 4, "y": 4}
    lattices = Lattices(Pricing(JointCosts(axes), MeshShape.from_dict(axes)))
    (arc,) = way(Value("value", (64, 64, 64), "float32"), ("S(1)", "S(1)"), ("S(0)", "S(0)"), lattices)
    assert arc.step.is_joint and arc.step.collectives == ("all_to_all", "all_to_all")
    assert arc.forward == 61_441


@pytest.mark.parametrize(
    ("source", "target", "is_possible"),
    [
        (("R", "S(1)", "S(1)"), ("R", "S(0)", "S(0)"), True),
        (("S(0)", "S(1)", "S(1)"), ("S(0)", "S(0)", "S(0)"), True),  # dim 0 is cut further in
        (("P", "R", "P"), ("I", "R", "I"), True),
        (("S(1)", "S(1)", "S(1)"), ("R", "R", "S(1)"), False),  # an axis further in holds its parts
        (("S(1)", "S(1)", "S(0)"), ("S(0)", "S(0)", "S(0)"), False),
        (("S(0)", "S(1)", "R"), ("R", "R", "R"), False),  # not alike
    ],
)
def test_which_joint_steps_there_are(source: Any, target: Any, is_possible: bool) -> None:
    assert exists(Step(0 if source[0] != target[0] else 1, source, target)) == is_possible


def test_a_group_over_two_axes_is_priced_on_its_own_links() -> None:
    cluster = Cluster.parse("dgx-h100:2")
    joint, alone = CostModel(cluster, {"dp": 4, "tp": 4}), CostModel(cluster, {"all": 16})
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        seconds = joint.collective_seconds(collective, num_bytes=1e8, axis="dp_tp")
        assert seconds == alone.collective_seconds(collective, num_bytes=1e8, axis="all")
    with pytest.raises(ValueError, match="unknown mesh axis 'tp_dp'"):
        joint.collective_seconds("all_reduce", num_bytes=1e8, axis="tp_dp")


def test_every_rank_in_one_process() -> None:
    batch = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8)
    report = planner.verify(Turn(), "dp=2,tp=2", batch=(batch,), constraints=PINS, steps=1)
    assert report.ok, report.table()
    assert TURN in report.source
    assert ("all_to_all", "dp_tp", "forward", 1) in {
        (each.collective, each.axis, each.phase, each.count) for each in report.counted
    }


@functools.cache
def results() -> list[dict[str, Any]]:
    return run_on_ranks("joint_axes_worker", 4, "all", timeout=PATIENCE)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_on_real_processes(name: str) -> None:
    """Parts lie as axis after axis cuts them, gradients come back; one collective each way at most."""
    for rank in results():
        assert rank[name]["error"] <= 1e-12 and rank[name]["gradient"] <= 1e-12
        forward = [(collective, axis) for collective, axis, phase, _ in rank[name]["sent"] if phase == "forward"]
        assert forward == [(name.partition(" ")[0], "dp_tp")]


def test_what_autocast_narrows_is_reduced_on_the_way_back() -> None:
    """Two ranks each add a gradient of 4 to every one of 8 elements."""
    for rank in results():
        assert tuple(rank["autocast"]) == ("torch.bfloat16", 64.0)


def test_a_model_on_real_processes() -> None:
    for rank in results():
        model = rank["model"]
        assert model["loss"] <= 1e-12 and model["gradient"] <= 1e-9 and model["as planned"]
        assert ["all_to_all", "dp_tp", "forward"] in model["collectives"] and TURN in model["source"]


def test_a_model_on_a_second_mesh_of_the_same_groups() -> None:
    """Groups of axes are shared by ranks: ``dp`` has those of the first mesh, whose other axis has another name."""
    for rank in results():
        model = rank["model on another mesh"]
        assert model["loss"] <= 1e-12 and model["gradient"] <= 1e-9 and model["as planned"]
        assert ["all_to_all", "dp_cp", "forward"] in model["collectives"]
