"""One of four ranks, two on each of two islands: layers freeze on the way, and training goes back and resumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import planner
from passes.capture import keep_float64
from planner.verification.verify_model import slow_devices
from runtime.agreement.ranks_together import gathered
from tests.islands_worker import trained, weights
from tests.patience import PATIENCE
from tests.ranks import answer, task
from tests.small_models import Mlp, mlp_batch, seeded, squared_error
from tests.tracing import traced_once


class Shifted(Mlp):
    """With a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift


def compiled(islands: planner.Islands, plan: dict[str, int], frozen: tuple[str, ...]) -> tuple[Any, planner.DiLoCo]:
    """The second island begins with other values of all that there is."""
    model = seeded(Shifted)
    with torch.no_grad():
        for value in model.state_dict().values() if islands.index else ():
            value.mul_(1.5)
    freeze(model, frozen)
    parallel = planner.compile(
        model,
        islands.mesh(plan),
        cluster=slow_devices(2),
        loss_fn=squared_error,
        example_inputs=mlp_batch(),
        time_limit=PATIENCE,
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    return parallel, planner.DiLoCo(parallel, optimizer, islands=islands, inner_steps=4)


def freeze(module: Any, prefixes: tuple[str, ...]) -> None:
    for name, parameter in module.named_parameters():
        if name.startswith(prefixes):
            parameter.requires_grad_(False)


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict whose tensors training does not change (torch 2.11 makes no deep copies of DTensors)."""
    entries = {
        number: {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in entry.items()}
        for number, entry in state["state"].items()
    }
    return {**state, "state": entries}


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    payload = task()
    islands, float64 = planner.Islands(2), torch.float64
    result: dict[str, Any] = {}
    with keep_float64():
        parallel, outer = compiled(islands, payload["plans"][islands.index], ("first.",))
        result["begins"] = weights(parallel)
        manager = planner.CheckpointManager(f"{payload['folder']}/{islands.index}", ranks=islands.ranks)
        losses = trained(parallel, outer, islands, range(5), float64)
        freeze(parallel, ("layers.0.",))
        losses = [one + two for one, two in zip(losses, trained(parallel, outer, islands, range(5, 6), float64))]
        manager.save(parallel, outer, step=6)
        whole, state = parallel.full_state_dict(), copied(outer.state_dict())
        rest = trained(parallel, outer, islands, range(6, 13), float64)
        result["losses"] = [one + two for one, two in zip(losses, rest)]
        outer.synchronise()
        result["weights"] = weights(parallel)
        result["bytes"] = sum(gathered(outer.bytes_sent)[:2])
        # Back to the sixth step, by a state dict.
        parallel.load_full_state_dict(whole)
        outer.load_state_dict(state)
        result["again"] = trained(parallel, outer, islands, range(6, 13), float64)
        result["replan"] = error_of(lambda: parallel.replan(slow_devices(2), outer))
        outer.step() if islands.index else None
        result["steps"] = error_of(outer.synchronise)
        # The same from the checkpoint, with all of a stage frozen on one island.
        parallel, outer = compiled(islands, payload["resumed"][islands.index], ("first.",))
        manager.load(parallel, outer)
        freeze(parallel, ("layers.0.",))
        result["resumed"] = trained(parallel, outer, islands, range(6, 13), float64)
        outer.synchronise()
        result["resumed weights"] = weights(parallel)
        freeze(parallel, ("layers.1.",) if islands.index else ())
        result["differing"] = error_of(lambda: trained(parallel, outer, islands, range(13, 16), float64))
    answer(result)


if __name__ == "__main__":
    with traced_once():
        main()
