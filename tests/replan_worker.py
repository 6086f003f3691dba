"""One of four ranks: a model trains on while its plan changes and layers freeze and thaw; each trains it alone, too."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import planner
from passes.capture import keep_float64
from planner.verification.comparison import difference, differences, gradients_of, largest_of, single_loss
from planner.verification.verify_model import slow_devices
from runtime.migration.transfer_plan import TensorTransfers, TransferPlan
from runtime.migration.transport import Transport
from tests.expert_families import FAMILIES, family_batch, family_model, in_loops
from tests.parity_worker import build
from tests.patience import PATIENCE
from tests.ranks import answer, task
from tests.tracing import traced_once

#: Samples of a batch: for three data ranks and for four.
STEPS, DECAY, BATCH = 3, 0.9, 12


@contextmanager
def watched() -> Iterator[tuple[Counter[int], list[int]]]:
    """Bytes that this rank sends, by receiver, and that it holds of the state whenever something moves."""
    sent, held = Counter[int](), list[int]()
    operation, exchange = Transport._operation, Transport._exchange

    def counted(self: Transport, kind: Any, tensor: torch.Tensor, peer: int) -> Any:
        sent[peer] += tensor.nbytes * (kind is dist.isend)
        return operation(self, kind, tensor, peer)

    def measured(self: Transport, batch: Any, sources: Any, results: Any, *, relayed: bool) -> None:
        storages = {
            one.untyped_storage().data_ptr(): one.nbytes
            for one in (*(held for (held,) in sources.values()), *results.values())
        }
        held.append(sum(storages.values()))
        exchange(self, batch, sources, results, relayed=relayed)

    with mock.patch.object(Transport, "_operation", counted), mock.patch.object(Transport, "_exchange", measured):
        yield sent, held


def counts(plan: TransferPlan, sent: Counter[int], held: list[int]) -> dict[str, Any]:
    """What was counted of a migration, over all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (dict(sent), max(held, default=0)))
    moved = {(source, peer): count for source, (peers, _) in enumerate(gathered) for peer, count in peers.items()}
    over = [most - larger for (_, most), larger in zip(gathered, plan.larger_shard_bytes, strict=True)]
    needed = 0
    for batch in plan.batches:
        for entry in batch:
            tensor = entry.tensor
            for rank, region in tensor.takers.items():
                shape = [(low, high) for low, high in region]
                (own,) = tensor.holders.get(rank, (None,))
                whole = torch.zeros([high for _, high in shape], dtype=torch.bool)
                whole[tuple(slice(low, high) for low, high in shape)] = True
                if own is not None:
                    whole[tuple(slice(low, high) for low, high in own)] = False
                needed += int(whole.sum()) * tensor.item_size
    return {
        "moved": sum(moved.values()),
        "as planned": {pair: count for pair, count in moved.items() if count} == plan.bytes_by_pair,
        "minimum": needed,
        "over the larger shard, in tensors": max(over) / max(plan.largest_tensor_bytes, 1),
        "over the larger shard, in whole tensors": max(over) / max(map(whole_bytes, plan.batches), default=1),
        "as much as planned": all(most <= peak for (_, most), peak in zip(gathered, plan.peak_bytes, strict=True)),
    }


def whole_bytes(batch: Iterable[TensorTransfers]) -> int:
    """Of the largest tensor of a batch, not cut."""
    wholes = []
    for moved in batch:
        regions = [*(held for (held,) in moved.tensor.holders.values()), *moved.tensor.takers.values()]
        ends = [max(end for _, end in bounds) for bounds in zip(*regions)]
        wholes.append(math.prod(ends) * moved.tensor.item_size)
    return max(wholes)


