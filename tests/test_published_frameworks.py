"""What the software of published runs adds to a step, each option by itself, on a step of two layers and a loss."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.published_frameworks import Framework
from cost_models import Cluster
from cost_models.hardware import Device
from cost_models.step import ChunkCosts, LayerCosts, LayerSeconds, PipelineStep
from cost_models.step_time import step_memory, step_seconds
from passes.plan.step_plan import ChunkPlan, GroupPlan, StepCosts, StepPlan

LAYER = LayerCosts(forward=3.0, backward=8.0, reduce_step=9.0, saved_bytes=1000.0, state_bytes=16.0 * 50)
LOSS = LayerCosts(forward=1.0, backward=2.0, saved_bytes=500.0, peak_bytes=300.0)
PARTS = LayerSeconds(compute_forward=3.0, compute_backward=6.0, recompute=2.0)
CONFIG = SimpleNamespace(vocab_size=10, hidden_size=4)
#: 1 byte a second, of which all operators get their share.
DEVICE = Device(
    "slow", flops={"bfloat16": 1.0, "float32": 1.0}, memory_bytes=1e9, memory_bandwidth=1.0, launch_overhead=0.0
)


def step_with(recompute: str, *, zero: int = 0) -> StepPlan:
    groups = (GroupPlan("model.layers.0", 0, 2, recompute, zero), GroupPlan("lm_head", 0, 1, recompute, zero))
    chunk = ChunkPlan(0, groups, ChunkCosts(layers=((LAYER, 2), (LOSS, 1))), (PARTS, LayerSeconds()))
    return StepPlan(
        axes={"dp": 2},
        global_batch=4,
        local_batch=1,
        num_microbatches=2,
        schedule="none",
        chunks_per_rank=1,
        chunks=(chunk,),
        optimizer="adamw",
        gradient_dtype="",
        compiled=True,
        costs=StepCosts(*(0.0,) * 10),
        memory=(),
        memory_limit=1e9,
    )


def played(step: StepPlan, graph: Any = None, **options: Any) -> PipelineStep:
    return Framework(**options).on_step(step, graph, CONFIG, 5, DEVICE)


def test_without_options_the_step_is_the_plans() -> None:
    step = step_with("full", zero=3)
    assert played(step) == step.pipeline


def test_a_whole_layer_run_again_adds_what_recomputation_would_have_left_out() -> None:
    again = played(step_with("full"), reruns_whole_layers=True)
    assert [layer.backward for layer, _ in again.chunks[0].layers] == [8.0 + (3.0 - 2.0), 2.0]
    assert played(step_with("none"), reruns_whole_layers=True) == step_with("none").pipeline


def test_gradients_reduced_after_backward_hide_behind_nothing() -> None:
    overlapped, late = step_with("none").pipeline, played(step_with("none"), reduces_after_backward=True)
    assert step_seconds(overlapped).tail + step_seconds(overlapped).update < 2 * 9.0
    assert (step_seconds(late).tail, step_seconds(late).update) == (0.0, 2 * 9.0)


@pytest.mark.parametrize(("gather", "left"), [(2.0, 0.25 * 2.0), (5.0, 5.0 - 0.75 * 3.0)])
def test_parameters_gathered_beside_forward_slow_it_down_and_are_waited_for_where_they_take_longer(
    gather: float, left: float
) -> None:
    step = step_with("none")
    costs = replace(step.chunks[0].costs, layers=((replace(LAYER, gather_step=gather), 2), (LOSS, 1)))
    step = replace(step, chunks=(replace(step.chunks[0], costs=costs),))
    beside = Framework(gathers_beside_forward=True)
    device = replace(DEVICE, overlap_slowdown=0.25)
    layers = beside.on_step(step, None, CONFIG, 5, device).chunks[0].layers
    assert [layer.gather_step for layer, _ in layers] == [left, 0.0]


@pytest.mark.parametrize(("shards", "bytes_of_a_logit"), [(1, 12), (2, 20)])
def test_a_float32_loss_holds_three_copies_of_logits_and_five_where_the_vocabulary_is_sharded(
    shards: int, bytes_of_a_logit: int
) -> None:
    step = replace(step_with("none"), axes={"dp": 2, "tp": shards})
    loss, _ = played(step, float32_logits=True).chunks[0].layers[1]
    logits = 5 * 10 / shards
    assert loss.peak_bytes == bytes_of_a_logit * logits
    assert loss.saved_bytes == 500.0 - 2 * logits  # of 16 bits, which it does not keep
    assert (loss.forward, loss.backward) == (1.0 + 14 * logits, 2.0 + 26 * logits)
    if shards == 1:
        assert step_memory(replace(step.pipeline, chunks=(ChunkCosts(layers=((loss, 1),)),))) == (400.0 + 600.0,)


def test_fully_sharded_parameters_are_copied_into_and_out_of_flat_buffers() -> None:
    layer, _ = played(step_with("none", zero=3), flat_buffer_bytes=(4, 10)).chunks[0].layers[0]
    assert (layer.forward, layer.backward) == (3.0 + 4 * 2 * 50, 8.0 + 10 * 2 * 50)
    assert played(step_with("none", zero=1), flat_buffer_bytes=(4, 10)) == step_with("none", zero=1).pipeline


def test_every_second_product_is_run_again_and_not_kept() -> None:
    weights = {f"w{index}": SimpleNamespace(shape=(7 + index, 4)) for index in range(3)}
    nodes = [
        SimpleNamespace(op="aten.linear.default", module_path=f"model.layers.0.p{index}", inputs=("x", f"w{index}"))
        for index in range(3)
    ]
    graph = SimpleNamespace(nodes=nodes, values=weights)
    layer, _ = played(step_with("selective"), graph, reruns_second_products=True).chunks[0].layers[0]
    assert layer.saved_bytes == 1000.0 - 2 * 5 * 8  # 16 bits of 5 tokens, 8 wide
    assert layer.backward == 8.0 + 2 * 5 * 8 * 4


def test_attention_in_triton_is_slower_and_nothing_else_is() -> None:
    cluster = Cluster.parse("dgx-a100-80g")
    before, after = cluster.device, Framework(triton_attention=True).on_cluster(cluster).device
    work: dict[str, Any] = {"flops": 1e12, "num_bytes": 1e6, "dtype": "bfloat16"}
    assert after.seconds(kind="attention", **work) == pytest.approx(1.8 * before.seconds(kind="attention", **work))
    assert after.seconds(kind="matmul", **work) == before.seconds(kind="matmul", **work)
