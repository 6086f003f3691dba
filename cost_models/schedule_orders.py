"""The order of actions on one pipeline rank, schedule by schedule.

Each function takes (rank, num_ranks, num_microbatches, chunks_per_rank) and yields the rank's actions. Sources: GPipe
(Huang et al. 2019), 1F1B (PipeDream-Flush, Narayanan et al. 2021a), interleaved 1F1B (Megatron-LM, Narayanan et al.
2021b), ZB-H1 and ZBV (Qi et al. 2023/2024, "Zero Bubble" and "Controllable Memory"), DualPipeV (DeepSeek-AI 2024/2025).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Action(NamedTuple):
    """One thing that a rank runs on its compute stream.

    Attributes:
        kind: "F" forward, "B" the whole backward, "I" the gradients of inputs only, "W" those of weights only.
        chunk: the chunk's place in the model.
        microbatch: 0 to num_microbatches − 1.
    """

    kind: str
    chunk: int
    microbatch: int


def microbatches_per_round(num_ranks: int, num_microbatches: int) -> int:
    """How many micro-batches interleaved 1F1B passes through a chunk before it turns to the next one."""
    return num_microbatches // max(1, num_microbatches // num_ranks)


def interleaved_warmup(rank: int, num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> int:
    """Forwards that interleaved 1F1B runs on ``rank`` before its first pair of forward and backward."""
    ahead = (chunks_per_rank - 1) * microbatches_per_round(num_ranks, num_microbatches)
    return min(ahead + 2 * (num_ranks - 1 - rank), num_microbatches * chunks_per_rank)


def gpipe(rank: int, num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> Iterator[Action]:
    """All forwards, then all backwards."""
    for kind in "FB":
        for microbatch in range(num_microbatches):
            yield Action(kind, rank, microbatch)


def one_f_one_b(rank: int, num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> Iterator[Action]:
    """Forwards until the first gradient can be back, then one backward for each forward, then what is left."""
    warmup = min(num_microbatches, num_ranks - 1 - rank)
    for microbatch in range(warmup):
        yield Action("F", rank, microbatch)
    for microbatch in range(num_microbatches):
        if microbatch + warmup < num_microbatches:
            yield Action("F", rank, microbatch + warmup)
        yield Action("B", rank, microbatch)


def interleaved_one_f_one_b(rank: int, num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> Iterator[Action]:
    """1F1B over (chunk, micro-batch) pairs: a round of micro-batches through each of the rank's chunks in turn."""
    per_round = microbatches_per_round(num_ranks, num_microbatches)
    total = num_microbatches * chunks_per_rank
    warmup = interleaved_warmup(rank, num_ranks, num_microbatches, chunks_per_rank)

    def pair(position: int) -> tuple[int, int]:
        turn, within = divmod(position, per_round)
        passes, local = divmod(turn, chunks_per_rank)
        return local, passes * per_round + within

    def forward(position: int) -> Action:
        local, microbatch = pair(position)
        return Action("F", local * num_ranks + rank, microbatch)

    def backward(position: int) -> Action:
        local, microbatch = pair(position)
        return Action("B", (chunks_per_rank - 1 - local) * num_ranks + rank, microbatch)

    for position in range(warmup):
        yield forward(position)
    for position in range(total):
        if position + warmup < total:
            yield forward(position + warmup)
        yield backward(position)


def zb_h1(rank: int, num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> Iterator[Action]:
    """1F1B with the backward split; weight gradients lag ``rank`` micro-batches behind and fill the drain."""
    warmup = min(num_microbatches, num_ranks - 1 - rank)
    for microbatch in range(warmup):
        yield Action("F", rank, microbatch)
    for microbatch in range(num_microbatches):
        if microbatch + warmup < num_microbatches:
            yield Action("F", rank, microbatch + warmup)
        yield Action("I", rank, microbatch)
        if microbatch >= rank:
            yield Action("W", rank, microbatch - rank)
    for microbatch in range(max(0, num_microbatches - rank), num_microbatches):
        yield Action("W", rank, microbatch)


def zbv(rank: int, num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> Iterator[Action]:
    """Two chunks a rank, down the ranks ("d") and up again ("u"); weight gradients right away, but at the end.

    The order is made for at least 2p − 1 micro-batches; fewer run the same order with the missing ones left out.
    """
    count = max(num_microbatches, 2 * num_ranks - 1)
    above = num_ranks - rank
    phases = (
        (2 * above - 1, "Fd"),
        (rank, "Fu Fd"),
        (above, "Fu Iu Wu"),
        (count - 2 * num_ranks + 1 + rank, "Fd Id Wd Fu Iu Wu"),
        (above - 1, "Id Wd Fu Iu Wu"),
        (rank, "Id Iu"),
        (above, "Id Wd"),
        (rank, "Wu"),
        (rank, "Wd"),
    )
    counts: Counter[tuple[str, str]] = Counter()
    chunk = {"d": rank, "u": 2 * num_ranks - 1 - rank}
    for kind, side in _steps(phases):
        microbatch = counts[kind, side]
        counts[kind, side] += 1
        if microbatch < num_microbatches:
            yield Action(kind, chunk[side], microbatch)


def dualpipev(rank: int, num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> Iterator[Action]:
    """As ZBV with whole backwards in the steady state; split ones ("W": the oldest one waiting) fill both ends."""
    above = num_ranks - 1 - rank
    drain = [("Bu", "Bd")[i % 2] if i <= rank else ("Iu", "Id")[i % 2] for i in range(2 * (rank + 1))]
    phases = (
        (2 * above, "Fd"),
        (rank + 1, "Fd Fu"),
        (above, "Iu W Fu"),
        (num_microbatches - 2 * num_ranks + rank + 1, "Fd Bu Fu Bd"),
        (above, "Bu Fu Bd"),
        (1, " ".join(drain)),
        (above, "W Id"),
        (rank + 1, "W"),
    )
    counts: Counter[tuple[str, str]] = Counter()
    waiting: deque[Action] = deque()
    chunk = {"d": rank, "u": 2 * num_ranks - 1 - rank}
    for kind, side in _steps(phases):
        if kind == "W":
            yield waiting.popleft()._replace(kind="W")
            continue
        counted = "F" if kind == "F" else "B"
        action = Action(kind, chunk[side], counts[counted, side])
        counts[counted, side] += 1
        if kind == "I":
            waiting.append(action)
        yield action


def _steps(phases: tuple[tuple[int, str], ...]) -> Iterator[tuple[str, str]]:
    """(kind, side) of every step of the phases: (how many times, the steps as words "<kind><side>")."""
    for times, words in phases:
        steps = [(word[0], word[1:]) for word in words.split()]
        for _ in range(times):
            yield from steps


ORDERS: dict[str, Callable[[int, int, int, int], Iterator[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_one_f_one_b,
    "zb_h1": zb_h1,
    "zbv": zbv,
    "dualpipev": dualpipev,
}
