"""One rank of ``benchmarks.freeze_measured``: trains all variants by turns, a step each.

python -m benchmarks.freeze_measured_worker CLUSTER.toml MBIT PASSES OUTPUT.json, in the environment of a launcher
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import planner
from cost_models import Cluster
from planner.changing.freeze_policy import freeze_bound
from planner.training_timeline import first_parameters

LAYERS, WIDTH, LENGTH, WORDS = 8, 160, 64, 256
BATCH, BATCHES, PHASES, ALPHA = 16, 4, 5, 1 / 3
#: Steps that prices count on after a decision: those of a training as long as the paper's.
REMAINING = 100_000


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.behind(x))))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Parts:
    """Which of PipeTransformer's parts a variant has; ``targets`` may be gone on under, none: nothing is replanned."""

    name: str
    freezes: bool = True
    targets: Sequence[str] = ()
    caches: bool = False


VARIANTS = (
    Parts("no freezing", freezes=False),
    Parts("freezing, not replanned"),
    Parts("freezing, the pipeline cut anew", targets=["pp=2"]),
    Parts("the same and the cache", targets=["pp=2"], caches=True),
    Parts("a shorter pipeline with replicas", targets=["pp=2", "dp=2"]),
    Parts("all", targets=["pp=2", "dp=2"], caches=True),
)


@dataclass
class Running:
    """A variant under way.

    Attributes:
        seconds: of each step, by phase and pass.
    """

    parts: Parts
    cluster: Cluster
    seconds: list[list[list[float]]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)
    replanning: float = 0.0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        model, example = Language(), batch_of(0)
        self.options = {"cluster": self.cluster, "fix": {"zero": 0}}
        self.parallel = planner.compile(model, "pp=2", example_inputs=example, **self.options)
        self.optimizer = torch.optim.AdamW(self.parallel.parameters(), lr=1e-3)
        self.cache = planner.ActivationCache(self.parallel, memory_bytes=256e6)
        self.model = model

    def freeze(self, frozen: int) -> None:
        """Freeze so many layers, and go on as the prices say."""
        if not self.parts.freezes or not frozen:
            return
        layers = [f"layers.{number}" for number in range(frozen)]
        names = first_parameters(self.model, layers)
        for name, parameter in self.parallel.named_parameters():
            if name in names:
                parameter.requires_grad_(False)
        for path in ("embedding", *layers):
            self.parallel.get_submodule(path).eval()
        started = time.perf_counter()
        price = {"remaining_steps": REMAINING, "replan_seconds": 0.0, "cluster": self.cluster, "fix": {"zero": 0}}
        if self.parts.caches:
            self.cache.replan_if_it_pays(
                self.parts.targets, self.optimizer, after=layers[-1], steps_of_epoch=BATCHES, **price
            )
        elif self.parts.targets:
            self.parallel.replan_if_it_pays(self.parts.targets, self.optimizer, **price)
        self.replanning += time.perf_counter() - started

    def begin(self, passes: int) -> None:
        self.seconds.append([[] for _ in range(passes)])
        axes = self.parallel.plan.step.axes
        layout = "×".join(str(axes.get(axis, 1)) for axis in ("pp", "dp"))
        self.layouts.append(layout + (" cached" if self.cache.after else ""))
        # Programs are made at the first call of a kind; what that takes is no step's.
        started = time.perf_counter()
        for _ in range(2 if self.cache.after else 1):
            self.cache.train_step(**batch_of(-1))
            self.optimizer.zero_grad()
        self.replanning += time.perf_counter() - started

    def step(self, number: int, in_pass: int) -> None:
        dist.barrier()
        started = time.perf_counter()
        loss = self.cache.train_step(**batch_of(number))
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        self.seconds[-1][in_pass].append(time.perf_counter() - started)
        self.losses.append(float(loss))

    def row(self) -> dict[str, Any]:
        passes = [one for phase in self.seconds for one in phase]
        return {
            "name": self.parts.name, "seconds": sum(map(sum, passes)), "replanning": self.replanning,
            "medians": sum(len(one) * median(one) for one in passes), "layouts": self.layouts,
            "last pass": [median(phase[-1]) for phase in self.seconds],
        }  # fmt: skip


def batch_of(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + number)
    tokens = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
    return {"tokens": tokens, "labels": (tokens * 7 + 3) % WORDS}


def shaped(profiled: Cluster, mbit: float) -> Cluster:
    """The processes as they were measured, on the link as it is set up.

    A bucket of tokens (tbf) lets what is short through at once, so that rates measured with short tensors say too much
    of long ones.
    """
    (level,) = Cluster.parse("cpu-local:2").levels
    return replace(profiled, levels=(replace(level, bandwidth=mbit * 1e6 / 8),))


def main() -> None:
    profiled, mbit, passes, output = sys.argv[1:]
    torch.set_num_threads(1)
    planner.init(device="cpu")
    cluster = shaped(Cluster.from_toml(profiled), float(mbit))
    running = [Running(parts, cluster) for parts in VARIANTS]
    frozen = [freeze_bound(LAYERS, ALPHA, phase) for phase in range(PHASES)]
    draw = torch.Generator().manual_seed(0)
    for layers in frozen:
        for each in running:
            each.freeze(layers)
            each.begin(int(passes))
        for in_pass in range(int(passes)):
            for number in torch.randperm(BATCHES, generator=draw).tolist():
                for each in running:
                    each.step(number, in_pass)
    alike = [each.losses for each in running if each.parts.freezes]
    apart = max(abs(one - alike[0][step]) / alike[0][step] for each in alike for step, one in enumerate(each))
    if dist.get_rank() == 0:
        measurement = {"rows": [each.row() for each in running], "layers": LAYERS, "frozen": frozen, "apart": apart}
        Path(output).write_text(json.dumps(measurement), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    main()
