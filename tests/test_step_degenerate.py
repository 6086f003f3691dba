"""Odd models, batches, clusters and demands: a plan of the whole step or a clear error, never a crash."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import planner
from cost_models import Cluster
from passes.plan import Plan
from passes.plan.step_plan import StepPlan

pytestmark = pytest.mark.usefixtures("models_traced_once")


def squared(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return (outputs**2).mean()


def step_of(plan: Plan) -> StepPlan:
    assert plan.step is not None
    return plan.step


def planned(model: nn.Module, cluster: Any, *, batch: int = 4, inputs: Any = None, **options: Any) -> StepPlan:
    """The step of a Hugging Face model, or of any other on ``inputs`` with a squared loss; checked for consistency."""
    if inputs is None:
        options |= {"global_batch": batch, "seq_len": options.get("seq_len", 8)}
    else:
        options = {"loss_fn": squared, **options, "example_inputs": inputs}
    step = step_of(planner.plan(model, cluster, **options))
    assert step.num_devices == (cluster if isinstance(cluster, Cluster) else Cluster.parse(cluster)).num_devices
    assert step.axes["dp"] * step.num_microbatches * step.local_batch == step.global_batch
    assert len(step.memory) == step.axes["pp"]
    assert 0 < step.costs.seconds < math.inf
    assert max(rank.total for rank in step.memory) <= step.memory_limit * (1 + 1e-6)
    return step


def llama(*, layers: int = 2, heads: int = 2, size: int = 16, vocabulary: int = 32, tied: bool = False) -> nn.Module:
    config = LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, hidden_size=size,
        intermediate_size=2 * size, vocab_size=vocabulary, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(sizes):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers)


class ConvNet(nn.Module):
    """Two convolutions with batch norm, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def images(batch: int = 4) -> tuple[torch.Tensor]:
    return (torch.zeros(batch, 3, 8, 8),)


def rows(batch: int = 4, size: int = 8) -> tuple[torch.Tensor]:
    return (torch.zeros(batch, size),)


class TestDevices:
    def test_one_device_has_nothing_to_divide(self) -> None:
        step = planned(llama(), "cpu-local:1")
        assert set(step.axes.values()) == {1}
        assert step.schedule == "none"
        assert set(step.zero) == {0}

    @pytest.mark.parametrize("devices", [7, 13])
    def test_a_prime_number_of_devices(self, devices: int) -> None:
        step = planned(llama(), f"cpu-local:{devices}", batch=4)
        assert sorted(step.axes.values()) == [1, 1, 1, devices]

    def test_a_prime_number_of_devices_that_divides_the_batch(self) -> None:
        assert planned(mlp(64, 64, 64), "cpu-local:7", inputs=rows(7, 64)).num_devices == 7

    def test_devices_of_two_kinds_wait_for_the_slower(self) -> None:
        mixed, fast = busy(cluster_data(slow=True)), busy(cluster_data(slow=False))
        assert mixed.costs.seconds > 2 * fast.costs.seconds  # a tenth of the flops

    def test_the_smaller_memory_of_two_kinds_is_what_counts(self) -> None:
        assert busy(cluster_data(slow=True)).memory_limit == 0.94 * 1e9

    def test_links_that_are_slower_in_one_node(self) -> None:
        slow = cluster_data(slow=False)
        slow["levels"][0]["exceptions"] = [{"group": 1, "bandwidth": 1e7, "latency": 1e-3}]
        assert busy(slow).costs.seconds > busy(cluster_data(slow=False)).costs.seconds

    def test_a_subset_that_would_cut_a_node_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="would cut a group of 8"):
            planner.plan(llama(), "dgx-h100:2", global_batch=4, seq_len=8, num_devices=12)
        with pytest.raises(ValueError, match="num_devices must be at least 1"):
            planner.plan(llama(), "dgx-h100:2", global_batch=4, seq_len=8, num_devices=0)


def cluster_data(*, slow: bool) -> dict[str, Any]:
    device = {
        "name": "fast", "flops": {"float32": 1e12, "bfloat16": 1e12}, "memory_bytes": 2e9, "memory_bandwidth": 1e11,
        "launch_overhead": 1e-6,
    }  # fmt: skip
    other = {**device, "name": "slow", "flops": {"float32": 1e11, "bfloat16": 1e11}, "memory_bytes": 1e9}
    levels = [
        {"name": "node", "size": 2, "latency": 1e-6, "bandwidth": 1e10},
        {"name": "network", "size": 2, "latency": 1e-5, "bandwidth": 1e9},
    ]
    kinds = [{**device, "count": 2}, {**(other if slow else device), "count": 2}]
    return {"name": "two kinds", "devices": kinds, "levels": levels}


