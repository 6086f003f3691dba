"""Losses of models that widen their logits read the narrow ones: no float32 copy of [tokens, vocabulary]."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from passes.capture import capture
from passes.ir.graph import Graph
from planner.library import build_model, load_config, random_batch

WIDTH, CLASSES = 16, 2000


class Shifted(nn.Module):
    """Logits widened, shifted by one, flattened, as many models write it."""

    def __init__(self, *, returns_wide: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.returns_wide = returns_wide

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(ids)).float()
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), ids[:, 1:].reshape(-1), label_smoothing=0.1)
        return {"loss": loss, **({"logits": logits} if self.returns_wide else {})}


def widest(graph: Graph) -> int:
    """Elements of the largest float32 value."""
    values = (value for node in graph.nodes for value in node.outputs)
    return max(math.prod(value.shape) for value in values if value.dtype == "float32")


def ids() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(CLASSES, (4, 6))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_models_of_the_library_hold_no_wide_logits(name: str) -> None:
    config = load_config(name)
    model = build_model(config, dtype="bfloat16", device="cpu")
    graph = capture(model, kwargs=random_batch(config, batch_size=4, seq_len=32))
    assert widest(graph) < 4 * 32 * config.vocab_size
    (loss,) = (node for node in graph.nodes if node.op == "meshwright.cross_entropy")
    assert loss.kwargs == {"dtype": "dtype:float32"} and loss.output.dtype == "float32"


def test_logits_that_come_out_wide_are_widened() -> None:
    assert widest(capture(Shifted(returns_wide=True).bfloat16(), kwargs={"ids": ids()})) == 4 * 6 * CLASSES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recompute", ["none", "chunked_loss"])
def test_loss_and_gradients_are_those_of_the_widened_logits(dtype: torch.dtype, recompute: str) -> None:
    torch.manual_seed(0)
    model = Shifted().to(dtype)
    parallel = planner.compile(
        copy.deepcopy(model), "dgx-h100:1x1", example_inputs={"ids": ids()}, fix={"recompute": recompute}
    )
    loss = parallel.train_step(ids=ids())
    expected = model(ids())["loss"]
    expected.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    for name, gradient in parallel.full_gradients().items():
        grad = model.get_parameter(name).grad
        # Both round to 16 bits (2^-8 of a number), products of many of them at other places.
        torch.testing.assert_close(gradient.to(dtype), grad, rtol=2e-2, atol=2e-2 * float(grad.abs().max()))
