"""Records what the ranks of plans send: two training steps with clipping, and a pass without gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import planner
from passes.plan import Plan
from tests import ranks
from tests.communication.plans import small_model
from tests.communication.recorder import recorded
from tests.small_models import mlp_batch, squared_error
from tests.tracing import traced_once


def record(plan: Plan) -> list[dict[str, Any]]:
    batch = mlp_batch()
    parallel = planner.compile(small_model(), plan, example_inputs=batch, loss_fn=squared_error)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    with recorded() as recorder:
        for _ in range(2):
            parallel.train_step(*batch)
            parallel.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            parallel(*batch)
    return [call.to_dict() for call in recorder.calls]


def main() -> None:
    found = []
    for plan in map(Plan.from_dict, ranks.task()):
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, record(plan))
        found.append(everywhere)
    ranks.answer(found)


if __name__ == "__main__":
    with traced_once():
        main()
