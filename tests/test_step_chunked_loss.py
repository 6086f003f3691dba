"""Losses in chunks: where they are found, when a plan chooses them, what they cost, and what programs compute."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
import runtime.kernels
from cost_models import Cluster
from passes.autograd.working import working
from passes.capture import capture
from passes.emit import emit
from passes.ir.graph import Graph, Node, Ref, Value
from passes.losses import loss_pairs
from passes.pipeline_cut import step_programs
from passes.plan import Plan
from planner.auditing.repriced_step import reprice
from planner.library import load_config
from planner.planning import capture_for_planning
from planner.verification.verify_model import slow_devices
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.plan_step import plan_step
from runtime.kernels.chunked_logits import tokens_at_a_time

pytestmark = pytest.mark.usefixtures("models_traced_once")

MIB = 2**20


class Tail(nn.Module):
    """A layer, a head and a loss of the head's output, spelled as ``loss`` does."""

    def __init__(self, loss: Any, *, bias: bool = False, vocabulary: int = 64) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, vocabulary, bias=bias)
        self.loss = loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        return {"loss": self.loss(logits, labels), "logits": logits}


def flat(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1, ignore_index=3, reduction="sum")


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].contiguous().view(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


def of_scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(F.log_softmax(logits.flatten(0, 1), -1), labels.flatten())


def capped(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return flat(30.0 * torch.tanh(logits / 30.0), labels)


def penalised(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return flat(logits, labels) + logits.square().mean()


SPELLINGS = [flat, smoothed, shifted, of_scores]


def batch(vocabulary: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, 16, generator=generator), torch.randint(0, vocabulary, (8, 6), generator=generator)


def results(graph: Graph) -> set[str]:
    assert graph.loss is not None
    return {graph.outputs[graph.loss]}


@functools.cache
def language_model(*, layers: int = 2, vocabulary: int = 32000) -> Graph:
    config = load_config("tiny-llama")
    config.update({"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": layers})
    config.update({"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": vocabulary, "head_dim": 128})
    return capture_for_planning(config, batch_size=8, seq_len=2048)


def planned(graph: Graph, fix: dict[str, Any], cluster: str = "dgx-h100:1", **options: Any) -> Plan:
    hardware = Cluster.parse(cluster)
    axes = {"pp": 1, "dp": 1, "cp": 1, "tp": 1}
    return plan_step(graph, hardware.subset(1), read_demands({**axes, **fix}, **options))


# -- where they are found ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", SPELLINGS)
def test_a_head_whose_logits_only_the_loss_reads_is_found(loss: Any, bias: bool) -> None:
    graph = capture(Tail(loss, bias=bias), args=batch())
    (pair,) = loss_pairs(graph, results=results(graph))
    assert pair.linear.module_path == "head"
    assert [base.op for base in pair.replacement][-1] == "meshwright.linear_cross_entropy.default"
    assert pair.fused.output == pair.loss.output


@pytest.mark.parametrize("loss", [capped, penalised])
def test_logits_that_are_changed_or_read_again_are_not(loss: Any) -> None:
    graph = capture(Tail(loss), args=batch())
    assert not loss_pairs(graph, results=results(graph))


def test_logits_that_come_out_are_not() -> None:
    graph = capture(Tail(flat), args=batch())
    assert not loss_pairs(graph, results=set(graph.outputs.values()))


@pytest.mark.parametrize(
    "name", ["llama-3-8b", "gemma-2b", "gpt2", "bert-base", "t5-small", "tiny-opt", "qwen2.5-0.5b"]
)
def test_language_models_have_one(name: str) -> None:
    config = load_config(name)
    for key in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"):
        if hasattr(config, key):
            setattr(config, key, 1)
    graph = capture_for_planning(config, batch_size=2, seq_len=16)
    assert len(loss_pairs(graph, results=results(graph))) == 1


# -- what is chosen ---------------------------------------------------------------------------------------------------


def test_with_little_memory_the_loss_is_in_chunks_and_with_plenty_it_is_not() -> None:
    graph = language_model()
    fix = {"num_microbatches": 1}
    plenty = planned(graph, fix)
    assert plenty.step is not None and plenty.step.recompute == ("none",)
    limit = plenty.step.memory[0].total - 800 * MIB
    tight = planned(graph, fix, memory_limit=limit)
    assert tight.step is not None and "chunked_loss" in tight.step.recompute
    assert tight.step.memory[0].total <= limit
    assert tight.step.costs.seconds > plenty.step.costs.seconds


def test_it_saves_the_logits_and_costs_one_product() -> None:
    graph = language_model()
    tokens, vocabulary, hidden = 8 * 2048, 32000, 2048
    plain, chunked = (
        planned(graph, {"num_microbatches": 1, "recompute": policy}).step for policy in ("none", "chunked_loss")
    )
    assert plain is not None and chunked is not None
    saved = plain.memory[0].total - chunked.memory[0].total
    logits = 2 * tokens * vocabulary  # the loss reads them in bfloat16
    gradient = (4 + 2) * vocabulary * hidden  # added up in float32 over the chunks, then in the weight's dtype
    assert logits - gradient <= saved <= logits
    product = 2.0 * tokens * vocabulary * hidden / Cluster.parse("dgx-h100:1").device.peak_flops("bfloat16")
    assert product <= chunked.costs.seconds - plain.costs.seconds <= 2.0 * product


@pytest.mark.parametrize(("tokens", "classes"), [(16384, 32000), (100, 32000), (65536, 512)])
def test_what_it_holds_while_it_runs_is_what_the_kernel_does(tokens: int, classes: int) -> None:
    hidden = Value("hidden", (tokens, 256), "bfloat16", requires_grad=True)
    weight = Value("weight", (classes, 256), "bfloat16", "parameter", requires_grad=True)
    args = (Ref("hidden"), Ref("weight"))
    node = Node("loss", "meshwright.linear_cross_entropy.default", args, {}, (Value("loss", (tokens,), "float32"),))
    working_bytes = working(node, {"hidden": hidden, "weight": weight}, lambda value: float(value.num_bytes))
    logits = 2 * classes * tokens_at_a_time(tokens, 256, classes)
    assert working_bytes.forward == pytest.approx(logits, rel=0.01)
    assert working_bytes.backward == pytest.approx(logits + 4 * weight.num_elements, rel=0.01)


def test_it_is_fixed_and_forbidden_like_a_recompute_policy() -> None:
    graph = language_model()

    def policies(recompute: Any, forbid: dict[str, Any] | None = None) -> list[str]:
        demands = read_demands({"pp": 1, "dp": 1, "cp": 1, "tp": 1, "recompute": recompute}, forbid)
        step = plan_step(graph, Cluster.parse("dgx-h100:1").subset(1), demands).step
        assert step is not None
        return [group.recompute for chunk in step.chunks for group in chunk.groups]

    everything = ("none", "regather", "selective", "full", "chunked_loss")
    assert policies("full") == ["full", "full", "full"]
    assert policies("chunked_loss") == ["none", "none", "chunked_loss"]
    assert policies(("full", "chunked_loss")) == ["full", "full", "chunked_loss"]
    assert "chunked_loss" not in policies(everything, {"recompute": "chunked_loss"})


@pytest.mark.parametrize(
    "fix",
    [
        {"dp": 2, "tp": 4, "zero": 1},
        {"pp": 2, "dp": 2, "tp": 2, "num_microbatches": 4, "schedule": "1f1b"},
        {"dp": 8, "zero": 3},
        {"pp": 2, "dp": 4, "num_microbatches": 2, "schedule": "zb_h1"},
    ],
)
def test_it_costs_what_the_search_says(fix: dict[str, Any]) -> None:
    graph, cluster = language_model(), Cluster.parse("dgx-h100:1")
    plan = plan_step(graph, cluster, read_demands({**fix, "cp": 1, "recompute": "chunked_loss"}))
    assert plan.step is not None and plan.step.recompute[-1] == "chunked_loss"
    assert "chunked_loss" in plan.summary()
    again = reprice(graph, Plan.from_dict(json.loads(plan.to_json())), cluster)
    assert again.seconds.total == pytest.approx(plan.certificate.objective, rel=1e-6)
    assert again.simulated().seconds == pytest.approx(plan.step.costs.simulated, rel=1e-6)
    assert again.memory == pytest.approx([rank.total for rank in plan.step.memory], rel=1e-6)


# -- what is run ------------------------------------------------------------------------------------------------------


def program_of(model: nn.Module, fix: dict[str, Any]) -> str:
    graph = capture(model, args=batch())
    devices = fix.get("dp", 1) * fix.get("tp", 1) * fix.get("pp", 1)
    demands = read_demands({"pp": 1, "dp": 1, "cp": 1, "tp": 1, "zero": 0, **fix})
    programs = step_programs(graph, plan_step(graph, slow_devices(devices), demands))
    return emit(programs.stages[-1].sharded).source


def test_programs_call_the_operator() -> None:
    source = program_of(Tail(flat, bias=True, vocabulary=4096), {"tp": 2, "recompute": "chunked_loss"})
    assert "ops.linear_cross_entropy(" in source and "vocabulary=4096" in source
    assert "ops.cross_entropy(" not in source and "recompute=" not in source


def test_programs_reuse_logits_that_nobody_else_reads() -> None:
    assert "reuse_logits=True" in program_of(Tail(flat), {"recompute": "none"})
    for loss in (capped, penalised):
        assert ("reuse_logits=True" in program_of(Tail(loss), {"recompute": "none"})) == (loss is capped)


@pytest.mark.parametrize(
    ("loss", "fix"),
    [
        (flat, {"tp": 2, "recompute": "chunked_loss"}),
        (smoothed, {"dp": 2, "tp": 2, "recompute": "chunked_loss", "num_microbatches": 2, "zero": 2}),
        (shifted, {"tp": 2, "recompute": "chunked_loss"}),
        (shifted, {"dp": 2, "recompute": "chunked_loss", "num_microbatches": 2, "zero": 3}),
        (flat, {"pp": 2, "tp": 2, "recompute": "chunked_loss", "num_microbatches": 4, "schedule": "zb_h1"}),
        (flat, {"tp": 2, "recompute": "full"}),
        (smoothed, {"tp": 2, "recompute": "selective", "num_microbatches": 2}),
        (penalised, {"tp": 2, "recompute": "none"}),
    ],
)
def test_steps_are_those_of_one_device(loss: Any, fix: dict[str, Any]) -> None:
    mesh = {axis: fix.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")}
    others = {name: value for name, value in fix.items() if name not in mesh}
    report = planner.verify(Tail(loss, bias=True), mesh, batch=batch(), fix=others, steps=1)
    assert report.ok, report.table()
    assert report.largest_error < 1e-9
    assert report.plan.step is not None and fix["recompute"] in report.plan.step.recompute


def test_a_gradient_that_is_differentiated_leaves_the_logits_alone() -> None:
    torch.manual_seed(0)
    weight, x, target = torch.randn(7, 4, dtype=torch.float64), torch.randn(5, 4), torch.randint(0, 7, (5,))

    def meta(loss: Any) -> torch.Tensor:
        start = weight.clone().requires_grad_()
        inner = loss(F.linear(x.double(), start), target).sum()
        (gradient,) = torch.autograd.grad(inner, start, create_graph=True)
        outer = loss(F.linear(x.double(), start - 0.1 * gradient), target).sum()
        return torch.autograd.grad(outer + inner, start)[0]

    ours = meta(functools.partial(runtime.kernels.cross_entropy, reuse_logits=True))
    theirs = meta(functools.partial(F.cross_entropy, reduction="none"))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
