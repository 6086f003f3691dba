"""One rank of ``benchmarks.accuracy``: runs every plan by turns, and counts what it holds.

python -m benchmarks.accuracy_worker CLUSTER.toml OUTPUT.json ROUNDS [CASE …], in the environment of a launcher of two
ranks, or of two hosts of two ranks each
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers

import planner
from benchmarks.accuracy_plans import BATCH, CASES, HOST_CASES, MODELS, TOKENS, AccuracyCase

#: That are timed of a plan before another has its turn.
STEPS_OF_TURN = 2


class Running:
    """A model under one plan, with its optimizer."""

    def __init__(self, case: AccuracyCase, cluster: str) -> None:
        kind, fields = MODELS[case.model]
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields, use_cache=False))
        ids = torch.randint(0, fields["vocab_size"], (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
        self.case, self.batch = case, {"input_ids": ids, "labels": ids}
        options = {} if case.fix is None else {"fix": dict(case.fix)}
        self.parallel = planner.compile(model, cluster, example_inputs=self.batch, **options)
        self.optimizer = torch.optim.AdamW(self.parallel.parameters())
        self.seconds: list[float] = []

    def step(self) -> None:
        self.parallel.train_step(**self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def round(self) -> None:
        """Some steps one after the other, as training makes them: the first finds memory as another plan left it."""
        self.step()
        for _ in range(STEPS_OF_TURN):
            dist.barrier()
            start = time.perf_counter()
            self.step()
            dist.barrier()
            self.seconds.append(time.perf_counter() - start)

    def held(self) -> dict[str, int]:
        """Bytes of the optimizer's moments and, where owners are all that a rank keeps of them, of its parameters."""
        owners = [owned.tensor for owned in self.parallel.owned() if owned.trainable]
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        moments = [value.to_local() if hasattr(value, "to_local") else value for value in states if value.dim()]
        held = {"optimizer": sum(tensor.numel() * tensor.element_size() for tensor in moments)}
        levels = {group.zero for chunk in self.parallel.plan.step.chunks for group in chunk.groups}
        if not levels & {1, 2}:
            held["parameters"] = sum(tensor.numel() * tensor.element_size() for tensor in owners)
        return held

    def row(self) -> dict[str, Any]:
        step = self.parallel.plan.step
        return {
            "name": self.case.name,
            "plan": " ".join(f"{axis}{size}" for axis, size in step.axes.items() if size > 1),
            "predicted": step.costs.simulated,
            "interval": step.interval,
            "measured": median(self.seconds),
            "held": self.held(),
            "memory": {"parameters": step.memory[0].parameters, "optimizer": step.memory[0].optimizer},
        }


def main() -> None:
    cluster, output, rounds, *names = sys.argv[1:]
    planner.init(device="cpu")
    cases = CASES if dist.get_world_size() == 2 else HOST_CASES
    running = [Running(case, cluster) for case in cases if not names or case.name in names]
    for each in running:
        each.step()
    for _ in range(int(rounds)):
        for each in running:
            each.round()
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps([each.row() for each in running]), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    main()
