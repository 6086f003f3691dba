"""One of four ranks: a model of odd vocabulary and inner dim trains as in plain PyTorch, and resumes elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import planner
from passes.capture import keep_float64
from planner.verification.verify_model import slow_devices
from runtime.checkpoint import CheckpointManager
from tests.patience import PATIENCE
from tests.ranks import answer, task
from tests.tracing import traced_once

#: A prime; on two ranks 129 and 128, on four 65, 65, 65 and 62.
VOCABULARY = 257
STEPS = 3
TOLERANCE = 1e-9
BATCH: tuple[torch.Tensor, torch.Tensor] = (
    torch.arange(96).reshape(8, 12) * 37 % VOCABULARY,
    (torch.arange(96).reshape(8, 12) * 53 + 11) % VOCABULARY,
)


class OddModel(nn.Module):
    """An embedding, a gated layer of 67 inside, and a linear layer over the vocabulary with a bias of its length."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, 67), "down": nn.Linear(67, 16)}) for _ in range(2)
        )
        self.head = nn.Linear(16, VOCABULARY)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["down"](F.gelu(layer["up"](x)))  # type: ignore[index]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def main() -> None:
    payload = task()
    manager = CheckpointManager(Path(payload["folder"]) / "checkpoints", keep_last=None)
    with keep_float64():
        results: dict[str, Any] = {}
        for name, case in payload["plans"].items():
            is_first = case["tied"] not in [payload["plans"][other]["tied"] for other in results]
            results[name] = train({**case, "saves": is_first}, manager, Path(payload["folder"]))
    answer(results)


def train(case: dict[str, Any], manager: CheckpointManager, folder: Path) -> dict[str, Any]:
    torch.manual_seed(3)
    alone = OddModel(tied=case["tied"]).double()
    parallel = planner.compile(
        copy.deepcopy(alone), slow_devices(4), example_inputs=BATCH, fix=case["fix"], time_limit=PATIENCE
    )
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (parallel, alone)]
    differences: dict[str, float] = {}
    for step in range(STEPS):
        losses = [parallel.train_step(*BATCH), alone(*BATCH)]
        losses[1].backward()
        gradients = parallel.full_gradients()
        for name, weight in alone.named_parameters():
            differences[f"gradient {step} of {name}"] = relative(gradients[name], weight.grad)
        differences[f"loss {step}"] = relative(*losses)
        differences[f"norm {step}"] = relative(*norms(parallel, alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1 and case["saves"]:
            manager.save(parallel, optimizers[0], step=int(case["tied"]))
    state = parallel.full_state_dict()
    differences.update({name: relative(state[name], weight) for name, weight in alone.state_dict().items()})
    parallel.save_pretrained(folder / "weights")
    parallel.load_pretrained(folder / "weights")
    differences["loaded"] = relative(parallel.full_state_dict()["embed.weight"], alone.embed.weight)
    before = float(parallel.train_step(*BATCH))
    optimizers[0].zero_grad()
    # What the first plan saved after two steps leads every plan to the same third step.
    manager.load(parallel, optimizers[0], step=int(case["tied"]))
    parallel.train_step(*BATCH)
    parallel.clip_grad_norm_(0.5)
    optimizers[0].step()
    optimizers[0].zero_grad()
    resumed = float(parallel.train_step(*BATCH))
    differences["resumed"] = abs(resumed - before) / before
    wrong = {name: error for name, error in differences.items() if not error < TOLERANCE}
    return {"wrong": wrong, "shards": shards_of(parallel), "source": parallel.source}


def norms(parallel: Any, alone: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all gradients, which are clipped by it."""
    return parallel.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(alone.parameters(), 0.5)


def relative(value: torch.Tensor, expected: torch.Tensor | None) -> float:
    assert expected is not None
    assert value.shape == expected.shape
    return float((value - expected).detach().abs().max() / expected.detach().abs().max())


def shards_of(parallel: Any) -> dict[str, list[int]]:
    """Local shapes of the parameters that DTensor says are sharded along their first dim; they are as DTensor cuts."""
    shapes = {}
    for name, parameter in parallel.named_parameters():
        assert isinstance(parameter, DTensor)
        local = tuple(parameter.to_local().shape)
        cut = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)[0]
        assert local == tuple(cut), (name, local, cut)
        if Shard(0) in parameter.placements:
            shapes[name] = list(local)
    return shapes


if __name__ == "__main__":
    with traced_once():
        main()
