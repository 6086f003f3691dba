"""``planner.compile(model)`` with nothing else, and what the module answers in the original's place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import planner
from tests.adoption_worker import SCENARIOS
from tests.ranks import run_on_ranks


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_on_two_processes(name: str) -> None:
    assert run_on_ranks("adoption_worker", 2, None)[name] <= 1e-9


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False, **changes)
    return LlamaForCausalLM(config).eval()


def test_a_parallel_module_answers_as_its_original() -> None:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    original = llama()
    parallel = planner.compile(original)
    parallel.model.embed_tokens.weight.requires_grad_(False)
    assert inspect.signature(parallel.forward) == inspect.signature(model.forward)
    assert parallel.config.to_dict() == model.config.to_dict() and parallel.main_input_name == "input_ids"
    assert (parallel.dtype, parallel.device) == (model.dtype, model.device)
    tokens = torch.randint(0, 64, (2, 5))
    random_state = torch.get_rng_state()
    parallel.train_step(input_ids=tokens, labels=tokens)  # planned here, with what was frozen
    assert torch.equal(torch.get_rng_state(), random_state)  # a script draws on as without a plan
    assert all(parameter.requires_grad for parameter in original.parameters())
    for choice in ({}, {"only_trainable": True}, {"exclude_embeddings": True}):
        assert parallel.num_parameters(**choice) == model.num_parameters(**choice)
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": 2, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(tokens)
    assert parallel.generate(tokens, **options).tolist() == model.generate(tokens, **options).tolist()
    with pytest.raises(ValueError, match="call it on the model before"):
        parallel.resize_token_embeddings(128)
    with pytest.raises(AttributeError, match="neither a parallel module nor the LlamaForCausalLM"):
        _ = parallel.nothing_of_this_name
    assert not hasattr(parallel, "_orig_mod")


class Scaled(nn.Module):
    """Multiplies by a number of its config."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config = SimpleNamespace(scale=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.config.scale


def test_what_is_set_on_the_config_is_followed_though_nobody_holds_the_model() -> None:
    parallel = planner.compile(Scaled(), "dp=1")
    x = torch.ones(2, 4)
    first = parallel(x).detach()
    parallel.config.scale = 3.0
    torch.testing.assert_close(parallel(x).detach(), 3 * first)


def test_what_needs_the_mesh_before_the_first_call_is_refused() -> None:
    parallel = planner.compile(Scaled())
    with pytest.raises(ValueError, match="planned at the first call"):
        _ = parallel.num_data_ranks
    with pytest.raises(ValueError, match="give example_inputs to"):
        parallel(torch.ones(2, 4), local_inputs=True)


class Guessing(nn.Module):
    """Notes in its config how it was called, as Hugging Face's classifiers do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(problem=None)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.problem is None:
            self.config.problem = "regression"
        return self.linear(x)


def test_what_forward_sets_on_the_config_is_no_change_of_the_users() -> None:
    parallel = planner.compile(Guessing(), "dp=1")
    parallel(torch.ones(2, 4))
    parallel._engine.watch.update()
    assert parallel.config.problem is None and not parallel._engine.watch.changed


@pytest.mark.parametrize(
    "loss_of",
    [F.cross_entropy, lambda logits, target: -logits.log_softmax(-1).gather(-1, target[:, None]).mean()],
    ids=["cross entropy", "by hand"],
)
def test_losses_under_a_narrower_precision_are_in_float32(loss_of: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 5), {"input": torch.randn(6, 8), "target": torch.randint(5, (6,))}

    def loss_fn(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(logits, batch["target"])

    def loss_with(model: nn.Module, **options: Any) -> torch.Tensor:
        parallel = planner.compile(model, "dp=1", example_inputs=batch, loss_fn=loss_fn, **options)
        return parallel.train_step(**batch)

    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch["input"])
    expected = loss_fn(logits.float(), batch)  # as autocast computes both on a GPU
    torch.testing.assert_close(loss_with(model, precision="bfloat16"), expected.detach(), rtol=1e-6, atol=0)
    narrow = model.to(torch.bfloat16)  # which is told nothing else
    batch["input"] = batch["input"].bfloat16()
    assert loss_with(narrow).dtype == loss_with(narrow, precision="bfloat16").dtype == torch.bfloat16
