"""One rank of the tests of experts on several ranks: trained sharded on real processes, beside plain eager training."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist

import planner
from passes.capture import keep_float64
from runtime.mesh.communication_counter import CommunicationCounter
from tests.expert_families import family_batch, family_model
from tests.expert_models import mixture, mixture_batch
from tests.ranks import answer, task
from tests.tracing import traced_once


def main() -> None:
    answer([compare_looped(**case) if "family" in case else compare(**case) for case in task()])


def compare(
    mesh: str, options: dict[str, Any], model: dict[str, Any], nobody: bool = False, evaluated: bool = False
) -> dict[str, Any]:
    """Largest relative error of loss, gradients, and weights after three AdamW steps; the collectives of one step.

    ``nobody``: the router sends every token to the first experts, so that a rank has none. ``evaluated``: one loss
    without gradients, too.
    """
    single, batch = mixture(**model), mixture_batch()
    if nobody:
        for layer in single.layers:
            torch.nn.init.zeros_(layer.router.weight)
    with keep_float64():
        parallel = planner.compile(copy.deepcopy(single), mesh, example_inputs=batch, **options)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (single, parallel)]
        errors: dict[str, float] = {}
        for step in range(3):
            load: Any = None
            with CommunicationCounter(parallel.layout.device_mesh) as counter, contextlib.ExitStack() as stack:
                load = stack.enter_context(parallel.expert_load()) if step else None  # nothing is counted else
                loss = parallel.train_step(**batch)
            alone = single(**batch)
            alone.backward()
            errors[f"loss {step}"] = abs(float(loss.detach()) / float(alone.detach()) - 1)
            if step == 0:
                counted = counter.collectives
                gradients = parallel.full_gradients()
                for name, parameter in single.named_parameters():
                    errors[f"gradient of {name}"] = error(gradients[name], parameter.grad)
            expected_load = single.loads(batch["tokens"])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if load is not None:
                loads = {path: tokens.tolist() for path, tokens in load.tokens.items()}
                errors[f"load {step}"] = float(loads != expected_load or any(load.dropped.values()))
            if load is not None and model.get("balanced"):
                planner.balance_experts(parallel, load, rate=0.1)
                for layer, counts in zip(single.layers, expected_load.values()):
                    few = torch.tensor(counts, dtype=torch.float64)
                    layer.e_score_correction_bias += 0.1 * torch.sign(few.mean() - few)
        if evaluated:
            with torch.no_grad():
                errors["evaluation"] = abs(float(parallel(**batch)) / float(single(**batch)) - 1)
        weights = parallel.full_state_dict()
    errors |= {name: error(weights[name], value) for name, value in single.state_dict().items()} if weights else {}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [list(vars(each).values()) for each in counted])
    planned = [list(vars(each).values()) for each in parallel.plan.collectives]
    worst = max(errors, key=lambda name: errors[name])
    return {"worst": worst, "error": errors[worst], "counted": everyone, "planned": planned}


def compare_looped(
    mesh: str, options: dict[str, Any], family: str, by_calls: bool, batches: list[list[bool]]
) -> dict[str, Any]:
    """Which parameters have a gradient in each step, and weights after AdamW steps with weight decay.

    ``batches``: for each step its batches, and whether all tokens of one are alike, so that experts get none.
    """
    single, batch = family_model(family), family_batch()
    alike = {"input_ids": torch.full_like(batch["input_ids"], 3), "labels": batch["labels"]}
    without, differing = 0, []
    with keep_float64():
        parallel = planner.compile(copy.deepcopy(single), mesh, example_inputs=batch, **options)
        models = (single, parallel)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, weight_decay=0.1) for each in models]
        for step in batches:
            for is_alike in step:
                inputs = alike if is_alike else batch
                single(**inputs).backward()
                if by_calls:
                    parallel(**inputs).backward()
                else:
                    parallel.train_step(**inputs)
            here = {name: parameter.grad is None for name, parameter in parallel.named_parameters()}
            alone = {name: parameter.grad is None for name, parameter in single.named_parameters()}
            without += sum(alone.values())
            differing += [name for name in here if here[name] != alone[name]]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        weights = parallel.full_state_dict()
    errors = {name: error(weights[name], value) for name, value in single.state_dict().items()}
    worst = max(errors, key=lambda name: errors[name])
    return {"worst": worst, "error": errors[worst], "without": without, "differing": differing}


def error(value: torch.Tensor, expected: torch.Tensor | None) -> float:
    """Largest difference relative to the largest entry expected; of two zeros none."""
    if expected is None or not expected.abs().max():
        return float(value.abs().max())
    return float((value - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    with traced_once():
        main()
