"""One rank of the tests of what a step holds, sends and runs, on real processes, against what its plan says."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import planner
from cost_models.schedules import actions
from passes.capture import capture, keep_float64
from passes.fuse import as_planned
from planner.auditing.repriced_step import reprice
from planner.verification.verify_model import slow_devices
from runtime.execution.chunk import ChunkRunner
from runtime.execution.chunk_order import InOrder, Pipelined
from tests.ranks import answer, task
from tests.step_parity_worker import build_case
from tests.tracing import traced_once

#: Bytes in a second of ``slow_devices``, whose links have no latency.
BANDWIDTH = 1e10


def main() -> None:
    answer({case["name"]: accounts(case) for case in task()})


def accounts(case: dict[str, Any]) -> list[dict[str, Any]]:
    """By rank: what its memory holds after a step, what it sent and ran, and what the plan says of each."""
    model, args, kwargs, loss_fn = build_case(case)
    options = {"precision": case["precision"]} if "precision" in case else {}
    cluster = slow_devices(dist.get_world_size())
    with keep_float64():
        parallel = planner.compile(
            copy.deepcopy(model), cluster, loss_fn=loss_fn, example_inputs=kwargs, fix=case["fix"], **options
        )
        step, places = parallel.plan.step, parallel._state.places
        assert step is not None
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
        with watched(parallel) as seen:
            parallel.train_step(*args, **kwargs)
        optimizer.step()
        stage, execution = places.stage or 0, seen["execution"]
        results = {
            "stage": stage,
            "parameters": parameter_bytes(execution, parallel),
            "gradients": seen["gradients"],
            "optimizer": optimizer_bytes(execution, parallel, optimizer),
            "planned": {name: getattr(step.memory[stage], name) for name in ("parameters", "gradients", "optimizer")},
        }
        if step.axes["pp"] > 1:
            graph = capture(model, args=args, kwargs=kwargs, loss_fn=loss_fn)
            priced = reprice(as_planned(graph, parallel.plan), parallel.plan, cluster)
            results |= sent_and_run(execution, step, priced.step)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    return everyone


@contextlib.contextmanager
def watched(parallel: Any) -> Iterator[dict[str, Any]]:
    """Notes what runs a step, and the most bytes of gradients that are held between micro-batches."""
    seen: dict[str, Any] = {"gradients": 0}
    originals: dict[type, Any] = {kind: kind.train for kind in (InOrder, Pipelined)}
    original_outputs = ChunkRunner.outputs

    def count() -> None:
        units = units_of(seen["execution"])
        for unit in units:
            unit.settle()
        held = sum(unit.gradient_bytes for unit in units)
        held += sum(p.grad.to_local().nbytes for p in parallel.parameters() if p.grad is not None)
        seen["gradients"] = max(seen["gradients"], held)

    def train(execution: Any, *args: Any) -> Any:
        seen["execution"] = execution
        losses = originals[type(execution)](execution, *args)
        count()
        return losses

    def outputs(stage: Any, *args: Any) -> Any:
        count()
        return original_outputs(stage, *args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ChunkRunner, "outputs", outputs))
        for kind in originals:
            stack.enter_context(mock.patch.object(kind, "train", train))
        yield seen


def sent_and_run(execution: Any, step: Any, priced: Any) -> dict[str, Any]:
    """What this rank ran, in order, and the bytes that it sent to other chunks; both as planned, too."""
    executor, rank = execution.executor, execution.places.stage
    expected = actions(
        step.schedule, num_ranks=step.axes["pp"], num_microbatches=step.num_microbatches, num_chunks=len(step.chunks)
    )
    planned: dict[str, float] = {}
    for index in range(1, len(step.chunks)):
        before, behind = step.chunks[index - 1].rank, step.chunks[index].rank
        num_bytes = priced.chunks[index].receive_forward * BANDWIDTH * step.num_microbatches
        if before != behind:
            planned |= {f"{index - 1}→{index}": num_bytes} if before == rank else {}
            planned |= {f"{index}→{index - 1}": num_bytes} if behind == rank else {}
    return {
        "order": [str(action) for action in executor.order],
        "planned order": [str(action) for action in expected[rank]],
        "sent": {f"{source}→{target}": count for (source, target), count in executor.bytes_sent.items()},
        "planned sent": planned,
    }


def units_of(execution: Any) -> list[Any]:
    return list({id(unit): unit for stage in execution.stages for unit in stage.units}.values())


def _narrow(parallel: Any, name: str, tensor: torch.Tensor) -> bool:
    """Whether what this rank owns of a parameter is a master copy of what it computes with."""
    return bool(parallel._state.infos[name].dtype != tensor.dtype)


def local_parameters(parallel: Any) -> dict[str, torch.Tensor]:
    """What this rank owns of each parameter."""
    return {name: parameter.to_local().detach() for name, parameter in parallel.named_parameters()}


def parameter_bytes(execution: Any, parallel: Any) -> int:
    """Bytes of what is computed with and of what is owned of it; masters beside a whole narrow copy not counted."""
    storages: dict[int, int] = {}
    kept_narrow: set[str] = set()
    for unit in units_of(execution):
        for bundle in unit._bundles:
            saved = bundle.weights._kept
            if saved is not None:
                storages[saved.flat.untyped_storage().data_ptr()] = sum(whole.nbytes for whole in saved.wholes())
                kept_narrow |= {unit.weights[place].name for place in bundle.places}
    for name, parameter in local_parameters(parallel).items():
        if not (_narrow(parallel, name, parameter) and name in kept_narrow):
            storages.setdefault(parameter.untyped_storage().data_ptr(), parameter.nbytes)
    return sum(storages.values())


def optimizer_bytes(execution: Any, parallel: Any, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the moments, and of masters beside a narrow copy."""
    moments = sum(
        tensor.to_local().nbytes
        for state in optimizer.state.values()
        for name, tensor in state.items()
        if name != "step"
    )
    saved = {
        unit.weights[place].name
        for unit in units_of(execution)
        for bundle in unit._bundles
        if bundle.weights._kept is not None
        for place in bundle.places
    }
    masters = sum(
        parameter.nbytes
        for name, parameter in local_parameters(parallel).items()
        if _narrow(parallel, name, parameter) and name in saved
    )
    return moments + masters


if __name__ == "__main__":
    with traced_once():
        main()