def busy(data: dict[str, Any]) -> StepPlan:
    """Four linears, large enough to keep the devices of ``cluster_data`` busy, data parallel."""
    return planned(mlp(64, 256, 256, 256, 64), Cluster.from_dict(data), inputs=rows(512, 64), fix={"dp": 4})


class TestBatches:
    def test_a_batch_of_one_is_divided_otherwise(self) -> None:
        step = planned(llama(layers=4), "cpu-local:8", batch=1)
        assert step.axes["dp"] == 1
        assert step.num_microbatches == 1

    def test_a_batch_of_one_in_a_pipeline(self) -> None:
        step = planned(llama(), "cpu-local:2", batch=1, fix={"pp": 2})
        assert step.axes["pp"] == 2
        assert step.num_microbatches == 1

    def test_a_batch_that_does_not_divide_over_the_devices(self) -> None:
        step = planned(llama(layers=4), "cpu-local:4", batch=3)
        assert step.axes["dp"] == 1
        with pytest.raises(ValueError, match=r"dp=4 cannot be met.*global batch of 3.*dp = 1"):
            planned(llama(), "cpu-local:4", batch=3, fix={"dp": 4})

    def test_batch_norm_needs_the_whole_batch(self) -> None:
        assert planned(ConvNet(), "cpu-local:2", inputs=images()).num_microbatches == 1
        with pytest.raises(ValueError, match="mixes the samples of a batch"):
            planned(ConvNet(), "cpu-local:2", inputs=images(), fix={"num_microbatches": 2})

    def test_batch_norm_runs_on_data_ranks_that_do_not_divide_its_channels(self) -> None:
        assert planned(ConvNet(), "cpu-local:6", inputs=images(batch=12), fix={"dp": 6, "zero": 1}).axes["dp"] == 6

    def test_another_number_of_samples_than_the_inputs_have_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"a step of 7 samples .* but example_inputs have 4"):
            planned(ConvNet(), "cpu-local:2", inputs=images(), global_batch=7)

    def test_an_empty_batch_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="batch"):
            planned(llama(), "cpu-local:2", batch=0)
        with pytest.raises(ValueError, match="the inputs have no samples, and a step is planned for at least one"):
            planned(mlp(4, 4), "cpu-local:2", inputs=(torch.zeros(0, 4),))

    def test_an_empty_batch_on_a_mesh_has_a_plan_that_ranks_can_send_each_other(self) -> None:
        inputs = (torch.zeros(0, 4),)
        plan = planner.plan(mlp(4, 4), "cpu-local:2", mesh="tp=2", example_inputs=inputs, loss_fn=squared)
        assert (step_of(plan).global_batch, step_of(plan).local_batch) == (0, 1)
        assert Plan.from_dict(json.loads(plan.to_json())) == plan


