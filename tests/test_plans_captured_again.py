"""What looks at a saved plan captures its model as it was planned: for inference, with flags, with the values read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import planner
from passes.plan import Plan
from planner.inspection.why_not import why_not


def _plan(model: str, **options: object) -> Plan:
    return planner.plan(model, "dgx-h100:1", num_devices=2, global_batch=4, max_programs=10, **options)


def test_a_plan_of_inference_is_explained_and_asked_for_inference() -> None:
    plan = _plan("tiny-llama", seq_len=16, training=False)
    prices = plan.explain("lm_head").prices
    assert sum(prices.values()) == pytest.approx(plan.certificate.objective, rel=1e-9)
    wished = why_not(plan, fix={"dp": 1}).wished
    assert wished is not None and not wished.training


@pytest.mark.parametrize("model, seq_len", [
    ("tiny-siglip", 16),  # a flag, ``return_loss``, which no plan has
    ("tiny-llava", 80),  # Python counts the tokens that stand for images
])  # fmt: skip
def test_an_audit_captures_a_config_on_the_batch_that_it_was_planned_on(model: str, seq_len: int) -> None:
    assert planner.audit(_plan(model, seq_len=seq_len), prove_bound=False).ok


def test_a_plan_that_was_loaded_is_saved_as_the_same_text() -> None:
    text = _plan("tiny-llama", seq_len=16, headroom=0).to_json()
    assert Plan.from_dict(json.loads(text)).to_json() == text


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _Layers(nn.Module):
    """Equal layers, whose last hands on to what keeps nothing for its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Layer() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) + 1.0).mean()


@pytest.mark.parametrize("options", [{"mesh": "dp=2"}, {"fix": {"dp": 2}}])
def test_what_the_last_of_equal_layers_does_not_keep_is_not_counted(options: dict[str, Any]) -> None:
    batch = {"x": torch.randn(4, 8)}
    plan = planner.plan(_Layers(), "cpu-local:2", example_inputs=batch, loss_fn=lambda out, batch: out, **options)
    assert plan.blocks
    report = planner.audit(plan, _Layers(), loss_fn=lambda out, batch: out, prove_bound=False)
    assert report.ok, report.table()