def main() -> None:
    payload = task()
    if payload["model"] in FAMILIES:
        single, args, kwargs, loss_fn = family_model(payload["model"]), (), family_batch(batch=BATCH), None
    else:
        single, args, kwargs, loss_fn = build(payload["model"], layers=payload["layers"], batch_size=BATCH)
    results: dict[str, Any] = {"moves": [], "errors": {}}
    with keep_float64():
        first, *others = [dict(plan) for plan in payload["plans"]]
        first.pop("ranks", None)
        frozen = list(payload.get("frozen", ()))
        options = {"example_inputs": args or kwargs, "time_limit": PATIENCE}
        parallel = planner.compile(copy.deepcopy(single), slow_devices(4), loss_fn=loss_fn, fix=first, **options)
        in_loops(single)
        optimizer, scheduler = optimizer_of(parallel)
        average = {name: one.detach().clone() for name, one in parallel.named_parameters()}
        alone, alone_scheduler = optimizer_of(single)
        alone_average = {name: one.detach().clone() for name, one in single.named_parameters()}
        comparisons: list[Any] = []
        results_of_waiting: list[str] = []

        def freeze(prefixes: list[str]) -> None:
            """Freeze the parameters whose names start so, and thaw all others: plain PyTorch on the single device."""
            for module in (parallel, single):
                for name, parameter in module.named_parameters():
                    parameter.requires_grad_(not name.startswith(tuple(prefixes)))
            for name, parameter in single.named_parameters():
                if name.startswith(tuple(prefixes)):
                    parameter.grad = None
                    alone.state.pop(parameter, None)

        def step(number: float) -> None:
            expected_loss = single_loss(single, args, kwargs, loss_fn)
            expected_loss.backward()
            if parallel.has_work:
                loss = parallel.train_step(*args, **kwargs)
                comparisons.append(difference("loss", f"loss {number}", loss, expected_loss))

        def update() -> None:
            for one, schedule in ((optimizer, scheduler), (alone, alone_scheduler)):
                one.step()
                one.zero_grad()
                schedule.step()
            with torch.no_grad():
                for averages, module in ((average, parallel), (alone_average, single)):
                    for name, parameter in module.named_parameters() if averages else ():
                        part_of(averages[name]).mul_(DECAY).add_(part_of(parameter), alpha=1 - DECAY)

        for number in range(STEPS * len(payload["plans"])):
            step(number)
            if number % STEPS == 1 and parallel.has_work:
                expected = gradients_of(single)
                gradients = parallel.full_gradients()
                comparisons += differences("gradients", gradients, expected, floor=1e-12 * largest_of(expected))
            # In the middle of a step: gradients move too.
            if number % STEPS == STEPS - 1 and others:
                if len(others) == len(payload["plans"]) - 1:
                    results["forgotten"] = error_of(parallel.replan, slow_devices(4), fix=first)
                if frozen:
                    freeze(frozen.pop(0))
                if not parallel.has_work:
                    # As a process that was started anew.
                    results_of_waiting.append(error_of(parallel.train_step, *args, **kwargs))
                    parallel, average = planner.join(copy.deepcopy(single), loss_fn=loss_fn), {}
                    optimizer, scheduler = optimizer_of(parallel)
                fix = others.pop(0)
                ranks = fix.pop("ranks", None)
                with watched() as (sent, held):
                    plan = parallel.replan(
                        slow_devices(4 if ranks is None else len(ranks)),
                        optimizer,
                        ranks=ranks,
                        averages=average,
                        carried=scheduler,
                        fix=fix,
                        time_limit=PATIENCE,
                    )
                results["moves"].append(counts(plan, sent, held))
            if number == STEPS * len(payload["plans"]) - 2 and "pays" in payload:
                # Frozen, and the plan stays: it is not worth moving for one step more; then for very many it is.
                freeze(payload["pays"]["frozen"])
                for steps in (1, 10**9):
                    decision = parallel.replan_if_it_pays(
                        [slow_devices(4)],
                        optimizer,
                        averages=average,
                        remaining_steps=steps,
                        fix=payload["pays"]["plan"],
                        time_limit=PATIENCE,
                    )
                    results.setdefault("decisions", []).append(
                        [decision.moved, [dataclasses.asdict(price) for price in decision.prices], decision.summary()]
                    )
                    step(number + 0.5)
            update()
        results["refused"] = results_of_waiting
        results["optimizer state"] = [
            name
            for name, parameter in parallel.named_parameters()
            if int(optimizer.state.get(parameter, {}).get("step", 0))
            != int(alone.state.get(dict(single.named_parameters())[name], {}).get("step", 0))
        ]
        weights = parallel.full_state_dict()
        comparisons += differences("weights", weights, dict(single.named_parameters()), floor=1e-6)
        for name, tensor in average.items():
            comparisons.append(difference("averages", name, tensor.full_tensor(), alone_average[name]))
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, [(one.what, one.error) for one in comparisons])
        for what, error in (each for own in by_rank for each in own):
            results["errors"][what] = max(results["errors"].get(what, 0.0), error)
    answer(results)


def optimizer_of(module: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it: DTensor looks for placements of every shape anew, which takes longer than the steps."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    with traced_once():
        main()
