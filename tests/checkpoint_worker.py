"""One of four ranks of the tests of checkpoints and weight files; rank 0 says how each scenario went."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import planner
from runtime.checkpoint import CheckpointManager
from runtime.weight_files import load_weights, save_weights
from tests.checkpoint_cases import (
    SHAPES,
    Pieces,
    StockTraining,
    Training,
    mlp_data,
    state_is_right,
    trained_once,
    two_dims,
    two_groups,
    uneven_chunks,
    whole_pieces,
)
from tests.ranks import answer, task
from tests.small_models import squared_error
from tests.tracing import traced_once


def everywhere(right: bool) -> bool:
    """Whether it is so on every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, right)
    return all(gathered)


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def plans_resume_each_other(folder: Path) -> Any:
    """Losses after a resume on another mesh, and those of the run that went on; the checkpoints stay for others."""
    results = {}
    for dtype in (torch.float64, torch.float32):
        manager = CheckpointManager(folder / str(dtype), keep_last=None, asynchronous=True)
        first = Training("dp=2,tp=2", dtype=dtype)
        first.losses(range(2))
        manager.save(first.parallel, first.optimizer, step=2, scheduler=first.scheduler)
        results[str(dtype)] = [first.losses(range(2, 5))]
        for mesh in ("tp=4",):
            again = Training(mesh, dtype=dtype)
            manager.load(again.parallel, again.optimizer, scheduler=again.scheduler, step=2)
            results[str(dtype)].append(again.losses(range(2, 5)))
            manager.save(again.parallel, again.optimizer, step=5, scheduler=again.scheduler)
        manager.wait()
    return results


def layouts(rank: int) -> tuple[dict[str, Any], ...]:
    return uneven_chunks(rank, 4), two_dims(rank)


def pieces_of_any_layout(folder: Path) -> bool:
    """Uneven and empty chunks, two dims cut, a layer on one rank only: each resumes the other's."""
    rank = dist.get_rank()
    right = []
    for number, saved in enumerate(layouts(rank)):
        manager = CheckpointManager(folder / str(number))
        model = Pieces(saved)
        optimizer = trained_once(model)
        model.fill(seed=3)
        manager.save(model, optimizer, step=1)
        for expected in (*layouts(rank), whole_pieces()):
            again = Pieces(expected)
            other = trained_once(again)
            for group in other.param_groups:
                group.update(lr=9.0, weight_decay=9.0)
            other.state.clear()
            manager.load(again, other)
            decays = [(group["lr"], group["weight_decay"]) for group in other.param_groups]
            right.append(again.holds(seed=3) and state_is_right(again, other) and decays == [(0.1, 0.5), (0.1, 0.0)])
    return everywhere(all(right))


def files_of_any_layout(folder: Path) -> bool:
    rank = dist.get_rank()
    right = []
    for number, saved in enumerate(layouts(rank)):
        model = Pieces(saved)
        model.fill(seed=3)
        files = save_weights(model.owned(), folder / str(number), order=tuple(SHAPES), max_file_bytes=200)
        right.append(len(files) > 1)
        for expected in (*layouts(rank), whole_pieces()):
            again = Pieces(expected, seed=None)
            load_weights(again.owned(), folder / str(number), names=model.state_names)
            right.append(again.holds(seed=3))
    return everywhere(all(right))


def errors_reach_every_rank(folder: Path) -> bool:
    """What one rank cannot do is refused on all, with its reason, and nothing hangs."""
    rank = dist.get_rank()
    manager = CheckpointManager(folder / "checkpoints")
    model = Pieces(uneven_chunks(rank, 4))
    optimizer = trained_once(model)
    manager.save(model, optimizer, step=1)
    if rank == 2:
        optimizer.state[model.parameters["layers.0.weight"]]["row"] = torch.zeros(5, 5)
    bad_state = error_of(lambda: manager.save(model, optimizer, step=2))
    other = Pieces(uneven_chunks(rank, 4))
    if rank == 1:
        other.state_names = ("other", "count")
    bad_model = error_of(lambda: manager.load(other))
    save_weights(model.owned(), folder / "weights")
    where = folder / ("nowhere" if rank == 3 else "weights")
    bad_path = error_of(lambda: load_weights(model.owned(), where, names=model.state_names))
    groups = [{"params": list(model.parameters.values())}]
    if rank == 0:
        groups.append({"params": []})
    bad_groups = error_of(lambda: manager.save(model, torch.optim.SGD(groups), step=2))
    return everywhere(
        "as 'row'" in bad_state
        and "another model" in bad_model
        and "there is no" in bad_path
        and "[1, 2] parameter groups" in bad_groups
        and manager.steps() == (1,)
    )


def dropout_goes_on(folder: Path) -> bool:
    """Another plan draws the same masks after a resume."""
    first, again = (Training(mesh, dropout=True) for mesh in ("dp=2,tp=2", "tp=4"))
    manager = CheckpointManager(folder)
    first.losses(range(1))
    manager.save(first.parallel, first.optimizer, step=1, scheduler=first.scheduler)
    expected = first.losses(range(1, 3))
    manager.load(again.parallel, again.optimizer, scheduler=again.scheduler)
    gathered = again.losses(range(1, 3))
    return everywhere(
        all(math.isclose(one, other, rel_tol=1e-9) for one, other in zip(gathered, expected, strict=True))
    )


def stock_optimizers_go_on(folder: Path) -> bool:
    """State of one process's AdamW and SGD, in two groups, under tensor parallelism, ZeRO 3 and a pipeline."""
    right = []
    folder.mkdir(parents=True, exist_ok=True)
    for make in (partial(torch.optim.AdamW, lr=0.05), partial(torch.optim.SGD, lr=0.05, momentum=0.9)):
        stock = StockTraining(make)
        stock.step(0)
        stock.step(1)
        model = copy.deepcopy(stock.model)
        file = folder / f"{make.func.__name__}-{dist.get_rank()}.pt"
        torch.save(stock.optimizer.state_dict(), file)
        stock.step(2)
        for mesh, fix in (("tp=4", None), ("dp=4", {"zero": 3}), ("pp=2,dp=2", None)):
            options = {"example_inputs": mlp_data(0), "loss_fn": squared_error, "fix": fix}
            parallel = planner.compile(copy.deepcopy(model), mesh, **{k: v for k, v in options.items() if v})
            optimizer = make(two_groups(parallel.named_parameters()))
            planner.load_optimizer(parallel, optimizer, file)
            parallel.train_step(*mlp_data(2))
            optimizer.step()
            weights = parallel.full_state_dict()
            right += [torch.allclose(weights[name], own, rtol=1e-9) for name, own in stock.model.named_parameters()]
    return everywhere(all(right))


SCENARIOS = (
    plans_resume_each_other,
    pieces_of_any_layout,
    files_of_any_layout,
    errors_reach_every_rank,
    dropout_goes_on,
    stock_optimizers_go_on,
)

if __name__ == "__main__":
    where = Path(task())
    results = {}
    with traced_once():
        for scenario in SCENARIOS:
            results[scenario.__name__] = scenario(where / scenario.__name__)
            dist.barrier()
    answer(results)
