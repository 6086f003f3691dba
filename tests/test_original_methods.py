"""Methods of a model, called on its parallel module: what they give, freeze and write is the parallel module's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.library import load_config, random_batch
from planner.verification.verify_model import real_module
from tests.small_models import seeded

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Managed(nn.Module):
    """Makes its optimizer, freezes its first layer and keeps its weights in bounds by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(8, 2)
        self.settings = {"scale": 1.0}
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(self.first(x).tanh())).square().mean() * self.settings["scale"]  # type: ignore[no-any-return]

    def make_optimizer(self) -> torch.optim.Optimizer:
        decayed = [one for one in self.parameters() if one.dim() > 1]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": [self.last.bias]}], lr=0.1)

    def last_parameters(self) -> Iterator[nn.Parameter]:
        return self.last.parameters()

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.first.parameters()), "lr": 0.1}, {"params": (self.last.weight,), "lr": 0.01}]

    def head(self) -> nn.Module:
        return self.last

    @property
    def decayed(self) -> list[nn.Parameter]:
        return [one for one in self.parameters() if one.dim() > 1]

    @property
    def own_settings(self) -> dict[str, float]:
        return self.settings

    def all_settings(self) -> dict[str, float]:
        return self.settings

    @property
    def bias(self) -> nn.Parameter:
        return self.last.bias

    @property
    def scale(self) -> torch.Tensor:
        return self.last.weight.abs().mean()

    def freeze(self) -> None:
        for parameter in self.first.parameters():
            parameter.requires_grad = False

    def drop(self) -> None:
        self.dropout.train()

    @torch.no_grad()
    def bound(self) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    def normalise(self) -> None:
        self.last.weight.data = self.last.weight.detach() / self.last.weight.detach().norm()

    def halve_gradients(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def parallel_module() -> Any:
    return planner.compile(seeded(Managed), "dp=1,tp=1", example_inputs={"x": X})


def trained(module: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    for _ in range(2):
        module(x=X).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(module.full_state_dict() if hasattr(module, "full_state_dict") else module.state_dict())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "optimizer": lambda module: module.make_optimizer(),
    "iterator": lambda module: torch.optim.SGD(module.last_parameters(), lr=0.1),
    "groups": lambda module: torch.optim.SGD(module.groups()),
    "module": lambda module: torch.optim.SGD(module.head().parameters(), lr=0.1),
    "properties": lambda module: torch.optim.SGD([*module.decayed, module.bias], lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_that_a_method_gives_are_trained(kind: str) -> None:
    weights, expected = (trained(one, OPTIMIZERS[kind](one)) for one in (parallel_module(), seeded(Managed)))
    assert max(float((weights[name] - expected[name]).abs().max()) for name in expected) < 1e-12


def test_a_module_that_a_method_gives_is_the_one_that_users_see() -> None:
    parallel = parallel_module()
    assert parallel.head() is parallel.last and parallel.head().weight is parallel.last.weight


def test_a_property_that_computes_with_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="scale computes with weights"):
        _ = parallel_module().scale


@pytest.mark.parametrize("settings", [lambda module: module.own_settings, lambda module: module.all_settings()])
def test_what_is_written_to_settings_that_the_model_gives_counts(settings: Callable[[Any], dict[str, float]]) -> None:
    parallel = parallel_module()
    before = parallel(x=X).item()
    settings(parallel)["scale"] = 3.0
    assert parallel(x=X).item() == pytest.approx(3.0 * before, rel=1e-12)


def test_embeddings_that_transformers_gives_are_frozen() -> None:
    model = real_module(load_config("tiny-llama"), dtype=torch.float64, seed=0)
    batch = random_batch(model, batch_size=2, seq_len=4)
    parallel: Any = planner.compile(model, "dp=1,tp=1", example_inputs=batch)
    assert parallel.get_input_embeddings() is parallel.model.embed_tokens
    parallel.get_input_embeddings().requires_grad_(False)
    parallel(**batch).loss.backward()
    assert parallel.model.embed_tokens.weight.grad is None and parallel.lm_head.weight.grad is not None


def test_what_a_method_freezes_is_frozen() -> None:
    parallel = parallel_module()
    parallel.freeze()
    parallel(x=X).backward()
    assert parallel.first.weight.grad is None and parallel.last.weight.grad is not None


def test_a_mode_that_a_method_sets_counts() -> None:
    parallel = parallel_module()
    before = parallel(x=X).item()
    parallel.drop()
    assert parallel.dropout.training and parallel(x=X).item() != before


@pytest.mark.parametrize("name", ["bound", "normalise", "halve_gradients"])
def test_a_method_that_would_change_nothing_says_how_it_does(name: str) -> None:
    parallel, single = parallel_module(), seeded(Managed)
    for module in (parallel, single):
        module(x=X).backward()
    with pytest.raises(ValueError, match=rf"call Managed\.{name}\(parallel, …\)"):
        getattr(parallel, name)()
    for module in (parallel, single):
        getattr(Managed, name)(module)
    weights, gradients = parallel.full_state_dict(), parallel.full_gradients()
    for key, parameter in single.named_parameters():
        torch.testing.assert_close(weights[key], parameter.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=0, atol=1e-12)
