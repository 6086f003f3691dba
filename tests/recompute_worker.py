"""One rank of the tests of recompute policies: what blocks send, draw and compute under each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spmd_types import P, R, S, V
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runtime import ops
from runtime.mesh.communication_counter import CommunicationCounter
from runtime.program_tools.adapters import apply_adapters, exchange_as_one_tensor
from runtime.program_tools.recompute import POLICIES, always_again, can_be_made_again, recomputed
from tests.ranks import answer, task

Function = Callable[[torch.Tensor], torch.Tensor]
WIDTH = 8


class Weights:
    """Parameters of this rank, the same on both unless ``cut``."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)

        def parameter(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

        self.up, self.down = parameter(2 * WIDTH, WIDTH), parameter(WIDTH, 2 * WIDTH)
        self.shard = parameter(WIDTH, WIDTH)
        self.classes = parameter(2 * WIDTH, WIDTH)

    def all(self) -> tuple[torch.Tensor, ...]:
        return (self.up, self.down, self.shard, self.classes)


w = Weights()


def sequence_parallel(x: torch.Tensor) -> torch.Tensor:
    """A gathered input that two products keep; a reduction that nobody keeps."""
    h = spmd.all_gather(F.layer_norm(x, [WIDTH]), "tp", src=S(1), dst=R)
    up = F.silu(F.linear(h, w.up)) * F.linear(h, w.up.cos())
    down = spmd.reinterpret(F.linear(up, w.down), "tp", src=V, dst=P)
    return torch.exp(0.1 * (x + spmd.reduce_scatter(down, "tp", src=P, dst=S(1))))


def all_reduced(x: torch.Tensor) -> torch.Tensor:
    """Both sums are of a product; the second is kept, by the product after it."""
    up = F.linear(F.gelu(x), w.up)
    first = spmd.all_reduce(spmd.reinterpret(F.linear(up.sin(), w.down), "tp", src=V, dst=P), "tp", src=P, dst=R)
    second = F.linear((first + 1.0).sin(), w.shard)
    second = spmd.all_reduce(spmd.reinterpret(second, "tp", src=V, dst=P), "tp", src=P, dst=R)
    return torch.exp(0.1 * F.linear(second, w.shard))


def sharded_weight(x: torch.Tensor) -> torch.Tensor:
    """A weight gathered in the program, seen through a view; an all-to-all before and after."""
    weight = spmd.all_gather(w.shard, "tp", src=S(0), dst=R)
    h = spmd.all_to_all(x.exp(), "tp", src=S(0), dst=S(1))
    h = F.linear(h, weight.t()[:, :WIDTH])
    return spmd.all_to_all(h, "tp", src=S(1), dst=S(0)).tanh()


def loss_of_classes(x: torch.Tensor) -> torch.Tensor:
    """An operator that sends inside."""
    logits = F.linear(x.tanh(), w.classes)
    target = torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2]) % (4 * WIDTH)
    return ops.cross_entropy(logits, target, vocabulary=4 * WIDTH, axes=("tp",)).exp()


def dropped(x: torch.Tensor) -> torch.Tensor:
    """Random draws, one of them of a gathered tensor."""
    h = ops.dropout(x.sin(), 0.5, shards={"tp": 1})
    h = spmd.all_gather(h, "tp", src=S(1), dst=R)
    h = ops.dropout(F.linear(h.exp(), w.up), 0.5, draw=1, shards={"tp": 2}).cos()
    return (
        spmd.reduce_scatter(F.linear(h, w.down), "tp", src=P, dst=S(1)) + ops.rand_like(x, draw=2, shards={"tp": 1}) * x
    )


def in_place(x: torch.Tensor) -> torch.Tensor:
    """A collective that writes into a tensor given to it."""
    return F.linear(spmd.all_gather(x.exp(), "tp", src=V, dst=R).sum(0).sin(), w.shard).cos()


