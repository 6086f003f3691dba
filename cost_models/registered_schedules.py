"""Pipeline schedules that people register (``planner.register_schedule``), held against what a pipeline can run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from cost_models.registrations import function_in_words, note, registered
from cost_models.schedule_orders import ORDERS
from cost_models.schedules import Schedule, actions, add_schedule, reason_not, remove_schedule

#: (rank, ranks, micro-batches, chunks on each rank) → the rank's actions: (kind, chunk, micro-batch).
OrderFunction = Callable[[int, int, int, int], Iterable[tuple[str, int, int]]]

KIND = "schedules"
#: Pipeline ranks and micro-batches for each of them that an order is tried with when it is registered.
_RANKS, _ROUNDS = (2, 3, 4), (1, 2, 4)


def register_schedule(
    name: str,
    order: OrderFunction,
    *,
    placement: Literal["loop", "vee"] = "loop",
    chunks_per_rank: int | None = 1,
) -> None:
    """Add a pipeline schedule; plans may then choose it, and it runs in the order that the function gives.

    Its step is priced by the longest path through the order, and its memory by the micro-batches that the order has in
    flight, so that nothing beside the order has to be said. Every process that plans, reads or runs a plan with the
    schedule must register it.

    Args:
        name: what plans and ``fix={"schedule": name}`` call it: letters, digits and ``_``.
        order: a function of (rank, number of ranks, number of micro-batches, chunks on each rank) that gives the rank's
            actions in order, each (kind, chunk, micro-batch): ``"F"`` forward; ``"B"`` the whole backward, or ``"I"``
            the gradients of inputs and later ``"W"`` those of weights. It raises ValueError, with the reason, for what
            it cannot order.
        placement: ``"loop"``: chunk k is on rank k mod p; ``"vee"``: down the ranks and back up (two chunks a rank).
        chunks_per_rank: how many chunks of the model a rank must hold; None: any number from 2 on.

    Raises:
        ValueError: for a name that is another schedule's, or an order that no pipeline can run: one that leaves out or
            repeats an action, or in which ranks wait for each other for ever.
    """
    _check(name, order, placement, chunks_per_rank)
    words = f"{function_in_words(order)}, {placement}, {chunks_per_rank} chunks a rank"
    if name in registered(KIND):
        if registered(KIND)[name] != words:
            raise ValueError(f"schedule {name!r} is registered with another order: choose another name")
        return
    row = Schedule(
        name=name,
        torch_class=None,
        placement=placement,
        chunks_per_rank=chunks_per_rank,
        splits_backward=True,
        fills=((0, 0, 0),),
        played=math.inf,  # nobody has stated its steady state
        order=order,
    )
    add_schedule(row)
    try:
        splits_all = _try_out(row)
    except ValueError:
        remove_schedule(name)
        raise
    add_schedule(replace(row, splits_all=splits_all))
    note(KIND, name, words)


def _check(name: str, order: OrderFunction, placement: str, chunks_per_rank: int | None) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[a-zA-Z]\w{0,39}", name, re.ASCII) or name == "none":
        raise ValueError(f"name of a schedule: expected letters, digits and '_', up to 40 of them, got {name!r}")
    if name in ORDERS:
        raise ValueError(f"schedule {name!r} comes with this package: choose another name")
    if not callable(order):
        raise ValueError(f"order of schedule {name!r}: expected a function, got {order!r}")
    if placement not in ("loop", "vee"):
        raise ValueError(f"placement of schedule {name!r}: expected 'loop' or 'vee', got {placement!r}")
    if chunks_per_rank is not None and (type(chunks_per_rank) is not int or chunks_per_rank < 1):
        raise ValueError(f"chunks_per_rank of schedule {name!r}: expected a positive integer or None")
    if placement == "vee" and chunks_per_rank != 2:
        raise ValueError(f"schedule {name!r}: placement 'vee' needs chunks_per_rank=2, got {chunks_per_rank}")


def _try_out(row: Schedule) -> bool:
    """Order several pipelines; whether every backward pass in them is split.

    Raises:
        ValueError: if one has an order that cannot run, or none has one.
    """
    chunks = row.chunks_per_rank or 2
    reasons, kinds = set(), set()
    for ranks in _RANKS:
        for rounds in _ROUNDS:
            shape = {"num_ranks": ranks, "num_microbatches": ranks * rounds, "num_chunks": ranks * chunks}
            reason = reason_not(row.name, **shape)
            if reason is None:
                kinds |= {action.kind for order in actions(row.name, **shape) for action in order}
            reasons.add(reason)
    if None not in reasons:
        raise ValueError(
            f"schedule {row.name!r} orders none of the pipelines it was tried with: {min(map(str, reasons))}"
        )
    return "B" not in kinds
