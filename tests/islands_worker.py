"""One of four ranks, two on each of two islands, that train by DiLoCo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import planner
from passes.capture import keep_float64
from planner.verification.verify_model import slow_devices
from runtime.agreement.ranks_together import gathered
from tests.patience import PATIENCE
from tests.ranks import answer, task
from tests.small_models import Mlp, mlp_batch, seeded, squared_error
from tests.tracing import traced_once


class SlowLink(TorchDispatchMode):
    """Counts what this rank's all-reduces and gathers send to ranks of the other island: of two ranks, the buffer."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(("c10d.allreduce_", "c10d._allgather_base_")):
            group = next(value for value in map(_group_of, args) if value is not None)
            ranks = dist.get_process_group_ranks(group)
            if len({rank // 2 for rank in ranks}) == 2:
                assert len(ranks) == 2
                sent = args[0][0] if "allreduce" in name else args[1]
                self.num_bytes += sent.numel() * sent.element_size()
        return func(*args, **(kwargs or {}))


def _group_of(value: Any) -> Any:
    return dist.ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(
        value._type()
    ) else None  # fmt: skip


def compiled(islands: planner.Islands, plan: dict[str, Any], dtype: torch.dtype) -> tuple[Any, torch.optim.Optimizer]:
    axes = {axis: size for axis, size in plan.items() if axis != "zero"}
    fix = {"fix": {"zero": plan["zero"]}} if "zero" in plan else {"forbid_replicated_matmul": True}
    model = seeded(Mlp).to(dtype)
    torch.nn.init.ones_(model.first.weight) if islands.index else None  # the first island's weights count
    parallel = planner.compile(
        model,
        islands.mesh(axes),
        cluster=slow_devices(2),
        loss_fn=squared_error,
        example_inputs=tuple(tensor.to(dtype) for tensor in mlp_batch()),
        **(fix if "pp" not in axes else {"time_limit": PATIENCE}),
    )
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2)


def trained(
    parallel: Any, outer: planner.DiLoCo, islands: planner.Islands, steps: range, dtype: torch.dtype
) -> list[list[float]]:
    """The losses of both islands."""
    losses = []
    for step in steps:
        batch = mlp_batch(seed=1000 * islands.index + step)
        losses.append(float(parallel.train_step(*(tensor.to(dtype) for tensor in batch))))
        outer.step()
        outer.zero_grad()
    by_rank = gathered(losses)
    return [by_rank[0], by_rank[2]]


def weights(parallel: Any) -> list[dict[str, Any]]:
    own = {name: value.tolist() for name, value in parallel.full_state_dict().items()}
    by_rank = gathered(own)
    return [by_rank[0], by_rank[2]]


def parity(payload: dict[str, Any], islands: planner.Islands) -> dict[str, Any]:
    """Train, save on the way, and resume under other plans."""
    dtype, options = torch.float64, {"islands": islands, "inner_steps": payload["H"], "fragments": payload["fragments"]}
    manager = planner.CheckpointManager(f"{payload['folder']}/{islands.index}", ranks=islands.ranks)
    with keep_float64():
        parallel, optimizer = compiled(islands, payload["plans"][islands.index], dtype)
        outer = planner.DiLoCo(parallel, optimizer, **options)
        losses = trained(parallel, outer, islands, range(payload["saved"]), dtype)
        manager.save(parallel, outer, step=payload["saved"])
        rest = range(payload["saved"], payload["steps"])
        losses = [one + two for one, two in zip(losses, trained(parallel, outer, islands, rest, dtype))]
        before = weights(parallel)
        outer.synchronise()
        after = weights(parallel)
        parallel, optimizer = compiled(islands, payload["resumed"][islands.index], dtype)
        outer = planner.DiLoCo(parallel, optimizer, **options)
        manager.load(parallel, outer)
        resumed = trained(parallel, outer, islands, rest, dtype)
    return {"losses": losses, "resumed": resumed, "before": before, "after": after}


def counted(plan: dict[str, Any], islands: planner.Islands, wire_format: str | None) -> dict[str, float]:
    """Bytes that both ranks of the first island send over the slow link in two rounds of H = 4 steps, in fragments."""
    parallel, optimizer = compiled(islands, plan, torch.float32)
    outer = planner.DiLoCo(
        parallel, optimizer, islands=islands, inner_steps=4, fragments=2, wire_format=wire_format
    )  # fmt: skip
    with SlowLink() as link:
        trained(parallel, outer, islands, range(8), torch.float32)
    by_rank = gathered((link.num_bytes, outer.bytes_sent))
    return {"counted": by_rank[0][0] + by_rank[1][0], "said": by_rank[0][1] + by_rank[1][1]}


def with_synchronous_start(payload: dict[str, Any], islands: planner.Islands) -> dict[str, Any]:
    """Losses, weights and bytes of a training whose first steps are synchronous, and whose gradients are clipped."""
    losses, options = list[float](), payload["synchronous start"]
    with keep_float64():
        parallel, optimizer = compiled(islands, payload["plans"][islands.index], torch.float64)
        outer = planner.DiLoCo(parallel, optimizer, islands=islands, **options["options"])
        with SlowLink() as link:
            for step in range(options["steps"]):
                losses.append(float(parallel.train_step(*mlp_batch(seed=1000 * islands.index + step))))
                outer.average_gradients()
                parallel.clip_grad_norm_(options["max_norm"])
                outer.step()
                outer.zero_grad()
        by_rank = gathered((losses, link.num_bytes, outer.bytes_sent))
        return {
            "losses": [by_rank[0][0], by_rank[2][0]],
            "weights": weights(parallel),
            "counted": by_rank[0][1] + by_rank[1][1],
            "said": by_rank[0][2] + by_rank[1][2],
        }


def refused(islands: planner.Islands) -> list[str]:
    messages = []
    parallel, optimizer = compiled(islands, {"dp": 2}, torch.float32)
    for options in (
        {"inner_steps": 2 + islands.index},
        {"inner_steps": 2, "fragments": 3},
        {"inner_steps": 0},
        {"inner_steps": 2, "wire_format": "int4"},
        {"inner_steps": 2, "synchronous_steps": -1},
    ):
        try:
            planner.DiLoCo(parallel, optimizer, islands=islands, **options)
        except ValueError as error:
            messages.append(str(error))
    return messages


def main() -> None:
    payload = task()
    islands = planner.Islands(2)
    result: dict[str, Any] = {"parity": parity(payload, islands), "refused": refused(islands)}
    result["synchronous start"] = with_synchronous_start(payload, islands)
    result["bytes"] = [counted(plan, islands, wire) for plan, wire in payload["counted"]]
    answer(result)


if __name__ == "__main__":
    with traced_once():
        main()
