"""Records what the ranks of plans send: steps with clipping, evaluation, whole weights, a checkpoint and back.

A plan that comes as text is a scenario of ``tests.communication.scenarios``, or a mesh: there, a user's own loop calls
``backward``.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist

import planner
from passes.plan import Plan
from runtime.checkpoint import CheckpointManager
from tests import ranks
from tests.communication.plans import small_model
from tests.communication.recorder import recorded
from tests.communication.scenarios import SCENARIOS
from tests.small_models import mlp_batch, squared_error
from tests.tracing import traced_once

#: Schedules whose chunks are on the same ranks as another's, which evaluates, saves and loads for them too.
PLACED_ALIKE = ("1f1b", "zb_h1", "dualpipev")


def record(plan: Plan | str) -> list[dict[str, Any]]:
    batch = mlp_batch()
    parallel = planner.compile(small_model(), plan, example_inputs=batch, loss_fn=squared_error)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01, momentum=0.9)
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    checkpoints = CheckpointManager(folder[0])
    with recorded() as recorder:
        for _ in range(2):
            if isinstance(plan, str):
                parallel(*batch).loss.backward()
            else:
                parallel.train_step(*batch)
            parallel.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(plan, str) or plan.step.schedule not in PLACED_ALIKE:
            checkpoints.save(parallel, optimizer, step=2)
            parallel.eval()
            with torch.no_grad():
                parallel(*batch)
            parallel.full_state_dict()
            checkpoints.load(parallel, optimizer)
            parallel.train()
        parallel.train_step(*batch)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return [call.to_dict() for call in recorder.calls]


def main() -> None:
    results = []
    for plan in ranks.task():
        if isinstance(plan, str) and plan in SCENARIOS:
            calls = [call.to_dict() for call in SCENARIOS[plan]()]
        else:
            calls = record(plan if isinstance(plan, str) else Plan.from_dict(plan))
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, calls)
        results.append(everywhere)
    ranks.answer(results)


if __name__ == "__main__":
    with traced_once():
        main()
