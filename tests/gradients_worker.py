"""One rank of the tests of gradients: several batches' added up, parameters of odd shapes, norms, weights saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import planner
from passes.capture import keep_float64
from planner.verification import slow_devices
from tests.ranks import answer, task
from tests.small_models import seeded, token_batch

WEIGHTS = (1.0, 0.5, 0.25)


class Gated(nn.Linear):
    """A linear layer whose outputs are multiplied by a third as many gates."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.0, 3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * self.gate.repeat_interleave(4)


class OddShapes(nn.Module):
    """A tied embedding, and parameters that data ranks cannot share evenly: without dims, of one element, of three."""

    def __init__(self, *, vocabulary: int = 32, size: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList(Gated(size) for _ in range(4))
        self.output = nn.Linear(size, vocabulary, bias=False)
        self.output.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.75))
        self.frozen_scale = nn.Parameter(torch.tensor(1.25), requires_grad=False)
        self.shift = nn.Parameter(torch.tensor([0.125]))
        self.register_buffer("temperature", torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        hidden = self.embedding(tokens) * self.frozen_scale
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden) + self.shift)
        logits = self.output(hidden) * self.scale.exp() / self.temperature
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value; infinity where shapes differ."""
    if value.shape != expected.shape:
        return float("inf")
    return float((value.detach() - expected.detach()).abs().max() / expected.detach().abs().max().clamp_min(1e-300))


def largest(values: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    if values.keys() != expected.keys():
        return float("inf")
    return max(relative(values[name], tensor) for name, tensor in expected.items())


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def errors(case: dict[str, Any]) -> dict[str, float]:
    """Largest relative errors against plain torch on one device."""
    model, batches = seeded(OddShapes), [token_batch(seed=seed) for seed in range(3)]
    target = case["mesh"] if "mesh" in case else slow_devices(4)
    options = {"fix": case["fix"]} if "fix" in case else {"forbid_replicated_matmul": True}
    with keep_float64():
        parallel = planner.compile(seeded(OddShapes), target, example_inputs=batches[0], **options)
        found: dict[str, float] = {}

        def note(name: str, error: float) -> None:
            found[name] = max(found.get(name, 0.0), error)

        for number, (batch, weight) in enumerate(zip(batches, WEIGHTS), start=1):
            expected = model(**batch)["loss"]
            (weight * expected).backward()
            note("loss", relative(parallel.train_step(**batch, weight=weight), expected))
            note(f"gradients of {number}", largest(parallel.full_gradients(), gradients_of(model)))
        parameters = list(model.parameters())
        for norm_type in (1.0, 2.0, float("inf")):
            norm = torch.nn.utils.get_total_norm(list(gradients_of(model).values()), norm_type)
            note("norm", relative(parallel.clip_grad_norm_(float("inf"), norm_type), norm))
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        parallel.clip_grad_norm_(0.1)
        note("clipped", largest(parallel.full_gradients(), gradients_of(model)))
        for module in (model, parallel):
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
            optimizer.step()
            optimizer.zero_grad()
        note("state", largest(parallel.full_state_dict(), model.state_dict()))

        sum(model(**batch)["loss"] for batch in batches).div(3).backward()
        with parallel.accumulate(3):
            for batch in batches:
                parallel.train_step(**batch)
        note("accumulated", largest(parallel.full_gradients(), gradients_of(model)))

        folder = Path(os.environ["MESHWRIGHT_TEST_FOLDER"]) / case["name"].replace(" ", "-")
        parallel.save_pretrained(folder)
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
        parallel.load_pretrained(folder)
        note("saved", largest(parallel.full_state_dict(), model.state_dict()))
    return found


def main() -> None:
    answer({case["name"]: errors(case) for case in task()})


if __name__ == "__main__":
    main()