class _Gathered(torch.autograd.Function):
    """A weight gathered over the axis for one use, as units of sharded weights do it."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh, group = mesh, mesh.get_group("tp").group_name
        detached = shard.detach()

        def make() -> list[torch.Tensor]:
            with always_again():
                whole = torch.ops._c10d_functional.all_gather_into_tensor(detached, 2, group)
                return [torch.ops._c10d_functional.wait_tensor(whole)]

        tensors = make()
        can_be_made_again(tensors, make)
        return tensors[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        group = ctx.mesh.get_group("tp").group_name
        reduced = torch.ops._c10d_functional.reduce_scatter_tensor(grad.contiguous(), "sum", 2, group)
        return torch.ops._c10d_functional.wait_tensor(reduced), None


def own_weights(x: torch.Tensor) -> torch.Tensor:
    """Weights gathered by other means than the program's."""
    return F.linear(F.linear(x.sin(), _Gathered.apply(w.shard, MESH)).cos(), _Gathered.apply(w.down, MESH)).exp()


BLOCKS = (sequence_parallel, all_reduced, sharded_weight, loss_of_classes, dropped, in_place, own_weights)


def run(function: Function, policy: str | None) -> tuple[list[torch.Tensor], Counter[str], Counter[str]]:
    """Output and gradients of two calls, one after the other, and what was sent forward and backward."""
    ops.seed(3)
    x = torch.linspace(-1.0, 1.0, 4 * 6 * WIDTH, dtype=torch.float64).reshape(4, 6, WIDTH).requires_grad_()
    for weight in w.all():
        weight.grad = None
    region = recomputed(function, policy, gathers_weights=function is own_weights) if policy else function
    with CommunicationCounter(MESH) as counter:
        with spmd.set_current_mesh(MESH):
            outputs = []
            for actual in (x, 0.5 * x):
                ops.begin_step(training=True)
                outputs.append(region(actual))
            drawn = ops.get_random_state()
        sum(output.square().sum() for output in outputs).backward()
    assert ops.get_random_state() == drawn
    gradients = [tensor.grad for tensor in (x, *w.all()) if tensor.grad is not None]
    sent: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for (collective, _, phase), (count, _) in counter.counts.items():
        sent[phase][collective] += count
    return [*(output.detach() for output in outputs), *gradients], sent["forward"], sent["backward"]


def compare(function: Function) -> dict[str, Any]:
    """By policy: the largest relative difference from the plain function, and what one call sends more than it."""
    expected, forward, backward = run(function, None)
    figures: dict[str, Any] = {}
    for policy in POLICIES:
        actual, forward_sent, backward_sent = run(function, policy)
        assert len(actual) == len(expected) and forward_sent == forward
        error = max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(actual, expected))
        again = {name: count / 2 for name, count in (backward_sent - backward).items()}
        assert not backward - backward_sent
        figures[policy] = {"error": error, "again": again}
    return figures


def exchanged(dtype: torch.dtype) -> list[Any]:
    """What each rank gets of rank r's ``10·r + target``, twice to rank 0, thrice to rank 1, and how it is counted."""
    rank = dist.get_rank()
    inputs = [torch.full((1, 2 + target), 10 * rank + target).to(dtype).t() for target in range(2)]
    outputs = [torch.empty(2 + rank, 1, dtype=dtype) for _ in range(2)]
    with CommunicationCounter(MESH) as counter:
        exchange_as_one_tensor(outputs, inputs, MESH.get_group("tp"))
    ((_, (count, num_bytes)),) = counter.counts.items()
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, [output.flatten().tolist() for output in outputs])
    return [*everywhere, count, num_bytes]


if __name__ == "__main__":
    names = task()
    MESH = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    apply_adapters()
    results = {function.__name__: compare(function) for function in BLOCKS if function.__name__ in names}
    answer({**results, "exchanged": {str(d): exchanged(d) for d in (torch.float64, torch.bfloat16, torch.int64)}})
