"""The copy of a model that programs are captured from: its modules and settings, nothing large, nothing uncopyable."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import planner
from runtime.calls.skeleton import skeleton


class Uncopyable:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise AssertionError("nobody may copy this")

    __copy__ = __reduce_ex__ = __deepcopy__  # type: ignore[assignment]


class Laden(nn.Module):
    """Beside its weights: a table that is no buffer, data, a lock, and a config that its layer has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=2.0)
        self.layer = nn.Linear(4, 4)
        self.layer.config = self.config
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.layer.weight
        self.register_buffer("mask", torch.ones(4))
        self.table = torch.arange(4.0)
        self.data, self.lock = [Uncopyable()], threading.Lock()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.tied(self.layer(x)) * self.mask + self.table * self.config.scale
        return {"loss": hidden.square().mean()}


def test_what_is_no_module_and_no_setting_is_shared() -> None:
    model = Laden()
    lean = skeleton(model)
    assert lean.table is model.table and lean.lock is model.lock and lean.data[0] is model.data[0]
    assert lean.config is not model.config and lean.config is lean.layer.config and lean.config.scale == 2.0
    assert lean.layer.weight.is_meta and lean.layer.weight is lean.tied.weight and lean.mask.is_meta
    assert not model.layer.weight.is_meta and lean.data is not model.data


def test_a_model_with_what_cannot_be_copied_trains_and_follows_its_config() -> None:
    torch.manual_seed(0)
    model, x = Laden(), torch.randn(3, 4)
    parallel = planner.compile(model, "dp=1", example_inputs={"x": x})
    for scale in (2.0, 3.0):
        model.config.scale = scale
        torch.testing.assert_close(parallel(x=x)["loss"], model(x)["loss"])
