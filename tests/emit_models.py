"""Models with plans whose choices are pinned, for golden programs: each is a model, a mesh, and one feature."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cost_models import Cluster
from passes.capture import capture
from passes.chains import chain_up
from passes.emit import Program, emit
from passes.fuse import pair_rotaries
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.pipeline_cut import step_programs
from passes.plan.plan_data import FusionPlan
from planner.fusing import fused_for_planning
from planner.library import load_config
from planner.planning import capture_for_planning, plan_graph
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.plan_step import plan_step
from tests.joint_axes_worker import PINS, Turn
from tests.small_models import TiedClassifier, token_batch

Pins = Mapping[str, Mapping[str, str]]
SAMPLES: Pins = {"input:*": {"dp": "S(0)"}}
#: Data parallel as such: a step of one micro-batch with nothing sharded.
WHOLE: dict[str, Any] = {"zero": 0, "num_microbatches": 1, "recompute": "none"}
#: Megatron's: the first matrix of a pair by columns, the second by rows.
COLUMNS_AND_ROWS: Pins = {
    **{f"*.{name}.weight": {"tp": "S(0)"} for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")},
    **{f"*.{name}.weight": {"tp": "S(1)"} for name in ("o_proj", "down_proj")},
    **{key: {"tp": "I"} for key in ("*norm.weight", "*embed_tokens.weight", "lm_head.weight")},
}
#: Between those, tokens are split, as in Megatron's sequence parallelism.
ROWS_OF_TOKENS: Pins = {
    "*norm": {"tp": "S(1)"},
    **{f"*.{name}": {"tp": "S(2)"} for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")},
}
#: Context parallelism: tokens are split all through, keys and values gathered.
TOKENS: Pins = {
    "input:input_ids": {"cp": "S(1)"},
    **{name: {"cp": "S(1)"} for name in ("*norm", "*.q_proj", "*.o_proj", "*.gate_proj", "*.up_proj", "*.down_proj")},
}
#: The same of GPT-2, whose weights are transposed, and of its biases.
GPT2_COLUMNS_AND_ROWS: Pins = {
    **{key: {"tp": "S(1)"} for key in ("*.c_fc.weight",)},
    **{key: {"tp": "S(0)"} for key in ("*.mlp.c_proj.weight", "*.c_fc.bias")},
    **{key: {"tp": "I"} for key in ("*.attn.*", "*.wte.*", "*.wpe.*", "*.ln_*")},
}


class Images(nn.Module):
    """Convolutions, running statistics, pooling and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Conv2d(8, 16, 3, groups=2)
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.body(self.stem(images)))
        return self.head(F.adaptive_avg_pool2d(features, 1).flatten(1)).square().mean()


class Experts(nn.Module):
    """A router that sends each token to one of four experts, by one-hot masks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.up = nn.Parameter(torch.ones(4, 8, 16))
        self.down = nn.Parameter(torch.ones(4, 16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = self.router(x).softmax(-1)
        chosen = F.one_hot(probabilities.argmax(-1), 4).to(x.dtype) * probabilities
        hidden = F.gelu(torch.einsum("bsd,edh->besh", x, self.up))
        expert_outputs = torch.einsum("besh,ehd->besd", hidden, self.down)
        return (x + torch.einsum("besd,bse->bsd", expert_outputs, chosen)).square().mean()


class Powered(nn.Module):
    """An operator that no rule is known for between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.linalg.matrix_power(self.first(x), 3)).square().mean()


class Scaled(nn.Module):
    """A temperature without dims as an input, and a mapping of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, temperature: torch.Tensor) -> dict[str, Any]:
        scores = self.linear(x) / temperature
        return {"loss": scores.logsumexp(-1).mean(), "parts": {"scores": scores, "largest": scores.amax(-1)}}


class Counted(nn.Module):
    """Buffers that its forward writes, read by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.linear(x))
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return (x - self.mean).square().mean()


class Wrapped(nn.Module):
    """Computes nothing itself, as T5's block: its children do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wrapped() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def library(name: str, *, batch_size: int = 8, **changes: Any) -> Callable[[], Graph]:
    """A model of the library with some entries of its config changed."""

    def captured() -> Graph:
        pytest.importorskip("transformers")
        config = load_config(name)
        config.update(changes)
        return capture_for_planning(config, batch_size=batch_size, seq_len=None if "vit" in name else 16)

    return captured


def logits_alone() -> Graph:
    """A call without labels, as generation makes it."""
    pytest.importorskip("transformers")
    inputs = {"input_ids": torch.zeros(8, 16, dtype=torch.int64, device="meta")}
    return capture_for_planning(load_config("tiny-llama"), example_inputs=inputs, training=False)


def module(build: Callable[[], nn.Module], **inputs: tuple[int, ...]) -> Callable[[], Graph]:
    """A module on inputs of these shapes."""
    return lambda: capture(build(), kwargs={name: torch.ones(shape) for name, shape in inputs.items()})


GRAPHS: dict[str, Callable[[], Graph]] = {
    "llama": library("tiny-llama"),
    "logits": logits_alone,
    "gpt2": library("tiny-gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
    "bert": library("tiny-bert", num_hidden_layers=2),
    "t5": library("tiny-t5"),
    "vit": library("tiny-vit", num_hidden_layers=2),
    "tied": lambda: capture(TiedClassifier(), kwargs=token_batch()),
    "images": module(Images, images=(8, 3, 8, 8)),
    "experts": module(Experts, x=(8, 4, 8)),
    "powered": module(Powered, x=(8, 8)),
    "scaled": module(Scaled, x=(8, 8), temperature=()),
    "counted": module(Counted, x=(8, 8)),
    "turn": module(Turn, x=(8, 8)),
    "stacked": module(Stacked, x=(8, 8)),
}


@functools.cache
def graph_of(name: str) -> tuple[Graph, FusionPlan]:
    """A graph of ``GRAPHS`` with fused operators."""
    return fused_for_planning(GRAPHS[name]())


def programs(name: str, mesh: str, pins: Pins | None = None, **fix: Any) -> tuple[Program, ...]:
    """The programs of every chunk; with ``fix`` of a whole step whose other choices are the search's."""
    return programs_of(graph_of(name), mesh, "dgx-h100:1", pins, **fix)


