"""One rank of the parity tests: trains models sharded on real processes; rank 0 also trains them alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

import planner
from passes.capture import keep_float64
from planner.library import load_config, random_batch
from planner.verification.comparison import NEGLIGIBLE, difference, differences, gradients_of, largest_of, single_loss
from planner.verification.verify_model import real_module, slow_devices
from runtime.mesh.communication_counter import CommunicationCounter
from tests.ranks import answer, task
from tests.small_models import Mlp, mlp_batch, seeded, squared_error
from tests.tracing import traced_once

STEPS = 3
LEARNING_RATE = 1e-3
#: As many as make a block that repeats.
LAYERS = 2


def main() -> None:
    answer({f"{model} {mesh}": compare(model, mesh) for model, mesh in task()})


def build(
    name: str, *, layers: int | None = None, batch_size: int = 8
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    """The model (with another number of layers than the library's), one batch (args, kwargs), and a loss function."""
    if name == "mlp":
        return seeded(Mlp), mlp_batch(), {}, squared_error
    config = load_config(name)
    if layers is not None:
        config.num_hidden_layers = layers
    module = real_module(config, dtype=torch.float64, seed=0)
    return module, (), random_batch(module, batch_size=batch_size, seq_len=12), None


def compare(name: str, mesh: str) -> dict[str, Any]:
    """Largest relative error of loss, gradients and weights after three AdamW steps."""
    single, args, kwargs, loss_fn = build(name, layers=LAYERS)
    with keep_float64():
        parallel = planner.compile(
            copy.deepcopy(single),
            mesh,
            cluster=slow_devices(dist.get_world_size()),
            loss_fn=loss_fn,
            example_inputs=args or kwargs,
            forbid_replicated_matmul=True,
        )
        alone = dist.get_rank() == 0
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)
        single_optimizer = torch.optim.AdamW(single.parameters(), lr=LEARNING_RATE)
        comparisons = []
        counted = None
        for step in range(STEPS):
            with CommunicationCounter(parallel.layout.device_mesh) as counter:
                if step == 0:
                    loss = parallel.train_step(*args, **kwargs)
                else:
                    loss = parallel(*args, **kwargs).loss
                    loss.backward()
            counted = counted or counter.collectives
            gradients = parallel.full_gradients() if step == 0 else {}
            if alone:
                wanted_loss = single_loss(single, args, kwargs, loss_fn)
                wanted_loss.backward()
                comparisons.append(difference("loss", f"loss {step}", loss.detach(), wanted_loss))
                if step == 0:
                    expected = gradients_of(single)
                    comparisons += differences(
                        "gradients", gradients, expected, floor=NEGLIGIBLE * largest_of(expected)
                    )
                single_optimizer.step()
                single_optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        state = parallel.full_state_dict()
    if not alone:
        return {}
    comparisons += differences("weights", state, single.state_dict(), floor=LEARNING_RATE)
    worst = max(comparisons, key=lambda comparison: comparison.error)
    return {
        "error": worst.error,
        "worst": f"{worst.what}: {worst.name}",
        "as_planned": set(counted or ()) == {entry for entry in parallel.plan.collectives if entry.count},
        "tensors": len(comparisons),
    }


if __name__ == "__main__":
    with traced_once():
        main()
