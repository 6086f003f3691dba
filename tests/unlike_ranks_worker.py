"""One rank of the tests of ranks that differ: what each rank saw, by scenario."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import planner
from tests.ranks import answer, task
from tests.runtime_worker import close
from tests.small_models import TiedClassifier, token_batch

BATCH = token_batch()
#: Plans of a mesh made at compile and at the first call, and plans of a step.
PLANS: tuple[dict[str, Any], ...] = (
    {"mesh": "tp=2", "example_inputs": BATCH, "forbid_replicated_matmul": True},
    {"mesh": "dp=2", "forbid_replicated_matmul": True},
    {"mesh": "pp=2", "example_inputs": BATCH},
    {"mesh": "pp=1,dp=2", "example_inputs": BATCH, "fix": {"zero": 3}},
)


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return TiedClassifier().double()


def the_first_ranks_weights_count() -> bool:
    """Each rank builds another model: all train the first one's."""
    rank, same = dist.get_rank(), True
    for plan in PLANS:
        model = built(seed=0)
        parallel = planner.compile(built(seed=rank), **plan)
        before = parallel.full_state_dict()
        same &= all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        loss = model(**BATCH)["loss"]
        loss.backward()
        same &= close(parallel.train_step(**BATCH), loss)
        gradients = parallel.full_gradients()
        trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        same &= all(close(gradients[name], gradient) for name, gradient in trained.items())
    return same


def only_the_first_rank_needs_weights() -> bool:
    """The others may build theirs on the meta device."""
    model = built(seed=0)
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        own = built(seed=0)
    parallel = planner.compile(own, **PLANS[0])
    return close(parallel.train_step(**BATCH), model(**BATCH)["loss"])


SCENARIOS: tuple[Callable[[], bool], ...] = (the_first_ranks_weights_count, only_the_first_rank_needs_weights)


if __name__ == "__main__":
    names = task()
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        seen, {scenario.__name__: scenario() for scenario in SCENARIOS if scenario.__name__ in names}
    )
    answer({name: all(results[name] for results in seen) for name in names})
