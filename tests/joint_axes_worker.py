"""One rank of the tests of collectives over several axes at once, on real processes, against plain torch."""

from __future__ import annotations

import copy
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import I, P, R, S
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import planner
from passes.capture import keep_float64
from runtime import ops
from runtime.mesh.communication_counter import CommunicationCounter
from runtime.mesh.joint_axes import remember
from runtime.program_tools.adapters import apply_adapters
from tests.ranks import answer, task

#: On dp: 2, tp: 2: type before, type after.
CONVERSIONS = {
    "all_gather": (S(1), R),
    "all_gather to I": (S(1), I),
    "all_to_all": (S(1), S(0)),
    "all_reduce": (P, R),
    "all_reduce to I": (P, I),
    "reduce_scatter": (P, S(1)),
}
PINS = {"rows*": {"dp": "S(1)", "tp": "S(1)"}, "columns*": {"dp": "S(0)", "tp": "S(0)"}}


def pins(mesh: str) -> dict[str, dict[str, str]]:
    """``PINS`` for the axes of another mesh of two."""
    return {name: {mesh[:2]: cut["dp"], mesh[5:7]: cut["tp"]} for name, cut in PINS.items()}


class Turn(nn.Module):
    """Sums over columns, then over rows: what is split one way must be split the other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 64, dtype=torch.float64).view(8, 8))
        self.rows, self.columns = nn.Softmax(0), nn.Softmax(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.columns(self.rows(x * self.scale)).square().mean()


def main() -> None:
    assert task() is not None
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    remember(mesh)
    apply_adapters()  # as programs run: torch 2.11 has no all-to-all of lists on gloo
    results: dict[str, Any] = {name: converted(name, mesh) for name in CONVERSIONS}
    results["autocast"] = gradient_under_autocast(mesh)
    with keep_float64():
        results["model"] = trained("dp=2,tp=2")
        results["model on another mesh"] = trained("dp=2,cp=2")  # the groups of dp=2,tp=2, by other names
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    answer(everyone)


def converted(name: str, mesh: Any) -> dict[str, Any]:
    """Errors of one conversion and of its gradient, and what it sent; rank r of dp × tp holds part r of four."""
    rank, count = dist.get_rank(), dist.get_world_size()
    source, target = CONVERSIONS[name]
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    parts = torch.randn(count, 8, 8, generator=generator, dtype=torch.float64)  # partial sums of a tensor
    x = (parts[rank] if source is P else whole.chunk(count, source.dim)[rank]).clone().requires_grad_()
    call = getattr(spmd, name.partition(" ")[0])
    with spmd.set_current_mesh(mesh), CommunicationCounter(mesh) as counter:
        y = call(x, ops.joint("dp", "tp"), src=source, dst=target)
        weight = torch.randn(8, 8, generator=generator, dtype=torch.float64)
        own = weight if target in (R, I) else weight.chunk(count, target.dim)[rank]
        (y * own).sum().backward()
    expected = parts.sum(0) if source is P else whole
    expected = expected if target in (R, I) else expected.chunk(count, target.dim)[rank]
    # Of R every rank's gradient is a part, here the whole of ``weight`` on each.
    gradient = weight * (count if target is R else 1)
    gradient = gradient if source is P else gradient.chunk(count, source.dim)[rank]
    return {
        "error": float((y - expected).abs().max()),
        "gradient": float((x.grad - gradient).abs().max()) if x.grad is not None else None,
        "sent": [(each.collective, each.axis, each.phase, each.num_bytes) for each in counter.collectives],
    }


def gradient_under_autocast(mesh: Any) -> tuple[str, float]:
    """Its dtype and sum, of what autocast narrows and a program of float32 gathers to be whole on every rank."""
    x = torch.ones(2, 4, requires_grad=True)
    with spmd.set_current_mesh(mesh), torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = x @ torch.ones(4, 4)
        spmd.all_gather(narrow, "tp", src=S(1), dst=R).sum().backward()
    assert x.grad is not None
    return str(narrow.dtype), float(x.grad.sum())


def trained(mesh: str) -> dict[str, Any]:
    """Loss and gradient of ``Turn`` under a plan that must turn it, against one device."""
    model, batch = Turn(), torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8)
    alone = copy.deepcopy(model)
    parallel = planner.compile(model, mesh, example_inputs=(batch,), constraints=pins(mesh))
    with CommunicationCounter(parallel.layout.device_mesh) as counter:
        loss = parallel.train_step(batch)
    alone(batch).backward()
    gradient = parallel.full_gradients()["scale"]
    assert alone.scale.grad is not None
    return {
        "loss": abs(float(loss) - float(alone(batch))),
        "gradient": float((gradient - alone.scale.grad).abs().max() / alone.scale.grad.abs().max()),
        "as planned": set(counter.collectives) == {entry for entry in parallel.plan.collectives if entry.count},
        "collectives": [(each.collective, each.axis, each.phase) for each in parallel.plan.collectives],
        "source": parallel.source,
    }


if __name__ == "__main__":
    main()
