"""Models of few blocks and clusters of few devices, small enough to try everything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from cost_models import Cluster
from passes.capture import capture
from passes.ir.graph import Graph
from planner.verification.verify_model import slow_devices
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.sharding import ShardingSpace
from planner.whole_step.costs.unit_costs import StepUnits
from tests.small_models import Mlp, Residual, mlp_batch, squared_error


class Uneven(nn.Module):
    """Blocks of different sizes: no two are alike."""

    def __init__(self, *hidden: int, size: int = 32, outputs: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(size, each) for each in hidden)
        self.last = nn.Linear(size, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class TwoRows(nn.Module):
    """Two rows of equal blocks, the second right behind the first."""

    def __init__(self, *, size: int = 32) -> None:
        super().__init__()
        self.narrow = nn.ModuleList(Residual(size, size) for _ in range(3))
        self.wide = nn.ModuleList(Residual(size, 4 * size) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.narrow, *self.wide):
            x = block(x)
        return x


def of_module(module: nn.Module, *, batch: int = 8, size: int = 32, outputs: int = 8) -> Graph:
    return capture(module, args=mlp_batch(batch=batch, size=size, outputs=outputs), loss_fn=squared_error)


def of_config(name: str, *, batch: int = 8, seq_len: int = 32, **changes: Any) -> Graph:
    """A model of the library with some of its configuration changed."""
    from planner.library import load_config
    from planner.planning import capture_for_planning

    config = load_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    return capture_for_planning(config, batch_size=batch, seq_len=seq_len)


def of_mixture(**options: Any) -> Graph:
    """A mixture of experts of which tokens and experts may be cut."""
    from tests.expert_models import mixture, mixture_batch

    return capture(mixture(**options), kwargs=mixture_batch())


MODULES: Mapping[str, Callable[[], Graph]] = {
    "2-block mlp": lambda: of_module(Mlp(layers=2, size=32)),
    "6-block mlp": lambda: of_module(Mlp(layers=6, size=32), batch=16),
    "two rows": lambda: of_module(TwoRows(), outputs=32),
    "uneven": lambda: of_module(Uneven(32, 96, 64, 256, 32, 128)),
    "mixture": lambda: of_mixture(size=32, inner=64, layers=2),
}
#: These need transformers. ``t5`` has two blocks of an encoder and three of a decoder; ``gpt2`` ties its ends.
CONFIGS: Mapping[str, Callable[[], Graph]] = {
    "llama": lambda: of_config("tiny-llama", num_hidden_layers=6),
    "gpt2": lambda: of_config("tiny-gpt2", n_layer=4),
    "t5": lambda: of_config("tiny-t5", num_layers=2, num_decoder_layers=3),
}
MODELS = {**MODULES, **CONFIGS}


def two_boxes() -> Cluster:
    """Two boxes of four devices, slow between them, where every message and every launch takes a while."""
    device = {
        "name": "small",
        "flops": {"float32": 2e12, "float64": 1e12, "bfloat16": 4e12},
        "memory_bytes": 1e10,
        "memory_bandwidth": 2e11,
        "launch_overhead": 1e-6,
        "overlap_slowdown": 0.1,
    }
    inside = {"name": "bus", "size": 4, "latency": 5e-6, "bandwidth": 2e10}
    between = {"name": "network", "size": 2, "latency": 2e-5, "bandwidth": 2e9, "shared_by": 4}
    return Cluster.from_dict({"name": "two boxes", "device": device, "levels": [inside, between]})


#: Of these "copying" copies slower than it sends, also beside collectives.
CLUSTERS: Mapping[str, Callable[[], Cluster]] = {
    "eight": lambda: slow_devices(8),
    "boxes": two_boxes,
    "copying": lambda: Cluster.uniform(8, flops=1e9, memory_bandwidth=1e9, latency=0.0, bandwidth=1e10),
}


@functools.cache
def space(model: str) -> tuple[ShardingSpace, StepUnits]:
    sharding_space = ShardingSpace.of(MODELS[model]())
    return sharding_space, StepUnits.of(sharding_space)


@functools.cache
def level_one(model: str, cluster: str) -> LevelOne:
    """Level 1 of one model on one cluster; what it has solved serves every search."""
    return LevelOne(CLUSTERS[cluster](), *space(model))
