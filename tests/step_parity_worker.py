"""One rank of the parity tests of whole steps: trains models under plans, on real processes; rank 0 also alone."""

from __future__ import annotations

import copy
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import planner
from passes.capture import keep_float64
from planner.library import load_config, random_batch
from planner.verification.comparison import (
    ADAM_EPSILON,
    ADAM_EPSILON_LOW_PRECISION,
    NEGLIGIBLE,
    NEGLIGIBLE_LOW_PRECISION,
    difference,
    differences,
    gradients_of,
    largest_of,
    single_loss,
)
from planner.verification.verify_model import real_module, slow_devices
from runtime.execution.mixed_precision import cast_floats
from tests.communication.counting import unlike_plan
from tests.communication.recorder import Call, Recorder, recorded
from tests.communication.rules import broken_rules
from tests.device_thread import backward_on_its_own_thread
from tests.expert_families import FAMILIES, family_batch, family_model, in_loops
from tests.parity_worker import build
from tests.patience import PATIENCE
from tests.ranks import answer, task
from tests.recurrent_families import RECURRENT_FAMILIES, recurrent_batch, recurrent_model
from tests.tracing import traced_once

STEPS = 3
LEARNING_RATE = 1e-3


def main() -> None:
    comparisons = {}
    for case in task():
        started = time.perf_counter()
        try:
            result = compare(case)
        except ValueError as error:  # raised on all ranks alike: there is no such plan
            result = {"refused": str(error)}
        comparisons[case["name"]] = {**result, "seconds": time.perf_counter() - started}
        if "record" in case and dist.get_rank() == 0:
            with Path(case["record"]).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"name": case["name"], **comparisons[case["name"]]}) + "\n")
    answer(comparisons)


def build_case(case: dict[str, Any]) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    """The model, one batch (args, kwargs) and a loss function; ``layers``: another number than the library's has."""
    dtype = getattr(torch, case.get("dtype", "float64"))
    if case["model"] == "mlp":
        return build("mlp")
    if case["model"] in FAMILIES:
        return family_model(case["model"]), (), family_batch(), None
    if case["model"] in RECURRENT_FAMILIES:
        return recurrent_model(case["model"]), (), recurrent_batch(), None
    config = load_config(case["model"])
    if "layers" in case:
        config.num_hidden_layers = case["layers"]
    module = real_module(config, dtype=dtype, seed=0)
    return module, (), cast_floats(random_batch(module, batch_size=8, seq_len=12), dtype), None


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """Largest relative error of loss, gradients and weights after three AdamW steps; what the step counted."""
    single, args, kwargs, loss_fn = build_case(case)
    with keep_float64():
        parallel = planner.compile(
            copy.deepcopy(single),
            slow_devices(dist.get_world_size()),
            loss_fn=loss_fn,
            example_inputs=args or kwargs,
            fix=case["fix"],
            precision=case.get("precision"),
            time_limit=PATIENCE,
            **case.get("options", {}),
        )
        alone = dist.get_rank() == 0
        exact = case.get("dtype", "float64") == "float64"
        negligible = NEGLIGIBLE if exact else NEGLIGIBLE_LOW_PRECISION
        epsilon = ADAM_EPSILON if exact else ADAM_EPSILON_LOW_PRECISION
        in_loops(single)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE, eps=epsilon)
        single_optimizer = torch.optim.AdamW(single.parameters(), lr=LEARNING_RATE, eps=epsilon)
        comparisons = []
        for step in range(STEPS):
            # The recorder sees what its own thread issues.
            on_thread = case.get("device_thread") and step != 1
            backward_thread = backward_on_its_own_thread() if on_thread else nullcontext()
            with backward_thread, recorded() if step == 1 else nullcontext() as recorder:
                loss = parallel.train_step(*args, **kwargs)
            if recorder is not None:
                calls = calls_of_all(recorder)
            gradients = parallel.full_gradients() if step == 0 else {}
            if alone:
                wanted_loss = single_loss(single, args, kwargs, loss_fn)
                wanted_loss.backward()
                comparisons.append(difference("loss", f"loss {step}", loss, wanted_loss))
                if step == 0:
                    expected = gradients_of(single)
                    comparisons += differences(
                        "gradients", gradients, expected, floor=negligible * largest_of(expected)
                    )
                single_optimizer.step()
                single_optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        state = parallel.full_state_dict()
        if case.get("evaluated", True):
            with torch.no_grad():
                evaluated = parallel(*args, **kwargs)
                evaluated = evaluated if isinstance(evaluated, torch.Tensor) else evaluated.loss
                if alone:
                    wanted_loss = single_loss(single, args, kwargs, loss_fn)
                    comparisons.append(difference("loss", "evaluated", evaluated, wanted_loss))
        if "short" in case:
            fewer = {name: tensor[: case["short"]] for name, tensor in kwargs.items()}
            loss = parallel.train_step(*args, **fewer)
            gradients = parallel.full_gradients()
            if alone:
                wanted_loss = single_loss(single, args, fewer, loss_fn)
                wanted_loss.backward()
                comparisons.append(difference("loss", "of a short batch", loss, wanted_loss))
                expected = gradients_of(single)
                comparisons += differences("gradients", gradients, expected, floor=negligible * largest_of(expected))
    if not alone:
        return {}
    comparisons += differences("weights", state, single.state_dict(), floor=LEARNING_RATE)
    worst = max(comparisons, key=lambda comparison: comparison.error)
    step_plan = parallel.plan.step
    assert step_plan is not None
    has_experts = step_plan.axes.get("ep", 1) > 1
    return {
        "error": worst.error,
        "worst": f"{worst.what}: {worst.name}",
        "axes": step_plan.axes,
        "schedule": step_plan.schedule,
        "num_microbatches": step_plan.num_microbatches,
        "recompute": step_plan.recompute,
        "zero": step_plan.zero,
        "zero_ranks": step_plan.zero_ranks,
        "tensors": len(comparisons),
        "loss_error": max(entry.error for entry in comparisons if entry.what == "loss"),
        # How many tokens an expert gets is no part of a plan: ranks send unlike numbers, tests of experts count them.
        "broken_rules": [] if has_experts else broken_rules(calls),
        "unlike_plan": []
        if has_experts
        else unlike_plan(calls, parallel.plan.collectives, step_plan.axes, step_plan.zero_ranks),
        "dtypes": sorted({str(parameter.dtype) for parameter in parallel.parameters()}),
    }


def calls_of_all(recorder: Recorder) -> list[list[Call]]:
    """What every rank issued, by rank, on rank 0."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    is_first = dist.get_rank() == 0
    dist.gather_object([call.to_dict() for call in recorder.calls], everywhere if is_first else None)
    return [[Call.from_dict(call) for call in own] for own in everywhere] if is_first else []


if __name__ == "__main__":
    with traced_once():
        main()
