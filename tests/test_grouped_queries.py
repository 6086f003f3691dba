"""Repeated heads of keys become groups of query heads, however they are spelled, in the program and in its accounts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from passes.autograd import Activations, kept_under
from passes.capture import capture
from passes.ir.graph import Graph, Node
from planner.sharding_ilp.liveness import live_nodes
from tests.capture_parity import assert_parity

pytestmark = pytest.mark.usefixtures("models_traced_once")

SDPA = "aten.scaled_dot_product_attention.default"
HEADS, MEMBERS, WIDTH = 2, 3, 4
Repeat = Callable[[torch.Tensor], torch.Tensor]


def repeat_kv(x: torch.Tensor) -> torch.Tensor:
    """As Hugging Face spells it, on [batch, heads, length, width]."""
    batch, heads, length, width = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, MEMBERS, length, width)
    return x.reshape(batch, heads * MEMBERS, length, width)


def repeat_before_transpose(x: torch.Tensor) -> torch.Tensor:
    """As torchtitan spells it, on [batch, length, heads, width]."""
    x = x.transpose(1, 2)
    batch, length, heads, width = x.shape
    x = x.unsqueeze(3).expand(batch, length, heads, MEMBERS, width)
    return x.reshape(batch, length, heads * MEMBERS, width).transpose(1, 2)


SPELLINGS: dict[str, Repeat] = {
    "expand and reshape": repeat_kv,
    "before the transpose": repeat_before_transpose,
    "before a permutation": lambda x: repeat_before_transpose(x).transpose(1, 2).permute(0, 2, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(MEMBERS, dim=1),
    "repeat_interleave from the end": lambda x: x.repeat_interleave(MEMBERS, -3).contiguous(),
    "repeat": lambda x: x.unsqueeze(2).repeat(1, 1, MEMBERS, 1, 1).flatten(1, 2),
    "one head for all": lambda x: x[:, :1].expand(-1, HEADS * MEMBERS, -1, -1),
    "told by the model": lambda x: x,
}


class Grouped(nn.Module):
    """Causal attention of six query heads to two heads of keys that ``repeat`` repeats."""

    def __init__(self, repeat: Repeat, repeat_values: Repeat | None = None, *, told: bool = False) -> None:
        super().__init__()
        self.repeat, self.repeat_values = repeat, repeat_values or repeat
        self.told = told
        self.q = nn.Linear(WIDTH, HEADS * MEMBERS * WIDTH, dtype=torch.float64)
        self.kv = nn.Linear(WIDTH, 2 * HEADS * WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.q(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        key, value = (each.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for each in self.kv(x).chunk(2, -1))
        key, value = self.repeat(key), self.repeat_values(value)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.told)
        return attended.square().sum()


def attention_of(graph: Graph) -> Node:
    (node,) = (node for node in graph.nodes if node.op == SDPA)
    return node


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_told_to_attention(spelling: str) -> None:
    torch.manual_seed(0)
    graph = assert_parity(
        Grouped(SPELLINGS[spelling], told=spelling == "told by the model"),
        args=(torch.randn(2, 5, WIDTH, dtype=torch.float64),),
    )
    node = attention_of(graph)
    heads = 1 if spelling == "one head for all" else HEADS
    assert node.kwargs["enable_gqa"]
    assert [graph.values[name].shape[1] for name in node.inputs] == [HEADS * MEMBERS, heads, heads]
    assert not {node.op for node in graph.nodes} & {"aten.expand.default", "aten.repeat_interleave.self_int"}


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (repeat_kv, lambda x: x.repeat(1, MEMBERS, 1, 1)),  # heads 0, 1, 0, 1, … are no groups
        (lambda x: x.repeat(1, MEMBERS, 1, 1), lambda x: x.repeat(1, MEMBERS, 1, 1)),
        (repeat_kv, lambda x: torch.cat([x, x + 1, x], 1)),
        (repeat_kv, lambda x: x[:, :1].expand(-1, HEADS * MEMBERS, -1, -1)),  # keys in two groups, values in one
    ],
)
def test_other_repetitions_stay(keys: Repeat, values: Repeat) -> None:
    torch.manual_seed(0)
    graph = assert_parity(Grouped(keys, values), args=(torch.randn(2, 5, WIDTH, dtype=torch.float64),))
    assert "enable_gqa" not in attention_of(graph).kwargs


def test_half_precision_keeps_the_heads_of_keys_once_and_float32_with_its_copies() -> None:
    """Flash attention knows of groups; the kernel of float32 on a GPU does not, and keeps every copy it is given."""
    saved = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = Grouped(repeat_kv).to("meta", dtype)
        graph = capture(model, args=(torch.zeros(2, 5, WIDTH, dtype=dtype, device="meta"),))
        activations = Activations.of(graph, live_nodes(graph))
        part = kept_under(activations, [node.name for node in graph.nodes if not node.constant], "none")
        saved[dtype] = sum(extra.num_bytes for extra in part.extras) // dtype.itemsize
    copies = 2 * (2 * HEADS * MEMBERS * 5 * WIDTH)
    assert saved[torch.float32] >= copies > saved[torch.bfloat16]


@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=2"])
def test_more_ranks_than_heads_of_keys_still_cut_the_query_heads(mesh: str) -> None:
    """Four query heads to two heads of keys: each of four ranks picks its own, on one axis or on two."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        max_position_embeddings=32, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    pins = {"*:aten.scaled_dot_product_attention*": dict.fromkeys(("tp",) if mesh == "tp=4" else ("dp", "tp"), "S(1)")}
    report = planner.verify(config, mesh, constraints=pins, batch_size=2, steps=1)
    assert report.ok, report.table()
    (strategy,) = {node.strategy for node in report.plan.nodes.values() if "scaled_dot" in node.op}
    assert strategy == (("cut m",) if mesh == "tp=4" else ("cut h", "cut m"))
