"""Biases of attention that are computed reach it with a dense last dim, copied once where they are turned."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from passes.capture.capture import capture
from planner.library import build_model, load_config, random_batch

ATTENTION, COPY = "aten.scaled_dot_product_attention.default", "aten.contiguous.default"


class Biased(nn.Module):
    """Attention twice with one relative bias [heads, length, keys], looked up as [length, keys, heads]."""

    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        self.bias = nn.Embedding(16, 4)
        self.scaled = scaled

    def forward(self, x: Tensor) -> Tensor:
        distance = (torch.arange(8).unsqueeze(1) - torch.arange(8)).abs()
        bias = self.bias(distance).permute(2, 0, 1)
        if self.scaled:
            bias = bias * 2  # in memory as what it is made of
        heads = x.view(2, 8, 4, 16).transpose(1, 2)
        for _ in range(2):
            heads = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)
        return heads.square().mean()


def copies(model: nn.Module, batch: dict[str, Tensor]) -> list[str]:
    """Operators whose results are copied, by the name of what they copy."""
    graph = capture(model, kwargs=batch)
    ops = {node.output.name: node.op for node in graph.nodes if len(node.outputs) == 1}
    return [ops[node.inputs[0]] for node in graph.nodes if node.op == COPY]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_turned_bias_is_copied_once(scaled: bool) -> None:
    batch = {"x": torch.randn(2, 8, 64)}
    assert copies(Biased(scaled=scaled), batch) == ["aten.permute.default"]


def test_attention_gets_rows_that_fused_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's, encoder and decoder, while the program of its plan runs."""
    config = load_config("tiny-t5")
    batch = random_batch(config, batch_size=2, seq_len=8)
    parallel = planner.compile(build_model(config, device="cpu").train(), example_inputs=batch)
    strides, attention = [], F.scaled_dot_product_attention

    def noted(*args: Tensor, attn_mask: Tensor | None = None, **kwargs: object) -> Tensor:
        if attn_mask is not None and attn_mask.requires_grad:
            strides.append(attn_mask.stride(-1))
        return attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    parallel.train_step(**batch)
    assert strides and set(strides) == {1}
