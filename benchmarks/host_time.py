"""What the host does in a call: microseconds of processor time on tensors so small that nothing else takes any.

    python -m benchmarks.host_time [--only operator] [--rounds 7] [--markdown FILE] [--json FILE]

Every fused operator, chain, collective and unit of weights against the eager operators that it replaces, forward and
backward apart; whole training steps of tiny models against the models' own ``model(**batch).loss.backward()``.
Contestants take turns. Times are those of the quickest round: whatever else the machine does only adds. The ratio is
the median over pairs of neighbouring rounds, with the quartiles beside it. On a machine with a GPU the tensors of
operators, chains and steps lie there, and kernels are only launched.

Goals: a call of a fused operator takes at most 30 microseconds longer each way than the operators that it replaces, a
step no longer than the model's own.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

#: Goals: microseconds of a fused operator each way beyond what it replaces; a step over the model's own.
OPERATOR_GOAL, STEP_GOAL = 30.0, 1.0
#: Calls of one round, of operators and of whole steps.
CALLS, STEPS = 100, 10
KINDS = ("operator", "chain", "collective", "unit", "step")


@dataclass(frozen=True)
class Contestant:
    """One way to compute something.

    Attributes:
        forward: one call.
        backward: of all the calls of a round in one go, so that starting autograd is no part of a call; takes their
            results. None where there is nothing to differentiate, or ``forward`` does both.
    """

    forward: Callable[[], Any]
    backward: Callable[[list[Any]], Any] | None = None


@dataclass(frozen=True)
class Comparison:
    """Ours and what it replaces (``other`` says what that is)."""

    kind: str
    name: str
    ours: Contestant
    eager: Contestant
    other: str = "eager"


@dataclass(frozen=True)
class Row:
    """Microseconds of a call: ours and the other's, forward and backward (None where there is none).

    Attributes:
        paired: ours over the other in each pair of neighbouring rounds, ascending.
    """

    kind: str
    name: str
    other: str
    forward: float
    backward: float | None
    other_forward: float
    other_backward: float | None
    paired: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        """Ours over the other, both passes: in the middle of the pairs, which a busy machine slows both alike."""
        if self.paired:
            return median(self.paired)
        return (self.forward + (self.backward or 0.0)) / (self.other_forward + (self.other_backward or 0.0))


def measure(comparison: Comparison, *, rounds: int, calls: int) -> Row:
    """The quickest of ``rounds`` rounds of ``calls`` calls of each contestant."""
    contestants = comparison.ours, comparison.eager
    times: list[list[tuple[float, float]]] = [[], []]
    for contestant in contestants:  # what is made at the first calls
        _microseconds(contestant, min(calls, 3))
    for turn in range(rounds):
        for place in (0, 1) if turn % 2 else (1, 0):
            times[place].append(_microseconds(contestants[place], calls))
    (forward, backward), (other_forward, other_backward) = (
        (min(one for one, _ in some), min(other for _, other in some)) for some in times
    )
    paired = sorted(sum(one) / sum(other) for one, other in zip(*times, strict=True))
    two = [None if one.backward is None else value for one, value in zip(contestants, (backward, other_backward))]
    return Row(
        comparison.kind, comparison.name, comparison.other, forward, two[0], other_forward, two[1], tuple(paired)
    )


def _microseconds(contestant: Contestant, calls: int) -> tuple[float, float]:
    """Of a call's forward and backward."""
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        results = [contestant.forward() for _ in range(calls)]
        middle = time.process_time()
        if contestant.backward is not None:
            contestant.backward(results)
        end = time.process_time()
    finally:
        gc.enable()
    return (middle - start) / calls * 1e6, (end - middle) / calls * 1e6


def run(kinds: Sequence[str], *, rounds: int, calls: int = CALLS, steps: int = STEPS) -> list[Row]:
    """Rows of all comparisons of these kinds; the process group of the collectives is fake, and is gone afterwards."""
    import torch

    from benchmarks import host_time_contestants as by

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    makers: dict[str, Callable[[], Iterable[Comparison]]] = {
        "operator": lambda: by.operators(device),
        "chain": lambda: by.chains(device),
        "collective": by.collectives,
        "unit": by.units,
        "step": lambda: by.steps(device),
    }
    rows = []
    for kind in kinds:
        for comparison in makers[kind]():
            rows.append(measure(comparison, rounds=rounds, calls=steps if kind == "step" else calls))
            print(_line(rows[-1]), flush=True)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| what | name | forward, µs | backward, µs | instead of | forward, µs | backward, µs | ratio | quartiles |",
        "|---|---|---:|---:|---|---:|---:|---:|---|",
        *(_line(row) for row in rows),
    ]
    return "\n".join(lines)


def _line(row: Row) -> str:
    times = [
        "" if value is None else f"{value:.1f}"
        for value in (row.forward, row.backward, row.other_forward, row.other_backward)
    ]
    cells = [row.kind, row.name, *times[:2], row.other, *times[2:], f"{row.ratio:.2f}", _middle_half(row.paired)]
    return f"| {' | '.join(cells)} |"


def _middle_half(paired: Sequence[float]) -> str:
    """From the first to the third quartile of ascending ratios."""
    quarter = len(paired) // 4
    return f"{paired[quarter]:.2f}–{paired[-1 - quarter]:.2f}" if paired else ""


def beyond_goals(rows: Sequence[Row]) -> list[str]:
    """Names of the fused operators and steps that take longer than they should."""
    slow = [row.name for row in rows if row.kind == "operator" and _longer(row) > OPERATOR_GOAL]
    return slow + [row.name for row in rows if row.kind == "step" and row.ratio > STEP_GOAL]


def _longer(row: Row) -> float:
    """Microseconds by which a call takes longer than the other, in the direction in which that is more."""
    backward = (row.backward or 0.0) - (row.other_backward or 0.0)
    return max(row.forward - row.other_forward, backward)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=KINDS, help="what to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, of which the quickest is the time")
    parser.add_argument("--markdown", type=Path, help="file to write the table to")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args(arguments)
    rows = run(options.only or KINDS, rounds=options.rounds)
    slow = beyond_goals(rows)
    verdict = f"Beyond the goals: {', '.join(slow)}." if slow else "All within the goals."
    print(verdict)
    if options.markdown is not None:
        from benchmarks.runtime import machine

        options.markdown.write_text(f"{machine()}; processor time.\n\n{table(rows)}\n\n{verdict}\n", encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
