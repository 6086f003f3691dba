"""One rank of the tests of state dicts that ranks save and load by themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import planner
from passes.capture import keep_float64
from tests.ranks import answer, result_of, task
from tests.small_models import seeded


class Even(nn.Module):
    """Both halves have parameters of the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def loaded(fix: dict[str, int], optimizer_name: str) -> dict[str, Any]:
    """What comes of loading each rank's own file, and the first one's, by all ranks."""
    folder, batch = Path(os.environ["MESHWRIGHT_TEST_FOLDER"]), {"x": torch.ones(4, 8, dtype=torch.float64)}
    parallel = planner.compile(seeded(Even), example_inputs=batch, fix=fix)
    optimizer = getattr(torch.optim, optimizer_name)(parallel.parameters(), lr=0.1)

    def step() -> None:
        parallel.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()

    step()
    name = f"{sorted(fix.items())} {optimizer_name}"
    files = [folder / f"{name} {rank}.pt" for rank in range(dist.get_world_size())]
    torch.save({"model": parallel.state_dict(), "optimizer": optimizer.state_dict()}, files[dist.get_rank()])
    dist.barrier()
    before = parallel.full_state_dict()
    results: dict[str, Any] = {}
    for file in ("own", "first"):
        state = torch.load(files[dist.get_rank() if file == "own" else 0], weights_only=True)
        results[f"model, {file}"] = gathered_words(result_of(parallel.load_state_dict, state["model"]))
        results[f"optimizer, {file}"] = gathered_words(result_of(load_and_step, optimizer, state["optimizer"]))
    after = parallel.full_state_dict()
    results["unchanged"] = all(torch.equal(before[name], after[name]) for name in before)
    return results


def load_and_step(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """A step without gradients changes nothing, and looks at the state as any step does."""
    optimizer.load_state_dict(state)
    optimizer.step()


def gathered_words(result: Any) -> list[str]:
    words: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(words, str(result))
    return words


if __name__ == "__main__":
    cases = task()
    with keep_float64():
        answer([loaded(fix, optimizer_name) for fix, optimizer_name in cases])
