"""One of four ranks: a tied model trains under plans of whole steps, which resume the first one's checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

import planner
from passes.capture import keep_float64
from planner.verification.verify_model import slow_devices
from runtime.checkpoint import CheckpointManager
from tests.parity_worker import build
from tests.patience import PATIENCE
from tests.ranks import answer, task
from tests.tracing import traced_once


def main() -> None:
    payload = task()
    folder = Path(payload["folder"])
    single, args, kwargs, loss_fn = build(payload["model"], layers=payload["layers"])
    manager = CheckpointManager(folder / "checkpoints", keep_last=None)
    losses: dict[str, list[float]] = {}

    def steps(parallel: Any, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        results = []
        for _ in range(count):
            results.append(float(parallel.train_step(*args, **kwargs)))
            optimizer.step()
            optimizer.zero_grad()
        return results

    with keep_float64():
        for name, fix in payload["plans"].items():
            parallel = planner.compile(
                copy.deepcopy(single),
                slow_devices(4),
                loss_fn=loss_fn,
                example_inputs=args or kwargs,
                fix=fix,
                time_limit=PATIENCE,
            )
            optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
            if not losses:
                steps(parallel, optimizer, 2)
                manager.save(parallel, optimizer, step=2)
            else:
                steps(parallel, optimizer, 1)
                manager.load(parallel, optimizer, step=2)
            parallel.save_pretrained(folder / name)
            losses[name] = steps(parallel, optimizer, 2)
            # Weights alone, too.
            parallel.load_pretrained(folder / next(iter(losses)))
            losses[name] += [float(parallel.train_step(*args, **kwargs))]
    answer(losses)


if __name__ == "__main__":
    with traced_once():
        main()
