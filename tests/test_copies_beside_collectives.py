"""What programs copy beside a collective of a dim's parts, to lay them out in memory, is priced.

Nothing is copied where all dims outside of it have one element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from rules_harness import MESH, evaluate, fake_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models import Cluster, CostModel
from passes.emit.conversion_calls import conversion_call
from passes.ir.conversions import Step
from passes.ir.graph import Value
from passes.ir.types import R, local_shape
from passes.shard import Convert, Local
from planner.sharding_ilp.sharding_prices import Pricing
from planner.whole_step.costs.candidate_bounds import PricedCuts
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.sharding import Cut
from runtime.program_tools import compiled_collectives
from runtime.program_tools.adapters import apply_adapters
from runtime.torch_compat import spmd_internals
from tests.exhaustive_models import space

#: A byte takes a second to be read or written, and none to be sent.
CLUSTER = Cluster.uniform(4, latency=0.0, bandwidth=float("inf"), memory_bandwidth=1.0)
#: Devices that copy slower than they send.
SLOW = Cluster.uniform(8, flops=1e9, memory_bandwidth=1e9, latency=0.0, bandwidth=1e10)
#: Lengths that an axis of two divides or not, so long that a row of padding is nothing.
EVEN, UNEVEN = 400, 399
#: Operators that allocate or zero what others write.
ALLOCATING = ("empty", "empty_like", "new_empty", "zeros", "ones_like", "detach", "alias")


class _Copied(TorchDispatchMode):
    """Counts the bytes that operators write to new tensors, other than collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.namespace == "aten" and not func.is_view and name not in ALLOCATING:
            self.num_bytes += sum(each.nbytes for each in (result if isinstance(result, (list, tuple)) else [result]))
        return result


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    apply_adapters()
    with fake_mesh() as device_mesh:
        yield device_mesh


@pytest.mark.parametrize(
    ("source", "target", "shape", "forward", "backward"),
    [  # how often what two ranks have together is copied
        ("S(0)", "R", (EVEN, 8), 0, 0),
        ("S(1)", "R", (8, EVEN), 1, 1),  # gathered; its gradient is scattered
        ("S(1)", "I", (8, EVEN), 1, 0),
        ("P", "S(0)", (EVEN, 8), 0, 0),
        ("P", "S(1)", (8, EVEN), 1, 1),
        ("I", "S(1)", (8, EVEN), 0, 1),
        ("P", "R", (8, EVEN), 0, 0),
        ("S(1)", "R", (1, EVEN, 8), 0, 0),  # a batch of one sample
        ("P", "S(1)", (1, EVEN, 8), 0, 0),
        ("S(2)", "R", (1, 8, EVEN), 1, 1),
        ("S(0)", "S(1)", (EVEN, 8), 1, 0.5),  # an all-to-all joins the parts of a rank, and lays out what it cuts
        ("S(1)", "S(0)", (EVEN, 8), 0.5, 1),
        ("S(1)", "S(2)", (8, EVEN, 4), 1, 1),
        ("S(1)", "S(2)", (1, EVEN, 4), 1, 0.5),
        ("S(0)", "R", (UNEVEN, 8), 1.5, 1.5),  # padded and trimmed: a part, and all
        ("S(1)", "R", (8, UNEVEN), 2.5, 2.5),
        ("P", "S(0)", (UNEVEN, 8), 1.5, 1.5),
        ("P", "S(1)", (8, UNEVEN), 2.5, 2.5),
        ("S(0)", "S(1)", (UNEVEN, 8), 2, 1.5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("compiled", [False, True])
def test_what_programs_copy_beside_collectives_is_priced(
    mesh: DeviceMesh,
    source: str,
    target: str,
    shape: tuple[int, ...],
    forward: float,
    backward: float,
    compiled: bool,
) -> None:
    value = Value("x", shape, "float32", requires_grad=True)
    step = Step(0, (source, R), (target, R))
    whole = 4 * math.prod(shape)
    price = Pricing(CostModel(CLUSTER, dict(zip(MESH.names, MESH.sizes))), MESH).step(step, value)
    assert price == pytest.approx((2 * forward * whole, 2 * backward * whole), rel=5e-3)

    before, behind = (Local(value, where, local_shape(shape, where, MESH)) for where in (step.source, step.target))
    convert = Convert(step, before, behind, *step.collectives, step.num_bytes(shape, 4, MESH))
    names = {"spmd": compiled_collectives.Collectives(mesh), "S": int, "R": "R", "I": "I", "P": "P"} if compiled else {}
    x = torch.zeros(before.shape, requires_grad=True)
    with spmd.set_current_mesh(mesh), _Copied() as there:
        (y,) = evaluate(conversion_call(convert, "x", MESH), {"x": x, **names})
    with spmd.set_current_mesh(mesh), _Copied() as back:
        torch.autograd.grad(y, x, torch.zeros(behind.shape))
    for collective, seconds, copied in zip(step.collectives, price, (there, back)):
        if collective is not None:
            assert 2 * copied.num_bytes == pytest.approx(seconds, rel=5e-3)


def test_bounds_know_that_one_sample_takes_less_than_its_share() -> None:
    """Nothing is copied beside collectives of one sample, so larger micro-batches do not bound it."""
    pytest.importorskip("transformers")
    shards = LevelOne(SLOW, *space("llama"))
    seconds = {}
    for cut in itertools.starmap(Cut, itertools.product((1, 4, 8), (1,), (2, 4))):
        sharded = shards.alone(cut)
        assert sharded is not None
        seconds[cut] = sharded.without_samples
    num_unsound = 0  # of bounds by share alone
    for recorded, cut in itertools.permutations(seconds, 2):
        priced = PricedCuts()
        priced.add(recorded, seconds[recorded])
        assert priced.most(cut) <= seconds[cut] * (1 + 1e-9)
        divides = cut.pieces % recorded.pieces == cut.tensor % recorded.tensor == 0
        num_unsound += divides and seconds[recorded] * recorded.parts > seconds[cut] * cut.parts * (1 + 1e-6)
    assert num_unsound


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

    def all_to_all_single(self, x: torch.Tensor, received: list[int], sent: list[int], group: str) -> torch.Tensor:
        return x[:1].expand_as(x).contiguous()

    def wait_tensor(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("shape", "dim", "is_copied"),
    [((8, 3), 0, False), ((1, 8, 3), 1, False), ((1, 1, 8), 2, False), ((2, 8, 3), 1, True), ((1, 2, 8), 2, True)],
)
def test_parts_that_are_not_laid_out_arrive_in_order(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dim: int, is_copied: bool
) -> None:
    x = torch.arange(float(math.prod(shape))).view(shape)
    first = x.chunk(4, dim)[0]
    gathered, scattered, exchanged = torch.cat([x] * 4, dim), 4 * first, torch.cat([first] * 4, 0)
    ranks = _FourRanks()
    monkeypatch.setattr(compiled_collectives, "_c10d", ranks)
    axis = compiled_collectives._Axis("group", 4, 0)
    assert torch.equal(compiled_collectives._gather(x, axis, dim, None), gathered)
    assert torch.equal(compiled_collectives._reduce_scatter(x, axis, None, dim), scattered)
    assert torch.equal(compiled_collectives._exchange(x, axis, 0, dim), exchanged)

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
