"""Fused operators from the plan to the program: what a plan says of them, how they are written, and that they agree."""

from __future__ import annotations

import functools
import json

import pytest

import planner
from passes.fuse import as_planned, fuse
from passes.plan import Plan
from passes.repeats.repeated_blocks import find_blocks
from planner import fusing
from planner.library import load_config
from planner.planning import capture_for_planning
from planner.verification.verify_model import VerifyReport

pytestmark = pytest.mark.usefixtures("models_traced_once")


@functools.cache
def verified(*, fuse: bool) -> VerifyReport:
    # Queries and keys are cut alike, so that one call may turn both.
    alike = {"*:meshwright.rotary.default:*": {"dp": "S(0)"}} if fuse else {}
    return planner.verify("tiny-llama", "dp=2", batch_size=4, seq_len=8, steps=1, fuse=fuse, constraints=alike)


def test_fused_program_computes_what_one_device_does() -> None:
    report = verified(fuse=True)
    assert report.ok, report.table()
    assert report.largest_error < 1e-11


def test_program_is_written_with_fused_operators() -> None:
    source = verified(fuse=True).source
    assert "from runtime import kernels, ops\n" in source
    for name in ("embedding", "rms_norm", "add_rms_norm", "swiglu", "rotary_pair"):
        assert f"kernels.{name}(" in source or (name == "embedding" and "ops.embedding(" in source)
    assert "kernels.rotary(" not in source and "rsqrt" not in source
    assert "x, h = kernels.add_rms_norm(" in source


def test_plan_lists_matches_and_says_what_they_save() -> None:
    plan = verified(fuse=True).plan
    assert plan.fusion is not None
    assert {entry.pattern: entry.count for entry in plan.fusion.matches} == {
        "embedding": 1, "rms_norm": 5, "add_rms_norm": 4, "rotary": 8, "swiglu": 4, "cross_entropy": 1,
    }  # fmt: skip
    summary = plan.summary()
    assert "Fused operators" in summary and "model.layers.{0..3}.post_attention_layernorm" in summary
    assert plan.fusion.operators[1] < plan.fusion.operators[0]
    assert plan.fusion.saved_bytes[1] < plan.fusion.saved_bytes[0]


def test_without_fusion_program_and_plan_know_nothing_of_it() -> None:
    report = verified(fuse=False)
    assert report.plan.fusion is None and "Fused" not in report.plan.summary()
    assert "kernels" not in report.source and "from runtime import ops\n" in report.source


@pytest.mark.parametrize("fuse", [True, False])
def test_a_loaded_plan_gives_the_same_program(fuse: bool) -> None:
    first = verified(fuse=fuse)
    loaded = Plan.from_dict(json.loads(first.plan.to_json()))
    assert loaded == first.plan
    again = planner.verify("tiny-llama", loaded, batch_size=4, seq_len=8, steps=1)
    assert again.ok and again.source == first.source


def test_saved_bytes_of_repeated_layers_are_those_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("tiny-llama")
    config.num_hidden_layers = 7
    graph = capture_for_planning(config, batch_size=4, seq_len=8)
    assert find_blocks(graph)[0].num_copies > 4
    short = fusing.saved_bytes(graph)
    monkeypatch.setattr(fusing, "find_blocks", lambda _: ())
    assert short == fusing.saved_bytes(graph) > 0


def test_a_graph_in_wide_numbers_is_fused_as_a_plan_in_narrow_ones() -> None:
    """BLOOM's GELU is written with eight digits: fused where the plan was made, and so wherever it runs."""
    narrow, wide = (
        capture_for_planning("tiny-bloom", batch_size=8, seq_len=16, dtype=d) for d in ("bfloat16", "float64")
    )
    plan = planner.plan(load_config("tiny-bloom"), mesh="tp=2", cluster="cpu-local:2", batch_size=8, seq_len=16)
    assert "bias_gelu" in {entry.pattern for entry in plan.fusion.matches}
    of_wide, of_narrow = ({node.key for node in as_planned(graph, plan).nodes} for graph in (wide, narrow))
    # The model casts its logits to float32: of narrow ones the loss does so itself, wide ones lose digits there.
    assert of_wide - {":aten.to.dtype:0"} == of_narrow
    assert "meshwright.bias_gelu.default" not in {node.op for node in fuse(wide).graph.nodes}
