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
from planner.verification.verify_model import slow_devices
from tests.ranks import answer, task
from tests.small_models import seeded, token_batch
from tests.tracing import traced_once

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
        self.layers = nn.ModuleList(Gated(size) for _ in range(2))
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


class Pair:
    """A model alone, by plain torch, and the same sharded; largest relative errors by what was compared."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.batches = [token_batch(seed=seed) for seed in range(3)]
        self.model = seeded(OddShapes)
        on_mesh = {"cluster": slow_devices(4), "forbid_replicated_matmul": True}
        target, options = (case["mesh"], on_mesh) if "mesh" in case else (slow_devices(4), {"fix": case["fix"]})
        self.parallel = planner.compile(seeded(OddShapes), target, example_inputs=self.batches[0], **options)
        self.optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (self.model, self.parallel)]
        self.folder = Path(os.environ["MESHWRIGHT_TEST_FOLDER"]) / case["name"].replace(" ", "-")
        self.errors: dict[str, float] = {}

    def note(self, name: str, error: float) -> None:
        self.errors[name] = max(self.errors.get(name, 0.0), error)

    def compare_gradients(self, name: str) -> None:
        self.note(name, largest(self.parallel.full_gradients(), gradients_of(self.model)))

    def compare_state(self, name: str) -> None:
        self.note(name, largest(self.parallel.full_state_dict(), self.model.state_dict()))

    def add_up(self) -> None:
        """Batches of different weights."""
        for number, (batch, weight) in enumerate(zip(self.batches, WEIGHTS), start=1):
            expected = self.model(**batch)["loss"]
            (weight * expected).backward()
            self.note("loss", relative(self.parallel.train_step(**batch, weight=weight), expected))
            self.compare_gradients(f"gradients of {number}")

    def clip(self) -> None:
        for norm_type in (1.0, 2.0, float("inf")):
            norm = torch.nn.utils.get_total_norm(list(gradients_of(self.model).values()), norm_type)
            self.note("norm", relative(self.parallel.clip_grad_norm_(float("inf"), norm_type), norm))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.parallel.clip_grad_norm_(0.1)
        self.compare_gradients("clipped")

    def update(self, name: str) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.compare_state(name)

    def accumulate(self) -> None:
        sum(self.model(**batch)["loss"] for batch in self.batches).div(3).backward()
        with self.parallel.accumulate(3):
            for batch in self.batches:
                self.parallel.train_step(**batch)
        self.compare_gradients("accumulated")

    def add_penalty(self) -> None:
        """A script's own loss: the model's, and a sum over parameters, which are DTensors of one part."""
        for module in (self.model, self.parallel):
            module.zero_grad()
            loss = module(**self.batches[0])["loss"]
            (loss + 0.1 * sum(parameter.square().sum() for parameter in module.parameters())).backward()
        self.compare_gradients("with a penalty")

    def save_and_load(self) -> None:
        """As safetensors, and as a checkpoint with the optimizer, into parameters that were zeroed."""
        manager = planner.CheckpointManager(self.folder / "checkpoints")
        manager.save(self.parallel, self.optimizers[1], step=1)
        self.parallel.save_pretrained(self.folder / "weights")
        self._forget()
        self.parallel.load_pretrained(self.folder / "weights")
        self.compare_state("saved")
        self._forget()
        self.optimizers[1] = torch.optim.AdamW(self.parallel.parameters(), lr=1e-2)
        manager.load(self.parallel, self.optimizers[1])
        self.compare_state("resumed")

    def _forget(self) -> None:
        with torch.no_grad():
            for parameter in self.parallel.parameters():
                parameter.zero_()


def errors(case: dict[str, Any]) -> dict[str, float]:
    with keep_float64():
        pair = Pair(case)
        pair.add_up()
        pair.clip()
        pair.update("state")
        pair.accumulate()
        if "mesh" in case:
            pair.add_penalty()
        pair.save_and_load()
        pair.update("state after resuming")
    return pair.errors


def main() -> None:
    answer({case["name"]: errors(case) for case in task()})


if __name__ == "__main__":
    with traced_once():
        main()