def programs_of(
    fused: tuple[Graph, FusionPlan], mesh: str, cluster: str, pins: Pins | None = None, **fix: Any
) -> tuple[Program, ...]:
    """As ``programs``, of a fused graph, on the first devices of a cluster."""
    graph, fusion = fused
    shape = MeshShape.parse(mesh)
    hardware = Cluster.parse(cluster).subset(shape.num_devices)
    if fix:
        axes = {"pp": 1, "dp": 1, "cp": 1, "tp": 1, **shape.as_dict()}
        plan = plan_step(graph, hardware, read_demands({**axes, **fix}), pins=pins)
    else:
        plan = plan_graph(graph, hardware, mesh=shape, constraints=pins)
    outputs = None if graph.loss else tuple(graph.outputs)
    stages = step_programs(graph, dataclasses.replace(plan, fusion=fusion), outputs=outputs).stages
    return tuple(emit(chain_up(pair_rotaries(stage.sharded))) for stage in stages)


@functools.cache
def pipelined() -> tuple[Program, ...]:
    """Four chunks of a model of four layers, a micro-batch at a time."""
    return programs("llama", "pp=4", num_microbatches=4, schedule="1f1b", recompute="none", zero=0)


def _case(name: str, mesh: str, pins: Pins | None = None, **fix: Any) -> Callable[[], Program]:
    return lambda: programs(name, mesh, pins, **fix)[0]


CASES: dict[str, Callable[[], Program]] = {
    "llama_on_one_device": _case("llama", "dp=1"),
    "llama_data_parallel": _case("llama", "dp=2", **WHOLE),
    "llama_tensor_parallel": _case("llama", "tp=2", COLUMNS_AND_ROWS),
    "llama_sequence_parallel": _case("llama", "tp=2", {**COLUMNS_AND_ROWS, **ROWS_OF_TOKENS}),
    "llama_context_parallel": _case("llama", "cp=2", TOKENS),
    "llama_zero_2": _case("llama", "dp=2", zero=2, num_microbatches=1, recompute="none"),
    "llama_zero_3": _case("llama", "dp=2", zero=3, num_microbatches=2, recompute="none"),
    "llama_recomputed": _case("llama", "dp=2", zero=1, num_microbatches=2, recompute="full"),
    "llama_chunked_loss": _case("llama", "dp=2", zero=0, num_microbatches=1, recompute="chunked_loss"),
    "llama_first_of_four": lambda: pipelined()[0],
    "llama_second_of_four": lambda: pipelined()[1],
    "llama_last_of_four": lambda: pipelined()[3],
    "llama_logits": _case("logits", "tp=2", COLUMNS_AND_ROWS),
    "gpt2_dropout": _case("gpt2", "tp=2", GPT2_COLUMNS_AND_ROWS),
    "bert": _case("bert", "dp=2", **WHOLE),
    "t5_cross_attention": _case("t5", "dp=2", **WHOLE),
    "vit": _case("vit", "dp=2", **WHOLE),
    "tied_weights": _case("tied", "tp=2", {"embedding.weight": {"tp": "S(0)"}}),
    "vocabulary_cut": _case("tied", "tp=2", {"embedding.weight": {"tp": "S(0)"}, "embedding": {"tp": "P"}}),
    "images": _case("images", "dp=2", **WHOLE),
    "experts": _case("experts", "tp=2", {"up": {"tp": "S(0)"}, "down": {"tp": "S(0)"}}),
    "unknown_operator": _case("powered", "dp=2", {**SAMPLES, "first": {"dp": "S(0)"}, "last": {"dp": "S(0)"}}),
    "mapping_of_outputs": _case("scaled", "dp=2", {"input:x": {"dp": "S(0)"}, "linear": {"dp": "S(0)"}}),
    "buffers": _case("counted", "dp=2", {**SAMPLES, "linear": {"dp": "S(0)"}}),
    "joint_axes": _case("turn", "dp=2,tp=2", PINS),
}