class TestModels:
    def test_heads_that_divide_by_nothing(self) -> None:
        model = llama(layers=1, heads=7, size=7 * 16, vocabulary=101)
        assert planned(model, "cpu-local:4").num_devices == 4
        assert planned(model, "cpu-local:2", fix={"tp": 2}).axes["tp"] == 2

    def test_more_stages_than_layers_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"pp=8 cannot be met.*at most 4.*pp = 1, 2, 4"):
            planned(llama(layers=2), "cpu-local:8", batch=8, fix={"pp": 8})

    def test_one_linear(self) -> None:
        assert planned(nn.Linear(8, 8), "cpu-local:4", inputs=rows()).num_devices == 4
        with pytest.raises(ValueError, match=r"pp=2 cannot be met.*at most 1"):
            planned(nn.Linear(8, 8), "cpu-local:4", inputs=rows(), fix={"pp": 2})
        with pytest.raises(ValueError, match=r"^pp=2 cannot be met.*a model of 1 part;"):
            planned(nn.Linear(8, 8), "cpu-local:4", inputs=rows(), fix={"pp": 2, "dp": 2, "cp": 1, "tp": 1})

    def test_one_layer(self) -> None:
        assert planned(llama(layers=1), "cpu-local:4").num_devices == 4

    def test_a_sequence_of_linears(self) -> None:
        assert planned(mlp(8, 16, 16, 8), "cpu-local:4", inputs=rows()).num_devices == 4
        assert planned(mlp(8, 16, 16, 8), "cpu-local:2", inputs=rows(), fix={"pp": 2}).axes["pp"] == 2

    def test_blocks_that_differ(self) -> None:
        model = nn.Sequential(mlp(8, 24, 8), mlp(8, 48, 8), mlp(8, 24, 24, 8))
        assert planned(model, "cpu-local:4", inputs=rows(), fix={"pp": 2, "dp": 2}).axes["pp"] == 2

    def test_a_model_without_parameters(self) -> None:
        model = nn.Sequential(nn.Softmax(-1), nn.ReLU())
        assert planned(model, "cpu-local:2", inputs=rows(), training=False, loss_fn=None).num_devices == 2

    def test_a_model_that_computes_nothing_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="computes nothing"):
            planned(nn.Identity(), "cpu-local:2", inputs=rows(), training=False, loss_fn=None)

    def test_all_parameters_frozen(self) -> None:
        step = planned(mlp(8, 16, 8).requires_grad_(False), "cpu-local:2", inputs=rows())
        assert all(rank.gradients == rank.optimizer == 0 for rank in step.memory)

    def test_some_parameters_frozen(self) -> None:
        model = llama()
        model.model.embed_tokens.requires_grad_(False)  # type: ignore[union-attr, operator]
        one, all_of_it = planned(model, "cpu-local:1"), planned(llama(), "cpu-local:1")
        assert one.memory[0].gradients < all_of_it.memory[0].gradients

    def test_inference(self) -> None:
        step = planned(mlp(8, 16, 8), "cpu-local:2", inputs=rows(), training=False, loss_fn=None)
        assert all(rank.gradients == rank.optimizer == 0 for rank in step.memory)
        assert planned(llama(), "cpu-local:2", training=False).num_devices == 2

    def test_embeddings_that_are_tied_across_the_pipeline(self) -> None:
        tied = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16))
        step = planned(tied, "cpu-local:2", fix={"pp": 2, "schedule": "1f1b"})
        embedding = 4 * 64 * 16
        assert all(rank.parameters >= embedding for rank in step.memory)  # both ends hold it

    def test_layers_that_share_their_parameters(self) -> None:
        config = AlbertConfig(
            hidden_size=16, num_attention_heads=2, intermediate_size=32, num_hidden_layers=4, embedding_size=8,
            vocab_size=32, max_position_embeddings=16,
        )  # fmt: skip
        assert planned(AlbertForMaskedLM(config), "cpu-local:4").num_devices == 4
        assert planned(AlbertForMaskedLM(config), "cpu-local:2", fix={"pp": 2}).axes["pp"] == 2


class TestDemands:
    def test_hardly_any_memory(self) -> None:
        with pytest.raises(ValueError, match=r"no plan fits in memory.*MiB can be used"):
            planned(mlp(64, 64, 64), "cpu-local:2", inputs=rows(4, 64), memory_limit=1e3)

    @pytest.mark.parametrize("limit", [0, -1e9, math.nan])
    def test_memory_must_be_positive(self, limit: float) -> None:
        with pytest.raises(ValueError, match="memory_limit must be a positive number of bytes"):
            planned(llama(), "cpu-local:2", memory_limit=limit)

    @pytest.mark.parametrize("headroom", [-0.1, 1.0, 2, math.nan])
    def test_headroom_is_a_share(self, headroom: float) -> None:
        with pytest.raises(ValueError, match="headroom must be a share"):
            planned(llama(), "cpu-local:2", headroom=headroom)

    def test_a_time_limit_of_nothing_gives_the_first_plan_found(self) -> None:
        plan = planner.plan(llama(layers=4), "cpu-local:8", global_batch=8, seq_len=8, time_limit=0)
        assert step_of(plan).num_devices == 8
        assert plan.certificate.gap >= 0

    def test_a_negative_time_limit_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="time_limit must be at least 0"):
            planned(llama(), "cpu-local:2", time_limit=-1)

    @pytest.mark.parametrize(
        "fix", [{"tp": 0}, {"tp": 1.5}, {"tp": True}, {"zero": 4}, {"schedule": "1f2b"}, {"sp": 2}]
    )
    def test_values_that_mean_nothing_are_errors(self, fix: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"fix.*{next(iter(fix))}"):
            planned(llama(), "cpu-local:2", fix=fix)
