"""Programs of models of the config library: short, narrow, and named by what values are for."""

from __future__ import annotations

import ast
import re

import pytest

from passes.emit.role_tables import PARTS, VIEWS
from planner.library import load_config
from planner.planning import capture_for_planning
from tests.emit_models import COLUMNS_AND_ROWS, fused_for_planning, programs_of

pytestmark = pytest.mark.usefixtures("models_traced_once")

pytest.importorskip("transformers")

#: On one device, cut to two layers, so that capture and search take no time.
MODELS = ("qwen3-0.6b", "gpt-j-6b", "phi-3-mini", "falcon-7b")
OPERATORS = re.compile(rf"({'|'.join((VIEWS | PARTS | {'linear', 'matmul', 'add', 'mul'}) - {'t'})})(_\\d+)?")


def names_in(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def test_llama_3_70b_on_32_devices_is_read_in_one_sitting() -> None:
    """The program of all 80 layers: under 150 lines of at most 120 columns."""
    graph = capture_for_planning(load_config("llama-3-70b"), batch_size=32, seq_len=4096)
    pins = {**COLUMNS_AND_ROWS, "input:*": {"dp": "S(0)"}, "*weight": {"dp": "I"}}
    (program,) = programs_of(fused_for_planning(graph), "dp=4,tp=8", "dgx-h100:4", pins)
    source = program.source
    lines = source.splitlines()
    assert len(lines) < 150 and max(map(len, lines)) <= 120
    assert "class LlamaDecoderLayer(Block):  # model.layers.{0..79}" in lines
    assert {"q", "k", "v", "attention", "gate", "up", "logits", "loss"} <= names_in(source)
    for together in ("q, k, v = F.linear(", "gate, up = F.linear("):
        assert any(line.strip().startswith(together) for line in lines)


@pytest.mark.parametrize("name", MODELS)
def test_values_of_every_model_have_names_by_role(name: str) -> None:
    config = load_config(name)
    config.update({"num_hidden_layers": 2})
    graph = capture_for_planning(config, batch_size=2, seq_len=16)
    (program,) = programs_of(fused_for_planning(graph), "dp=1", "dgx-h100:1")
    source = program.source
    assert max(map(len, source.splitlines())) <= 120
    names = names_in(source)
    assert {"x", "h", "q", "k", "v", "attention", "logits", "loss"} <= names
    assert not list(filter(OPERATORS.fullmatch, names))
