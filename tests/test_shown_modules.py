"""Submodules of a parallel module are found by their classes, and do what scripts ask of modules of those classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

import planner
from tests.small_models import seeded


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.0), nn.LayerNorm(16))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(16)) for _ in range(2)])
        self.heads = nn.ModuleDict({"a": nn.Linear(16, 4), "b": nn.Linear(16, 4, bias=False)})
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.body(x)
        for scale in self.scales:
            hidden = hidden * scale
        logits = self.heads["a"](hidden) + self.heads["b"](hidden) + self.shift
        return logits if y is None else F.cross_entropy(logits, y)


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.arange(8) % 4}


def freeze_batch_norms(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
            module.weight.requires_grad_(False)


def draw_again(model: Any) -> None:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 1 / module.in_features)

    model.apply(initialise)


def decay_linear_layers(model: Any) -> None:
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    model(**batch()).backward()
    torch.optim.SGD([{"params": linear, "weight_decay": 0.5}], lr=0.1).step()


def set_numbers(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1.0
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 0.5


def reset_statistics(model: Any) -> None:
    model(**batch()).backward()
    model.body[1].reset_running_stats()


def assign_buffers(model: Any) -> None:
    model.shift = torch.arange(4.0, dtype=torch.float64)
    model.body[1].running_mean = torch.ones(16, dtype=torch.float64)


def lists_of_modules(model: Any) -> None:
    with torch.no_grad():
        for scale in model.scales:
            scale.mul_(2.0)
        for name, head in model.heads.items():
            head.weight.mul_(len(name) + len(model.body))
        model.body[-1].bias.fill_(0.25)


@pytest.mark.parametrize(
    "change",
    [
        freeze_batch_norms, draw_again, decay_linear_layers, set_numbers, reset_statistics, assign_buffers,
        lists_of_modules,
    ],
)  # fmt: skip
def test_what_scripts_do_to_modules_of_a_kind_is_done(change: Any) -> None:
    single = seeded(Layers)
    parallel = planner.compile(seeded(Layers), "dp=1,tp=1", example_inputs=batch())
    losses = []
    for model in (parallel, single):
        change(model)
        losses.append(float(model(**batch()).detach()))
    state, expected = parallel.full_state_dict(), single.state_dict()
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert {name for name, value in expected.items() if not torch.allclose(state[name], value, rtol=1e-9)} == set()


REFUSED = {
    "called": (lambda model: model.heads["a"](torch.ones(2, 16)), "programs run forward of the whole model alone"),
    "replaced": (lambda model: setattr(model, "body", nn.Linear(6, 16)), "'body' of this parallel module cannot be"),
    "replaced below": (lambda model: setattr(model.body, "0", nn.Linear(6, 16)), "'body.0' of this parallel module"),
    "added": (
        lambda model: setattr(model, "probe", nn.Linear(4, 2)),
        "'probe' cannot be added to this parallel",
    ),
    "added below": (lambda model: model.body.append(nn.ReLU()), "'body.5' cannot be added"),
    "added to the front": (lambda model: model.body.insert(0, nn.ReLU()), "the modules of 'body' .* stay as planned"),
    "added by name": (lambda model: model.heads.update({"c": nn.Linear(16, 4)}), "'heads.c' cannot be added"),
    "new parameter": (lambda model: model.register_parameter("z", nn.Parameter(torch.ones(2))), "'z' cannot be added"),
    "new buffer": (lambda model: model.body[0].register_buffer("z", torch.ones(2)), "'body.0.z' cannot be added"),
    "other parameter": (
        lambda model: setattr(model.body[0], "weight", nn.Parameter(torch.ones(16, 6))),
        "'body.0.weight' of this parallel module cannot become another tensor",
    ),
    "no parameter": (lambda model: setattr(model.body[0], "bias", None), "'body.0.bias' .* cannot become another"),
    "removed": (lambda model: model.body.pop(4), "'body.4' of this parallel module cannot be removed"),
    "removed by name": (lambda model: model.heads.pop("a"), "the modules of 'heads' .* stay as planned"),
    "removed parameter": (lambda model: delattr(model.body[0], "bias"), "'body.0.bias' .* cannot be removed"),
    "other buffer": (
        lambda model: setattr(model, "shift", torch.zeros(5)),
        r"has shape \(4,\) and cannot become \(5,\)",
    ),
    "new number": (lambda model: setattr(model.body[0], "gain", 2.0), "would change nothing"),
    "hook": (lambda model: model.body[0].register_forward_hook(print), "would never be called"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_nothing_is_refused(case: str) -> None:
    act, message = REFUSED[case]
    parallel = planner.compile(seeded(Layers), "dp=1,tp=1", example_inputs=batch())
    with pytest.raises(ValueError, match=message):
        act(parallel)


def test_what_changes_no_tensor_may_be_put_beside_the_model() -> None:
    parallel = planner.compile(seeded(Layers), "dp=1,tp=1", example_inputs=batch())
    parallel.loss = nn.CrossEntropyLoss()
    parallel.body[0].weight = parallel.body[0].weight
    parallel.register_buffer("shift", torch.full((4,), 2.0, dtype=torch.float64))
    assert set(parallel.full_state_dict()) == set(parallel.state_dict())
    assert parallel.full_state_dict()["shift"].tolist() == [2.0] * 4


def test_statistics_are_averaged_over_batches_as_torch_does() -> None:
    model = seeded(Layers)
    parallel = planner.compile(seeded(Layers), "dp=1,tp=1", example_inputs=batch())
    for module in (model, parallel):
        update_bn([batch()["x"], 2 * batch()["x"] + 1], module)
    averaged = {name: one for name, one in model.named_buffers() if "running" in name}
    weights = parallel.full_state_dict()
    assert averaged and all(torch.allclose(weights[name], one, rtol=1e-9) for name, one in averaged.items())


class Switched(nn.Module):
    """Has the attributes of the module that a switch chooses, as PEFT's wrappers of modules to save."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self._is_first = nn.Linear(6, 4), nn.Linear(6, 4), False

    @property
    def is_first(self) -> bool:
        return self._is_first

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.first if self.is_first else self.second, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x).square().mean()


