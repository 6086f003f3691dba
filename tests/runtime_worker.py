"""One rank of the tests of ``planner.compile`` on real processes; rank 0 says which scenarios went as they should."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import planner
from tests.ranks import answer, task
from tests.small_models import Mlp, TiedClassifier, mlp_batch, seeded, squared_error, token_batch

OPTIONS: dict[str, Any] = {"forbid_replicated_matmul": True}


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def close(actual: torch.Tensor, expected: torch.Tensor, *, tolerance: float = 1e-9) -> bool:
    return bool((actual.detach() - expected.detach()).abs().max() <= tolerance * expected.detach().abs().max())


def plans_at_the_first_call() -> bool:
    """An optimizer made before there is a plan trains the shards."""
    model, batch = seeded(Mlp), mlp_batch()
    columns = {"layers.*.up.weight": {"tp": "S(0)"}}
    parallel = planner.compile(seeded(Mlp), "tp=2", loss_fn=squared_error, constraints=columns, **OPTIONS)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (parallel, model)]
    for _ in range(3):
        parallel(*batch).loss.backward()
        squared_error(model(batch[0]), batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = parallel.full_state_dict()
    sharded = parallel.layers[0].up.weight.to_local().numel() < model.layers[0].up.weight.numel()
    return sharded and all(close(whole[name], tensor) for name, tensor in model.state_dict().items())


def other_shapes_and_modes() -> bool:
    model = seeded(TiedClassifier)
    pins = {"input:*": {"dp": "S(0)"}}
    parallel = planner.compile(seeded(TiedClassifier), {"dp": 2}, constraints=pins, **OPTIONS)
    checks = []
    for batch in (token_batch(), token_batch(batch=2), token_batch(length=9)):
        checks.append(close(parallel(**batch).loss, model(**batch)["loss"]))
    parallel.eval()
    with torch.no_grad():
        tokens = token_batch(batch=4)["tokens"]
        checks.append(close(parallel(tokens)["logits"], model(tokens)["logits"]))
    odd = token_batch(batch=7)  # the two ranks cannot share it
    checks.append(close(parallel(**odd).loss, model(**odd)["loss"]))
    return all(checks)


def errors_reach_every_rank() -> bool:
    pins = {"middle.weight": {"tp": "S(7)"}}
    infeasible = error_of(
        lambda: planner.compile(
            seeded(TiedClassifier), "tp=2", example_inputs=token_batch(), constraints=pins, **OPTIONS
        )
    )
    mismatch = error_of(lambda: planner.compile(seeded(Mlp), "dp=2,tp=2"))
    return bool(infeasible) and "world size is 2" in mismatch


def plans_are_saved_and_run_again() -> bool:
    path = Path(os.environ["MESHWRIGHT_TEST_FOLDER"]) / f"plan{dist.get_rank()}.json"
    batch = token_batch()
    first = planner.compile(seeded(TiedClassifier), "tp=2", example_inputs=batch, **OPTIONS)
    first.save(path)
    saved = first.source
    again = planner.compile(seeded(TiedClassifier), path)
    other = error_of(lambda: planner.compile(seeded(Mlp), path))
    same = close(again(**batch).loss, first(**batch).loss, tolerance=0.0) and again.source == first.source
    return same and "another model" in other and path.with_suffix(".py").read_text() == saved


def the_plan_is_the_same_everywhere() -> bool:
    parallel = planner.compile(seeded(TiedClassifier), "dp=2", example_inputs=token_batch(), **OPTIONS)
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, parallel.plan.to_json())
    return plans[0] == plans[1]


def meta_models_take_a_state_dict() -> bool:
    model, batch = seeded(TiedClassifier), token_batch()
    with torch.device("meta"):
        empty = TiedClassifier().double()
    parallel = planner.compile(empty, "tp=2", example_inputs=batch, **OPTIONS)
    refused = "meta device" in error_of(lambda: parallel(**batch))
    parallel.load_full_state_dict(model.state_dict())
    return refused and close(parallel(**batch).loss, model(**batch)["loss"])


def verify_leaves_the_process_group_alone() -> bool:
    report = planner.verify(seeded(TiedClassifier), "dp=2,tp=2", batch=token_batch(), **OPTIONS)
    total = torch.ones(())
    dist.all_reduce(total)
    return report.ok and float(total) == 2.0 and dist.get_world_size() == 2


def ranks_seeded_apart_mask_alike() -> bool:
    """Masks follow the first rank's ``torch.manual_seed``, whatever the others set."""
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed if dist.get_rank() == 0 else 1000 + dist.get_rank())
        model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout(0.5))
        results.append(planner.compile(model, "tp=2")(torch.ones(8, 8)))
    copies: list[Any] = [None, None]
    dist.all_gather_object(copies, results)
    alike = all(torch.equal(one, other) for one, other in zip(*copies))
    return alike and torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


SCENARIOS = (
    ranks_seeded_apart_mask_alike,
    plans_at_the_first_call,
    other_shapes_and_modes,
    errors_reach_every_rank,
    plans_are_saved_and_run_again,
    the_plan_is_the_same_everywhere,
    meta_models_take_a_state_dict,
    verify_leaves_the_process_group_alone,
)

if __name__ == "__main__":
    names = task()
    answer({scenario.__name__: scenario() for scenario in SCENARIOS if scenario.__name__ in names})
