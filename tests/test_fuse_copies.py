"""Repeated layers are fused as each by itself would be, without being tried out one by one."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import runtime.kernels  # noqa: F401  (registers the fused operators)
from passes.capture import capture
from passes.fuse import Fused, fuse
from passes.fuse.copies import FIRST, LAST, NOTHING, Copies, Ending
from passes.ir.graph import Graph, Node
from planner.library import build_model, example_batch

REWRITER = sys.modules["passes.fuse.fuse"]
MANY = FIRST + LAST + 3
CONFIGS = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
              "vocab_size": 64, "num_hidden_layers": MANY},
    "gpt2": {"n_embd": 32, "n_head": 4, "vocab_size": 64, "n_layer": MANY},
}  # fmt: skip


def one_by_one(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> Fused:
    """What the pass makes of a graph of which it takes no copies to be alike."""
    with monkeypatch.context() as patched:
        patched.setattr(Copies, "ending_of", lambda self, node: None)
        return fuse(graph.replace())


def library_graph(family: str) -> Graph:
    from transformers import AutoConfig

    model = build_model(AutoConfig.for_model(family, **CONFIGS[family]), dtype="float32", device="meta")
    return capture(model, kwargs=dict(example_batch(model, batch_size=2, seq_len=16)), copy_repeats=True)


class Layer(nn.Module):
    """A norm that something inside of is used of besides (a near miss), a gate, and a residual connection."""

    def __init__(self, *, leaks: bool) -> None:
        super().__init__()
        self.leaks = leaks
        self.weight = nn.Parameter(torch.ones(8))
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed = self.weight * (x * scale)
        gated = nn.functional.silu(self.gate(normed)) * self.up(normed)
        return x + gated * scale if self.leaks else x + gated


class Stack(nn.Module):
    def __init__(self, *, leaks: bool, gap: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(leaks=leaks) for _ in range(MANY))
        self.gap = gap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if self.gap and place == MANY // 2:
                x = torch.tanh(x)
        return x.sum()


def stack_graph(**options: bool) -> Graph:
    return capture(Stack(**options), args=(torch.randn(2, 3, 8, requires_grad=True),))


def assert_same(first: Fused, second: Fused) -> None:
    assert first.graph == second.graph
    assert (first.matches, first.near_misses) == (second.matches, second.near_misses)


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_of_a_model_are_fused_as_each_by_itself(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = library_graph(family)
    fused = fuse(graph)
    assert len(fused.matches) >= 2 * MANY
    assert_same(fused, one_by_one(graph, monkeypatch))


@pytest.mark.parametrize("options", [{"leaks": False}, {"leaks": True}, {"leaks": False, "gap": True}], ids=str)
def test_near_misses_and_gaps_are_those_of_every_layer(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = stack_graph(**options)
    fused = fuse(graph)
    misses = [miss for miss in fused.near_misses if "inside of it is used by" in miss.reason]
    assert len(misses) == (MANY if options["leaks"] else 0)
    assert len({miss.reason for miss in misses}) == len(misses), "each names the values of its own layer"
    assert_same(fused, one_by_one(graph, monkeypatch))


def test_layers_between_are_not_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    original = REWRITER.Rewriter._at

    def at(self: object, node: Node) -> None:
        looked_at.append(node.module_path)
        original(self, node)

    monkeypatch.setattr(REWRITER.Rewriter, "_at", at)
    fuse(stack_graph(leaks=False))
    places = {int(path.split(".")[1]) for path in looked_at if path.startswith("layers.")}
    assert places == {*range(FIRST), *range(MANY - LAST, MANY)}


def test_what_was_taken_over_wrongly_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second layer turns out to be unlike the ones that stood for it, every layer is tried by itself."""
    graph = stack_graph(leaks=False)
    expected = one_by_one(graph, monkeypatch)
    original = Copies.ending_of

    def ending_of(self: Copies, node: Node) -> Ending:
        return NOTHING if original(self, node) is not None else None

    monkeypatch.setattr(Copies, "ending_of", ending_of)
    monkeypatch.setattr(Copies, "agree", lambda self: False)
    assert_same(fuse(graph.replace()), expected)
