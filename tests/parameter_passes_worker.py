"""One of some ranks: bytes of the passes over gradients and weights that a step makes, and that it is priced for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import planner
from planner.verification.verify_model import slow_devices
from tests.ranks import answer, task
from tests.small_models import squared_error

BATCH, WIDTH = 8, 64
#: Bytes that SGD reads and writes of a parameter: a gradient read, the parameter read and written.
UPDATE_BYTES = 12


class PassBytes(TorchDispatchMode):
    """Bytes that copies of lists of tensors, and additions to tensors that gradients are kept in, read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            self.total += _bytes_of(args[0]) + _bytes_of(args[1])
        elif func is torch.ops.aten._foreach_add_.List:
            self.total += 2 * _bytes_of(args[0]) + _bytes_of(args[1])
        elif func is torch.ops.aten.add_.Tensor and args[0].dim() == 1:
            self.total += 3 * _bytes_of(args[:1])  # what was reduced of a flat buffer
        return func(*args, **(kwargs or {}))


def _bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def counted(dtype: str, *, zero: int, num_microbatches: int, world_size: int) -> dict[str, float]:
    """Bytes of one step of two layers, and those behind its prices."""
    torch_dtype = getattr(torch, dtype)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(torch_dtype)
    batch = tuple(torch.randn(BATCH, WIDTH, dtype=torch_dtype) for _ in range(2))
    cluster = slow_devices(world_size)
    fix = {"pp": 1, "dp": world_size, "zero": zero, "num_microbatches": num_microbatches, "recompute": "none"}
    parallel = planner.compile(
        model, cluster, example_inputs=batch, loss_fn=squared_error, optimizer="sgd", fix=fix
    )  # fmt: skip
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(2):  # the first call makes what later ones use again
        with PassBytes() as passes:
            parallel.train_step(*batch)
        optimizer.step()
        optimizer.zero_grad()
    step = parallel.plan.step
    layers = [
        (costs, parts, count)
        for chunk in step.chunks
        for (costs, count), parts in zip(chunk.costs.layers, chunk.parts, strict=True)
    ]
    each_time = sum(
        count * (parts.accumulate + parts.unpack_forward + parts.unpack_backward) for _, parts, count in layers
    )
    # The inputs have no gradient, for which alone the first layer's weight would be gathered again.
    each_time -= layers[0][1].unpack_backward
    second_per_byte = cluster.device.seconds(flops=0.0, num_bytes=1.0, dtype="float32", kind="list_copy")
    updates = sum(count * costs.update_step for costs, _, count in layers) / second_per_byte
    elements = sum(parameter.numel() for parameter in model.parameters())
    casts = updates - UPDATE_BYTES * elements / (world_size if zero else 1)
    priced = num_microbatches * each_time / second_per_byte + casts
    return {"made": passes.total, "priced": priced}


def main() -> None:
    cases = task()
    answer({str(case): counted(**case, world_size=dist.get_world_size()) for case in cases})


if __name__ == "__main__":
    main()
