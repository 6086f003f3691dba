"""Orders of actions from elsewhere: whether a pipeline can run them, and what each rank holds when it holds most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cost_models.schedule_orders import Action

#: What every chunk must run of every micro-batch: forward, and the backward whole or in two parts.
_WHOLE, _SPLIT = Counter("FB"), Counter("FIW")


def as_actions(entries: Any) -> tuple[Action, ...]:
    """An order as actions.

    Raises:
        ValueError: if an entry is not (kind, chunk, micro-batch).
    """
    order = []
    for entry in entries:
        if not isinstance(entry, tuple) or len(entry) != 3 or not all(type(number) is int for number in entry[1:]):
            raise ValueError(f"expected actions (kind, chunk, micro-batch) such as ('F', 0, 3), got {entry!r}")
        if entry[0] not in ("F", "B", "I", "W"):
            raise ValueError(f"the kind of {entry!r} is none of 'F', 'B', 'I' and 'W'")
        order.append(Action(*entry))
    return tuple(order)


def fault_of(
    orders: Sequence[Sequence[Action]], chunks_of_ranks: Sequence[Sequence[int]], num_microbatches: int
) -> str | None:
    """Why a pipeline cannot run these orders, one for each rank, in one sentence; None if it can."""
    for rank, (order, chunks) in enumerate(zip(orders, chunks_of_ranks)):
        fault = _incomplete(order, chunks, num_microbatches)
        if fault is not None:
            return f"rank {rank} {fault}"
    return _stuck(orders, num_chunks=sum(map(len, chunks_of_ranks)))


def _incomplete(order: Sequence[Action], chunks: Sequence[int], num_microbatches: int) -> str | None:
    """What one rank's order has too little or too much of, or in the wrong sequence."""
    kinds: dict[tuple[int, int], list[str]] = {}
    for action in order:
        kinds.setdefault((action.chunk, action.microbatch), []).append(action.kind)
    for chunk, microbatch in kinds:
        if chunk not in chunks or not 0 <= microbatch < num_microbatches:
            return f"runs micro-batch {microbatch} of chunk {chunk}; its chunks are {list(chunks)}"
    for chunk in chunks:
        for microbatch in range(num_microbatches):
            ran = kinds.get((chunk, microbatch), [])
            if Counter(ran) not in (_WHOLE, _SPLIT):
                return (
                    f"runs {' '.join(ran) or 'nothing'} of micro-batch {microbatch} of chunk {chunk}; expected F and "
                    "then B, or F, I and then W"
                )
            if ran not in (["F", "B"], ["F", "I", "W"]):
                return f"runs {' '.join(ran)} of micro-batch {microbatch} of chunk {chunk}, in this sequence"
    return None


def _stuck(orders: Sequence[Sequence[Action]], *, num_chunks: int) -> str | None:
    """The action that waits for ever, since what it needs comes after something that waits for it."""
    done: set[tuple[bool, int, int]] = set()
    places = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                kind, chunk, microbatch = order[places[rank]]
                source = chunk - 1 if kind == "F" else chunk + 1
                waits = kind != "W" and 0 <= source < num_chunks
                if waits and (kind == "F", source, microbatch) not in done:
                    break
                if kind != "W":
                    done.add((kind == "F", chunk, microbatch))
                places[rank] += 1
                moved = True
    for rank, order in enumerate(orders):
        if places[rank] < len(order):
            kind, chunk, microbatch = order[places[rank]]
            return f"rank {rank} waits for ever before {kind} of micro-batch {microbatch} of chunk {chunk}"
    return None


def peaks_of_order(order: Sequence[Action], chunks: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """The moments at which a rank may hold most bytes, each as (chunk, micro-batches in flight) of its chunks.

    A micro-batch is in flight from its forward to the end of its backward. The moment of the most of them comes first;
    moments at which another holds at least as many of every chunk are left out.
    """
    held = dict.fromkeys(chunks, 0)
    moments: dict[tuple[int, ...], None] = {}
    rising = False
    for action in order:
        if action.kind == "F":
            held[action.chunk] += 1
        elif action.kind in "BW":
            if rising:
                moments[tuple(held.values())] = None
            held[action.chunk] -= 1
        rising = action.kind == "F" or (rising and action.kind == "I")
    ordered = sorted(moments, key=lambda counts: (-sum(counts), counts))
    peaks = [
        counts
        for place, counts in enumerate(ordered)
        if not any(all(a >= b for a, b in zip(other, counts)) for other in ordered[:place])
    ]
    return [tuple(zip(chunks, counts)) for counts in peaks]
