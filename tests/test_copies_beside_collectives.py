"""Ranks' parts of a dim that is not the first are copied once more beside their collective: priced, and left out where
all dims outside of it have one element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models import Cluster, CostModel
from passes.ir.conversions import Step
from passes.ir.graph import Value
from passes.ir.types import MeshShape
from planner.sharding_ilp.sharding_prices import Pricing
from runtime.program_tools import compiled_collectives
from runtime.torch_compat import spmd_internals

MESH = MeshShape.parse("tp=4")
#: A byte takes a second to be read or written, and none to be sent.
CLUSTER = Cluster.uniform(4, latency=0.0, bandwidth=float("inf"), memory_bandwidth=1.0)
#: Bytes of 16 x 8 elements in float32, read and written.
COPY = 2 * 16 * 8 * 4


@pytest.mark.parametrize(
    ("source", "target", "shape", "forward", "backward"),
    [
        ("S(0)", "R", (16, 8), 0, 0),
        ("S(1)", "R", (16, 8), COPY, COPY),  # gathered; its gradient is scattered
        ("S(1)", "I", (16, 8), COPY, 0),
        ("P", "S(0)", (16, 8), 0, 0),
        ("P", "S(1)", (16, 8), COPY, COPY),
        ("I", "S(1)", (16, 8), 0, COPY),
        ("P", "R", (16, 8), 0, 0),
        ("S(1)", "R", (1, 16, 8), 0, 0),
        ("S(2)", "R", (1, 16, 8), COPY, COPY),
        ("S(0)", "S(1)", (16, 8), 2 * COPY / 4, 2 * COPY / 4),  # an all-to-all packs and unpacks a rank's part
    ],
)
def test_what_is_copied_is_priced(
    source: str, target: str, shape: tuple[int, ...], forward: float, backward: float
) -> None:
    pricing = Pricing(CostModel(CLUSTER, {"tp": 4}), MESH)
    value = Value("value", shape, "float32", requires_grad=True)
    assert pricing.step(Step(0, (source,), (target,)), value) == pytest.approx((forward, backward), rel=1e-12)


class _Copies(TorchDispatchMode):
    """Counts concatenations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.cat.default
        return func(*args, **(kwargs or {}))


class _FourRanks:
    """Collectives of four ranks of which all have what this one has; only the first dim is gathered or scattered."""

    @staticmethod
    def gather(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        return torch.cat([x] * 4, dim)

    @staticmethod
    def scatter(x: torch.Tensor, kind: str, dim: int, group: Any) -> torch.Tensor:
        return 4 * x.chunk(4, dim)[0]

    def all_gather_into_tensor(self, x: torch.Tensor, size: int, group: str) -> torch.Tensor:
        return x.expand(4, *x.shape).contiguous().flatten(0, 1)

    def reduce_scatter_tensor(self, x: torch.Tensor, kind: str, size: int, group: str) -> torch.Tensor:
        return 4 * x.chunk(4)[0]

    def wait_tensor(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("shape", "dim", "is_copied"),
    [((8, 3), 0, False), ((1, 8, 3), 1, False), ((1, 1, 8), 2, False), ((2, 8, 3), 1, True), ((1, 2, 8), 2, True)],
)
def test_parts_behind_each_other_in_memory_are_not_copied(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dim: int, is_copied: bool
) -> None:
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    gathered, scattered = torch.cat([x] * 4, dim), 4 * x.chunk(4, dim)[0]
    ranks = _FourRanks()
    monkeypatch.setattr(compiled_collectives, "_c10d", ranks)
    axis = compiled_collectives._Axis("group", 4, 0)
    with _Copies() as copies:
        results = [
            compiled_collectives._gather(x, axis, dim, None),
            compiled_collectives._reduce_scatter(x, axis, None, dim),
        ]
    assert torch.equal(results[0], gathered) and torch.equal(results[1], scattered)
    assert copies.count == 2 * is_copied

    dims: list[int] = []
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(
        spmd_internals, "all_gather_along", lambda x, dim, group: dims.append(dim) or ranks.gather(x, dim, group)
    )
    monkeypatch.setattr(
        spmd_internals,
        "reduce_scatter_along",
        lambda x, kind, dim, group: dims.append(dim) or ranks.scatter(x, kind, dim, group),
    )
    functional, group = spmd_internals._OverSeveralRanks(None), object()
    assert torch.equal(functional.all_gather_tensor(x, dim, group), gathered)
    assert torch.equal(functional.reduce_scatter_tensor(x, "sum", dim, group), scattered)
    assert dims == [dim if is_copied else 0] * 2
