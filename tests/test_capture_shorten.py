"""Capturing a model with repeated layers copied gives the very graph that tracing every layer gives."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from passes.capture import capture
from passes.ir.graph import Graph
from planner.library import build_model, example_batch, load_config

capture_module = importlib.import_module("passes.capture.capture")
DEPTH_ENTRIES = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")


def both(model: torch.nn.Module, kwargs: Mapping[str, Any], **options: Any) -> tuple[Graph, Graph | None]:
    """The graph of the whole model, and that with copies (None where the layers cannot be copied)."""
    given = {"args": (), "kwargs": kwargs, "loss_fn": None, "training": None, **options}
    before = {name: id(module) for name, module in model.named_modules()}
    shortened = capture_module._capture_shortened(model, given)
    assert before == {name: id(module) for name, module in model.named_modules()}
    return capture(model, **given), shortened


@pytest.mark.parametrize(
    "name", ["tiny-llama", "tiny-gpt2", "tiny-bert", "tiny-t5", "tiny-vit", "tiny-opt", "tiny-bloom"]
)
def test_library_models(name: str) -> None:
    config = load_config(name)
    for entry in DEPTH_ENTRIES:
        if hasattr(config, entry):
            setattr(config, entry, 7)
    model = build_model(config)
    whole, shortened = both(model, example_batch(model, batch_size=2, seq_len=16))
    assert shortened == whole
