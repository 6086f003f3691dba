"""The order of actions on one pipeline rank, schedule by schedule.

Each function takes (rank, num_ranks, num_microbatches, chunks_per_rank) and yields the rank's actions. Sources: GPipe
(Huang et al. 2019), 1F1B (PipeDream-Flush, Narayanan et al. 2021a), interleaved 1F1B (Megatron-LM, Narayanan et al.
2021b), ZB-H1, ZB-H2, ZBV and V-Half (Qi et al. 2023/2024, "Zero Bubble" and "Controllable Memory"), DualPipeV
(DeepSeek-AI 2024/2025).
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
    yield from _split_one_f_one_b(rank, num_microbatches, ahead=num_ranks - 1 - rank, lag=rank)


def zb_h2(rank: int, num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> Iterator[Action]:
    """ZB-H1 with twice as many forwards ahead, which fill the wait for the first gradient, and twice the lag."""
    yield from _split_one_f_one_b(rank, num_microbatches, ahead=2 * (num_ranks - 1 - rank), lag=2 * rank)


def _split_one_f_one_b(rank: int, num_microbatches: int, *, ahead: int, lag: int) -> Iterator[Action]:
    warmup = min(num_microbatches, ahead)
    for microbatch in range(warmup):
        yield Action("F", rank, microbatch)
    for microbatch in range(num_microbatches):
        if microbatch + warmup < num_microbatches:
            yield Action("F", rank, microbatch + warmup)
        yield Action("I", rank, microbatch)
        if microbatch >= lag:
            yield Action("W", rank, microbatch - lag)
    for microbatch in range(max(0, num_microbatches - lag), num_microbatches):
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


def v_half(rank: int, num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> Iterator[Action]:
    """Two chunks a rank, down the ranks ("d") and up again ("u"), every micro-batch six units of time behind the last.

    Of equal forwards, input gradients and weight gradients (one unit each), a micro-batch goes down to the next rank
    one unit after it began on this one, up two units after; and so do its gradients, first down and then up. So it
    passes all ranks and comes back in half of the time that it takes under ZBV, and half as many are in flight. The
    units of a rank that are left of six take weight gradients; once the rank has no forward left these wait half as
    long again, as nothing but gradients of inputs is waited for then.
    """
    is_odd = num_ranks % 2
    top = 3 * num_ranks + (-2 if is_odd else 1)  # when a micro-batch is back on the first rank, going up
    back = top + 1  # when its gradients begin to go down, there
    end = 6 * num_ranks + (-2 if is_odd else 4)  # when they are back up there; no two of a rank's units coincide
    down, up = rank, 2 * num_ranks - 1 - rank
    units = [("F", down, rank), ("F", up, top - 2 * rank), ("I", up, back + rank), ("I", down, end - 2 * rank)]
    free = set(range(6)) - {start % 6 for _, _, start in units}
    for chunk, begin in ((down, end - 2 * rank), (up, back + rank)):
        start = next(unit for unit in range(begin + 1, begin + 7) if unit % 6 in free)
        free.discard(start % 6)
        units.append(("W", chunk, start))
    drain = 6 * (num_microbatches - 1) + max(start for kind, _, start in units if kind == "F")

    def turn(action: Action, unit: float) -> tuple[float, bool]:
        waits = max(0.0, unit - drain) / 2 if action.kind == "W" else 0.0
        return unit + waits, action.kind != "I"

    turns = {
        Action(kind, chunk, microbatch): 6 * microbatch + start
        for kind, chunk, start in units
        for microbatch in range(num_microbatches)
    }
    yield from sorted(turns, key=lambda action: turn(action, turns[action]))


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
    "zb_h2": zb_h2,
    "zbv": zbv,
    "v_half": v_half,
    "dualpipev": dualpipev,
}
