"""What a plan of a whole step says as text, and what is checked when it is read back: all on plans written by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from cost_models import Cluster
from passes.ir.types import MeshShape
from passes.plan import BlockPlan, Certificate, Costs, Plan, TensorPlan
from passes.plan.stage_table import format_numbers, path_range, unit_range
from passes.plan.step_plan import Alternative, GroupPlan, RankMemory, StepCosts, StepPlan
from tests.chunk_plans import chunk_plan

GIB = 2.0**30
LAYERS = tuple((f"model.layers.{index}",) for index in range(12))
BLOCK = BlockPlan(LAYERS, "model.layers.0:aten.add:0", ())
AXES = {"pp": 4, "dp": 2, "cp": 1, "tp": 8}


def layers(first: int, count: int, *, recompute: str = "none", zero: int = 1) -> GroupPlan:
    return GroupPlan(f"model.layers.{first}", first, count, recompute, zero)


CHUNKS = (
    chunk_plan(0, (GroupPlan("model.embed", 0, 1, "none", 0), layers(0, 3)), forward=0.5, backward=1.0),
    chunk_plan(1, (layers(3, 3, recompute="full"),), forward=0.4, backward=0.9),
    chunk_plan(2, (layers(6, 3, recompute="full"),), forward=0.4, backward=0.9),
    chunk_plan(3, (layers(9, 3), GroupPlan("model.norm … lm_head", 0, 1, "none", 0)), forward=0.5, backward=1.1),
)
FULL, ROOMY = RankMemory(*(20 * GIB,) * 3, 16 * GIB, 2 * GIB), RankMemory(*(10 * GIB,) * 5)
STEP = StepPlan(
    axes=AXES,
    global_batch=32,
    local_batch=2,
    num_microbatches=8,
    schedule="1f1b",
    chunks_per_rank=1,
    chunks=CHUNKS,
    optimizer="adamw",
    gradient_dtype="",
    compiled=True,
    costs=StepCosts(18.0, 17.5, 0.3, 0.2, 20.0, 0.21, 0.04, 1e15, 0.41, 1.6),
    memory=(FULL, ROOMY, ROOMY, ROOMY),
    memory_limit=80 * GIB,
    search={"enumerated": 900, "pruned by bound": 880, "solved": 20},
    alternatives=(Alternative("dp=64, 1 micro-batch of 1", 19.8, 21.0, 79 * GIB),),
)
PLAN = Plan(
    model="Llama",
    fingerprint="",
    mesh=MeshShape(("dp", "cp", "tp"), (2, 1, 8)),
    cluster=Cluster.parse("dgx-h100:8").to_dict(),
    training=True,
    inputs={"input_ids": TensorPlan((32, 1024), "int64", ("S(0)", "R", "R"))},
    states={},
    outputs={},
    nodes={},
    conversions=(),
    blocks=(BLOCK,),
    collectives=(),
    costs=Costs(1.0, 2.0, 0.5, 0.5, {}),
    certificate=Certificate(18.0, 17.1, 0.05, "time limit", "a solver", 10, 20),
    notes=("a note",),
    step=STEP,
)


def with_step(**changes: Any) -> Plan:
    return dataclasses.replace(PLAN, step=dataclasses.replace(STEP, **changes))


def line_with(words: str, text: str) -> str:
    return next(line for line in text.splitlines() if words in line)


def test_the_headline_says_how_fast_and_how_sure() -> None:
    head = PLAN.summary().split("\n\n")[0]
    assert "64 devices of dgx-h100:8 (pp=4,dp=2,cp=1,tp=8)" in head
    assert "20 s a step as simulated, 18 s by the objective" in head
    assert "1.6 samples/s, 1,638 tokens/s (26 a device); model flops utilisation 41.0%" in head
    assert "lower bound 17.1 s, gap 5.000% (time limit)" in head


def test_every_axis_names_the_links_it_runs_on() -> None:
    text = PLAN.summary()
    assert line_with("tp    8", text).endswith("nvlink (450 GB/s)")
    assert line_with("pp    4", text).endswith("network (50 GB/s)")
    assert "cp    1" not in text


def test_equal_stages_share_a_line_and_copies_are_ranges() -> None:
    text = PLAN.summary()
    assert line_with("model.layers.{3..8} (6, 3 each)", text).split()[0] == "1–2"
    assert "model.layers.{0..2} (3)" in text and "model.layers.{9..11} (3)" in text
    assert line_with("model.embed", text).split() == ["0", "model.embed", "none", "0", "500", "ms", "1", "s"]


def test_memory_is_told_by_rank() -> None:
    text = PLAN.summary()
    assert line_with("78 GiB", text).split()[0] == "0" and "97.5%" in line_with("78 GiB", text)
    assert line_with("50 GiB", text).split()[0] == "1–3"


def test_why_names_what_limits_the_step_and_the_closest_other_plan() -> None:
    why = PLAN.summary().split("\n\nWhy")[1].split("\n\n")[0]
    assert "memory binds: rank 0 is 97.5% full" in why
    assert "pipeline bubble 21.0%: 8 micro-batches pass 4 ranks" in why
    assert "25.0% of a micro-batch" in why
    assert "dp=64, 1 micro-batch of 1: +5.00% time as simulated, +10.00% by the objective, 79 GiB against 78 GiB" in why
    assert "ran out of time" in why


def test_images_have_no_tokens() -> None:
    image = dataclasses.replace(PLAN, inputs={"pixels": TensorPlan((32, 3, 8, 8), "float32", ("S(0)", "R", "R"))})
    assert "tokens/s" not in image.summary()


def test_a_plan_reads_back_as_it_was() -> None:
    again = Plan.from_dict(json.loads(PLAN.to_json()))
    assert again == PLAN and again.summary() == PLAN.summary()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"axes": {"pp": 4, "dp": 2, "tp": 8}}, "axes pp, dp, tp do not go with mesh"),
        ({"axes": {**AXES, "tp": 4}}, "axis 'tp' has size 4, but 8"),
        ({"num_microbatches": 3}, "not 32"),
    ],
)
def test_a_step_that_contradicts_its_mesh_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Plan.from_dict(json.loads(with_step(**changes).to_json()))


def test_a_cluster_of_another_size_than_the_mesh_is_refused() -> None:
    data = json.loads(PLAN.to_json())
    data["cluster"] = Cluster.uniform(12).to_dict()
    with pytest.raises(ValueError, match="cluster: 12 devices, but the axes of the step have"):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1, 2), "0–2"),
        ((0, 1, 1, 0), "0–1, 0"),
        ((0, 2, 3, 7), "0, 2–3, 7"),
        ((1, 1), "1"),
        ((0, 1, 0, 1, 0, 1, 0, 1, 0), "0–1, 0–1, …, 0"),
    ],
)
def test_numbers_as_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert format_numbers(numbers) == text


@pytest.mark.parametrize(
    ("first", "last", "text"),
    [
        ("h.0", "h.7", "h.{0..7}"),
        ("h.3", "h.3", "h.3"),
        ("enc.0.block", "enc.2.block", "enc.{0..2}.block"),
        ("layer1.2", "layer2.0", "layer1.2 … layer2.0"),
    ],
)
def test_paths_as_ranges(first: str, last: str, text: str) -> None:
    assert path_range(first, last) == text


def test_a_unit_that_is_no_block_keeps_its_name() -> None:
    assert unit_range("lm_head", 1, (BLOCK,)) == "lm_head"
