"""What the software of published runs adds to a step, each option by itself, on a step of two layers and a loss."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.published_frameworks import FLASH_SLOWDOWNS, Framework
from cost_models import Cluster
from cost_models.hardware import Device, DeviceGroup
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


#: Two of them; a collective takes a second, whatever it moves.
CLUSTER = replace(Cluster.uniform(2, bandwidth=math.inf), groups=(DeviceGroup(DEVICE, 2),))


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
    return Framework(**options).on_step(step, graph, CONFIG, 5, CLUSTER)


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
    cluster = replace(CLUSTER, groups=(DeviceGroup(replace(DEVICE, overlap_slowdown=0.25), 2),))
    layers = beside.on_step(step, None, CONFIG, 5, cluster).chunks[0].layers
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


def products(*readers: str) -> SimpleNamespace:
    """A layer of linear products, each reading the value that is named, 8 wide."""
    nodes = [
        SimpleNamespace(op="aten.linear.default", module_path=f"model.layers.0.p{index}", inputs=(value, f"w{index}"))
        for index, value in enumerate(readers)
    ]
    return SimpleNamespace(nodes=nodes, values={f"w{index}": SimpleNamespace(shape=(8, 8)) for index in range(9)})


#: Query, key, value, output, gate, up, down.
LLAMA = products("x", "x", "x", "heads", "y", "y", "wide")
#: Seconds to copy 5 tokens of 8 elements of 2 bytes, read and written.
COPY = 4 * 5 * 8


@pytest.mark.parametrize(
    ("recompute", "options", "scatters", "copies"),
    [
        # as torch counts them in compiled graphs of such a layer: 8 scatters for 5 of plans, 14 copies
        ("full", {"reduces_each_product": True}, 3, (4, 10)),
        ("full", {}, 0, (4, 7)),
        ("none", {"reduces_each_product": True}, 3, (4, 7)),
    ],
)
def test_tensor_parallel_layers_of_torch_exchange_more_and_copy_what_they_exchange(
    recompute: str, options: dict[str, bool], scatters: int, copies: tuple[int, int]
) -> None:
    step = replace(step_with(recompute), axes={"tp": 2})
    layer, _ = played(step, LLAMA, copies_shards=True, **options).chunks[0].layers[0]
    extra = [layer.forward - LAYER.forward, layer.backward - LAYER.backward]
    assert extra == [copies[0] * COPY, scatters + copies[1] * COPY]


def test_layers_without_a_tensor_axis_or_shared_inputs_exchange_nothing_more() -> None:
    everything = {"copies_shards": True, "reduces_each_product": True}
    assert played(step_with("none"), LLAMA, **everything) == step_with("none").pipeline
    step = replace(step_with("none"), axes={"tp": 2})
    assert played(step, products("a", "b"), **everything) == step.pipeline


def test_a_loss_on_gathered_logits_of_16_bits_is_computed_whole_by_every_tensor_rank() -> None:
    step = replace(step_with("none"), axes={"tp": 2})
    sharded, _ = played(step, plain_logits=True).chunks[0].layers[1]
    gathered, _ = played(step, plain_logits=True, gathers_logits=True).chunks[0].layers[1]
    assert (sharded.forward, sharded.backward) == (1.0 + 2 * 25, 2.0 + 8 * 25)
    assert (gathered.forward, gathered.backward) == (1.0 + 2 * 50 + 1.0 + 4 * 50, 2.0 + 8 * 50)  # gathered and copied
    assert (sharded.peak_bytes, gathered.peak_bytes) == ((8 + 8) * 25, 8 * 50)


def test_gradients_that_are_reduced_once_a_step_are_held_whole_meanwhile() -> None:
    step = step_with("none", zero=3)
    costs = replace(step.chunks[0].costs, layers=((replace(LAYER, reduce_backward=4.0), 2), (LOSS, 1)))
    step = replace(step, chunks=(replace(step.chunks[0], costs=costs),))
    layer, _ = played(step, reduces_once=True).chunks[0].layers[0]
    assert (layer.reduce_backward, layer.reduce_step) == (0.0, 9.0 + 4.0)
    assert layer.state_bytes == (16 - 4) * 50 + 4 * 2 * 50  # pieces of half of 100 parameters, gradients of all
    alone = replace(step, num_microbatches=1)
    assert played(alone, reduces_once=True) == alone.pipeline


def test_a_state_of_16_bits_takes_half_the_bytes_and_seconds() -> None:
    step = step_with("none")
    costs = replace(step.chunks[0].costs, layers=((replace(LAYER, update_step=6.0), 2), (LOSS, 1)))
    step = replace(step, chunks=(replace(step.chunks[0], costs=costs),))
    layer, _ = played(step, state_bytes=8).chunks[0].layers[0]
    assert (layer.state_bytes, layer.update_step) == (8 * 50, 3.0)
    # 12 bytes of the pieces become 6, beside whole gradients in float32
    whole, _ = played(step_with("none", zero=3), state_bytes=8, reduces_once=True).chunks[0].layers[0]
    assert whole.state_bytes == 6 * 50 + 4 * 2 * 50


def test_an_embedding_on_every_tensor_rank_adds_the_parts_of_the_others() -> None:
    """10 entries of 4 elements, of which the plan has half."""
    step = replace(step_with("none"), axes={"dp": 2, "tp": 2})
    first, _ = played(step, replicates_embedding=True).chunks[0].layers[0]
    assert first.state_bytes == LAYER.state_bytes + 16 * 20
    sharded = replace(step_with("none", zero=3), axes={"dp": 2, "tp": 2})
    first, _ = played(sharded, replicates_embedding=True).chunks[0].layers[0]
    assert first.state_bytes == LAYER.state_bytes + 16 * 20 / 2
    assert first.peak_bytes == 8 * (40 + 20)  # embedding and head, gathered, with their gradients


def test_the_loss_is_not_recomputed_with_the_layers() -> None:
    step = step_with("full")
    parts = (PARTS, LayerSeconds(compute_forward=1.0, recompute=0.75))
    step = replace(step, chunks=(replace(step.chunks[0], parts=parts),))
    assert played(step).chunks[0].layers[1][0].backward == 2.0 - 0.75


@pytest.mark.parametrize(
    ("cluster", "options", "slowdown"),
    [
        ("dgx-a100-80g", {}, 1.0),
        ("dgx-a100-80g", {"triton_attention": True}, 1.8),
        ("dgx-h100", {}, FLASH_SLOWDOWNS["attention"]),
        ("dgx-h100", {"triton_attention": True}, 1.8 * FLASH_SLOWDOWNS["attention"]),
        ("dgx-h100", {"cudnn_attention": True}, 1.0),
    ],
)
def test_attention_takes_what_its_software_does_and_nothing_else_changes(
    cluster: str, options: dict[str, bool], slowdown: float
) -> None:
    before = Cluster.parse(cluster)
    after = Framework(**options).on_cluster(before)
    work: dict[str, Any] = {"flops": 1e12, "num_bytes": 1e6, "dtype": "bfloat16"}
    seconds = [each.device.seconds(kind="attention", **work) for each in (before, after)]
    assert seconds[1] == pytest.approx(slowdown * seconds[0])
    assert after.device.seconds(kind="matmul", **work) == before.device.seconds(kind="matmul", **work)
    with_bias = after.device.seconds(kind="masked_attention", **work)
    assert with_bias == seconds[1] or options == {"cudnn_attention": True}
