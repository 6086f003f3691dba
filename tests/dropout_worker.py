"""One rank of the tests of dropout under plans: GPT-2 with dropout trained on real processes, and alone on rank 0."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

import planner
from passes.capture import keep_float64
from planner.library import build_model, load_config, random_batch
from planner.verification.verify_model import slow_devices
from runtime import ops
from runtime.module.parallel_module import ParallelModule
from tests.random_oracle import dropping_as_on_one_device
from tests.ranks import answer, task
from tests.tracing import traced_once

SEED = 20
STEPS = 2


def dropping_gpt2() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 with dropout of embeddings, attention and residuals, and a global batch."""
    config = load_config("tiny-gpt2")
    config.n_layer = 2  # as many as make a block that repeats
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.1
    torch.manual_seed(0)
    model = build_model(config, device="cpu").double().train()
    return model, dict(random_batch(model, batch_size=8, seq_len=12))


def gradients_on_one_device(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Loss and gradients of every step, with masks from code that is not ours."""
    gradients_of_steps = []
    for step in range(1, STEPS + 1):
        model.zero_grad()
        with keep_float64(), dropping_as_on_one_device(step=step, seed=SEED):
            loss = model(**batch).loss
        loss.backward()
        gradients = {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}
        gradients_of_steps.append({"loss": loss.detach(), **gradients})
    return gradients_of_steps


def gradients_of_plan(parallel: ParallelModule, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The same of a parallel module, on every rank; the last step is a call that the script differentiates."""
    ops.seed(SEED)
    gradients_of_steps = []
    for step in range(1, STEPS + 1):
        parallel.zero_grad()
        if step < STEPS:
            loss = parallel.train_step(**batch)
        else:
            loss = parallel(**batch).loss
            loss.backward()
        gradients_of_steps.append({"loss": loss.detach(), **parallel.full_gradients()})
    return gradients_of_steps


def error_of(gradients_of_steps: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> float:
    """Largest difference of a tensor, relative to the largest gradient (of the loss: to itself)."""
    errors = []
    for one, other in zip(gradients_of_steps, expected, strict=True):
        assert one.keys() >= other.keys()
        largest = max(float(tensor.abs().max()) for name, tensor in other.items() if name != "loss")
        for name, tensor in other.items():
            scale = float(tensor.abs()) if name == "loss" else max(float(tensor.abs().max()), 1e-3 * largest)
            errors.append(float((one[name] - tensor).abs().max()) / scale)
    return max(errors)


def main() -> None:
    alone, num_ranks = os.environ["RANK"] == "0", int(os.environ["WORLD_SIZE"])
    model, batch = dropping_gpt2()
    expected = gradients_on_one_device(model, batch) if alone else []
    gradients_of_steps: dict[str, Any] = {}
    for name, options in task().items():
        target = options.pop("mesh", None) or slow_devices(num_ranks)
        options |= {} if "fix" in options else {"cluster": slow_devices(num_ranks)}
        with keep_float64():
            parallel = planner.compile(copy.deepcopy(model), target, example_inputs=batch, **options)
            result = gradients_of_plan(parallel, batch)
        gradients_of_steps[name] = error_of(result, expected) if expected else None
    answer(gradients_of_steps)


if __name__ == "__main__":
    with traced_once():
        main()
