"""One rank of the tests of compiling plans of whole steps; rank 0 says which scenarios went as they should."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import planner
from passes.fuse.registered_fusions import forget_fusions
from tests.ranks import answer, task
from tests.runtime_worker import close, error_of
from tests.small_models import Mlp, TiedClassifier, mlp_batch, seeded, squared_error, token_batch
from tests.tracing import traced_once

STEPS = 3
CLUSTER = "cpu-local:4"
DP2_TP2 = {"dp": 2, "tp": 2}


def trains_alike(parallel: Any, model: nn.Module, batch: dict[str, torch.Tensor]) -> bool:
    """Losses and, after some AdamW steps, all weights are those of the model on one device."""
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (parallel, model)]
    same = True
    for _ in range(STEPS):
        loss, expected = parallel(**batch).loss, model(**batch)["loss"]
        same &= close(loss, expected)
        loss.backward()
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = parallel.full_state_dict()
    return same and all(close(whole[name], tensor, tolerance=1e-7) for name, tensor in model.state_dict().items())


def trains_on_a_cluster() -> bool:
    batch = token_batch()
    parallel = planner.compile(seeded(TiedClassifier), CLUSTER, example_inputs=batch, fix=DP2_TP2)
    step = parallel.plan.step
    runnable = step.axes == {"pp": 1, "dp": 2, "cp": 1, "tp": 2} and step.num_microbatches == 1 and step.zero == (0,)
    return runnable and trains_alike(parallel, seeded(TiedClassifier), batch)


def chooses_a_mesh_for_the_cluster() -> bool:
    """Without demands whatever it chooses fills the cluster and computes the same; positional inputs and a loss too."""
    batch = mlp_batch()
    cluster = planner.Cluster.uniform(4, flops=1e9, memory_bandwidth=1e9, latency=0.0, bandwidth=1e10)
    parallel = planner.compile(seeded(Mlp), cluster, example_inputs=batch, loss_fn=squared_error)
    loss = squared_error(seeded(Mlp)(batch[0]), batch)
    return parallel.plan.mesh.num_devices == 4 and close(parallel(*batch).loss, loss)


def axes_lie_as_planned() -> bool:
    """A plan whose tensor axis is the outermost joins the ranks that are furthest apart on it."""
    path = Path(os.environ["MESHWRIGHT_TEST_FOLDER"]) / f"plan{dist.get_rank()}.json"
    batch = token_batch()
    results = planner.compile(seeded(TiedClassifier), CLUSTER, example_inputs=batch, fix=DP2_TP2).plan
    step = dataclasses.replace(results.step, axes={"tp": 2, "dp": 2, "cp": 1, "pp": 1})
    dataclasses.replace(results, step=step).save(path)
    parallel = planner.compile(seeded(TiedClassifier), path)
    ranks = parallel.layout.device_mesh.mesh
    return ranks[:, 0, :].tolist() == [[0, 2], [1, 3]] and trains_alike(parallel, seeded(TiedClassifier), batch)


def other_shapes_keep_the_shards() -> bool:
    model, batch = seeded(TiedClassifier), token_batch()
    parallel = planner.compile(seeded(TiedClassifier), CLUSTER, example_inputs=batch, fix=DP2_TP2)
    parallel(**batch)
    parallel.eval()
    with torch.no_grad():
        tokens = token_batch(batch=4, length=9)["tokens"]
        return close(parallel(tokens)["logits"], model(tokens)["logits"])


def bad_input_is_refused() -> bool:
    batch = token_batch()
    defaults: dict[str, Any] = {"example_inputs": batch, "fix": DP2_TP2}

    def compiled(target: Any = CLUSTER, **changes: Any) -> str:
        return error_of(lambda: planner.compile(seeded(TiedClassifier), target, **{**defaults, **changes}))

    errors = {
        "world size is 4": compiled("cpu-local:2"),
        "example_inputs is missing": compiled(example_inputs=None),
        "dp=3 cannot be met": compiled(fix={"dp": 3}),
        "cluster does not go with": compiled(cluster="cpu-local:4"),
        "plan does not go with": compiled(plan="plan.json"),
        "axis sizes are written": compiled("dp2"),
        "a step has no mesh axis 'x'": compiled("x=4"),
        "precision 'narrow' is not known": compiled(precision="narrow"),
    }
    return all(words in error for words, error in errors.items())


def runs_a_saved_plan_with_everything() -> bool:
    """A pipeline, micro-batches, recomputation and ZeRO, planned offline and read from a file."""
    path = Path(os.environ["MESHWRIGHT_TEST_FOLDER"]) / f"everything{dist.get_rank()}.json"
    batch = token_batch()
    fix = {"pp": 2, "dp": 2, "num_microbatches": 2, "zero": 1, "recompute": "full"}
    planner.plan(seeded(TiedClassifier), CLUSTER, example_inputs=batch, fix=fix).save(path)
    parallel = planner.compile(seeded(TiedClassifier), path)
    model = seeded(TiedClassifier)
    loss, expected = parallel.train_step(**batch), model(**batch)["loss"]
    expected.backward()
    gradients = parallel.full_gradients()
    return close(loss, expected) and all(
        close(gradients[name], parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    )


def late_weights(rank: int, num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> list[tuple[str, int, int]]:
    """GPipe with the gradients of weights at its end."""
    return [(kind, rank, microbatch) for kind in "FIW" for microbatch in range(num_microbatches)]


def a_registered_schedule_trains_alike() -> bool:
    planner.register_schedule("late_weights", late_weights)
    batch, model = token_batch(), seeded(TiedClassifier)
    fix = {"pp": 2, "dp": 2, "num_microbatches": 2, "schedule": "late_weights"}
    parallel = planner.compile(seeded(TiedClassifier), CLUSTER, example_inputs=batch, fix=fix)
    loss, expected = parallel.train_step(**batch), model(**batch)["loss"]
    expected.backward()
    gradients = parallel.full_gradients()
    same = [close(gradients[name], each.grad) for name, each in model.named_parameters() if each.grad is not None]
    return parallel.plan.step.schedule == "late_weights" and close(loss, expected) and all(same)


def ranks_that_register_otherwise_are_refused() -> bool:
    first = dist.get_rank() == 0
    planner.register_fusion("doubled", "x + x", "mul(x, 2)" if first else "mul(x, 2.0)")
    refused = error_of(lambda: planner.compile(seeded(TiedClassifier), "dp=4", example_inputs=token_batch()))
    forget_fusions()
    return "what is registered" in refused and "doubled" in refused


SCENARIOS: tuple[Callable[[], bool], ...] = (
    trains_on_a_cluster,
    chooses_a_mesh_for_the_cluster,
    axes_lie_as_planned,
    other_shapes_keep_the_shards,
    bad_input_is_refused,
    runs_a_saved_plan_with_everything,
    a_registered_schedule_trains_alike,
    ranks_that_register_otherwise_are_refused,
)

if __name__ == "__main__":
    names = task()
    with traced_once():
        results = {scenario.__name__: scenario() for scenario in SCENARIOS if scenario.__name__ in names}
    answer(results)