def test_attributes_that_a_class_looks_up_itself_are_found() -> None:
    """transformers asks every module for some that none has."""
    x = batch()["x"]
    parallel = planner.compile(seeded(lambda: nn.Sequential(Switched())), "dp=1", example_inputs=(x,))
    switched = parallel.get_submodule("0")
    assert isinstance(switched, Switched) and not hasattr(switched, "hf_device_map")
    assert switched.weight is switched.second.weight is dict(parallel.named_parameters())["0.second.weight"]


class Settings(nn.Module):
    """Sets what its forward does by methods, as PEFT's models disable their adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Switched()
        self.factors, self.layer.powers, self.is_square, self.calls = {"out": 1.0}, [2], False, 0

    @contextmanager
    def squared(self) -> Iterator[None]:
        self.layer._is_first = self.is_square = True
        yield
        self.layer._is_first = self.is_square = False

    def set_factor(self, factor: float) -> None:
        self.factors["out"] = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = self.layer(x + self.layer.is_first).pow(self.layer.powers[0]) * self.factors["out"]
        return loss.square() if self.is_square else loss


@pytest.mark.filterwarnings("ignore:forward of Settings changes 'calls'")
def test_what_methods_of_the_model_set_is_followed() -> None:
    x = batch()["x"]
    parallel, single = planner.compile(seeded(Settings), "dp=1", example_inputs=(x,)), seeded(Settings)
    losses = []
    for model in (parallel, single):
        before = float(model(x).detach())
        with model.squared():
            inside = float(model(x).detach())
        behind = float(model(x).detach())
        model.set_factor(3.0)
        scaled = float(model(x).detach())
        model.layer.powers[0] = 3
        losses.append([before, inside, behind, scaled, float(model(x).detach())])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9) and len(set(losses[1])) == 4
    assert parallel._engine._maker.captures.count == 4  # behind ``squared`` the first one's program runs again


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_parallel_module_is_converted_to_no_other_dtype(dtype: torch.dtype) -> None:
    """Of each dtype that it holds: one of float64 would else compute in float32 and show float64."""
    parallel = planner.compile(seeded(Layers).double(), example_inputs=batch())
    if dtype == torch.float64:
        assert parallel.to(dtype) is parallel
        return
    with pytest.raises(ValueError, match="convert the model before"):
        parallel.to(dtype)
    assert {parameter.dtype for parameter in parallel.parameters()} == {torch.float64}
    assert parallel(**batch()).dtype == torch.float64
