"""Whether the search finds the fastest of everything, on random cases.

    python -m benchmarks.exhaustive                                   # 60 cases: minutes
    python -m benchmarks.exhaustive --cases 200 --seed 1 --markdown benchmarks/results/exhaustive.md

A case is a small model (two to six blocks) on eight devices, some recompute policies and ZeRO stages, perhaps only some
axes or schedules, and perhaps a share of the memory that the fastest step would take. The search runs with no gap; then
every mesh shape, order, micro-batch, schedule, sharding, cut, and choice of every unit is priced (see
``tests.exhaustive``), and the two must agree to 1e-9.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.schedules import SCHEDULES
from cost_models.step_time import step_memory
from planner.pipeline_ilp.stage_problem import as_step
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.candidates.training_options import POLICIES, ZERO_STAGES
from planner.whole_step.result.outcome import StepSolution
from tests.exhaustive import Best, fastest_of_all
from tests.exhaustive_models import CLUSTERS, MODELS, level_one

#: How far the two may be apart.
TOLERANCE = 1e-9
#: Shares of the fastest step's memory to make do with (None: all there is).
SHARES = (None, 0.8, 0.6, 0.45)
#: Choices of a unit at most: of models whose units all differ, and of others.
FEW, MORE = 3, 4
#: A model that is small enough to leave every choice.
SMALL = "2-block mlp"


@dataclass(frozen=True)
class Row:
    """One case: what was asked, what the search and the enumeration found, and how long they took."""

    model: str
    cluster: str
    fixed: Mapping[str, Any]
    share: float | None
    optima: StepSolution | None
    best: Best
    search_seconds: float
    enumeration_seconds: float

    @property
    def seconds(self) -> float:
        return self.optima.seconds if self.optima is not None else math.inf

    @property
    def agrees(self) -> bool:
        return self.seconds == self.best.seconds or abs(self.seconds / self.best.seconds - 1) <= TOLERANCE

    def cells(self) -> tuple[str, ...]:
        """What a table shows of it."""
        asked = ", ".join(f"{name}={_listed(value)}" for name, value in self.fixed.items()) or "everything"
        return (
            self.model,
            self.cluster,
            asked + (f", {self.share:.0%} of memory" if self.share else ""),
            f"{self.best.num_candidates}",
            f"{self.best.num_assignments:,}",
            f"{self.search_seconds:.1f}",
            f"{self.enumeration_seconds:.1f}",
            "nothing fits" if self.optima is None else f"{self.seconds * 1e3:.6g}",
            "yes" if self.agrees else f"NO: {self.best.seconds * 1e3:.9g}, {self.best.candidate}",
            "" if self.optima is None else str(self.optima.candidate),
        )


HEADERS = (
    "model",
    "cluster",
    "left to choose",
    "candidates",
    "ways",
    "search, s",
    "all, s",
    "step, ms",
    "equal",
    "best",
)


def _listed(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def random_fixes(model: str, chooser: random.Random) -> dict[str, Any]:
    """What is left to choose, few enough choices for the model."""
    most = {SMALL: 16, "uneven": FEW}.get(model, MORE)
    fixed: dict[str, Any] = {}
    while not fixed or len(fixed["recompute"]) * len(fixed["zero"]) > most:
        fixed["recompute"] = tuple(chooser.sample(POLICIES, chooser.randint(1, len(POLICIES))))
        fixed["zero"] = tuple(chooser.sample(ZERO_STAGES, chooser.randint(1, len(ZERO_STAGES))))
    if chooser.random() < 0.6:
        fixed["pp"] = chooser.choice(((2, 4), (2, 4, 8), (4, 8), (2,)))
        if chooser.random() < 0.5:
            fixed["schedule"] = tuple(chooser.sample(sorted(SCHEDULES), chooser.randint(1, 3)))
    if chooser.random() < 0.3:
        fixed[chooser.choice(("tp", "cp", "dp"))] = chooser.choice(((1, 2), (2, 4), (1,)))
    return fixed


def rows(num_cases: int, seed: int) -> Iterator[Row]:
    """Random cases, each searched and enumerated."""
    chooser = random.Random(seed)
    for number in range(num_cases):
        model, cluster = chooser.choice(sorted(MODELS)), chooser.choice(sorted(CLUSTERS))
        yield row(model, cluster, random_fixes(model, chooser), chooser.choice(SHARES), seed=number)


def row(model: str, cluster: str, fixed: Mapping[str, Any], share: float | None, *, seed: int) -> Row:
    """One case; its memory is a share of what the fastest step takes (all if there is none)."""
    level = level_one(model, cluster)

    def searched(limit: float | None) -> tuple[Search, StepSolution | None]:
        demands = read_demands(fixed, gap=0.0, time_limit=3600.0, memory_limit=limit)
        search = Search(level, level.cluster, demands)
        return search, next(iter(search.run().solutions), None)

    start = time.process_time()
    search, optima = searched(None)
    if share is not None and optima is not None:
        search, optima = searched(share * max(step_memory(as_step(optima.problem, optima.assignment))))
    middle = time.process_time()
    best = fastest_of_all(search, seed=seed)
    return Row(model, cluster, fixed, share, optima, best, middle - start, time.process_time() - middle)


def summary(optima: Sequence[Row]) -> str:
    """How many agree, and how much was tried."""
    agree, fit = sum(each.agrees for each in optima), sum(each.optima is not None for each in optima)
    ways = sum(each.best.num_assignments for each in optima)
    candidates = sum(each.best.num_candidates for each in optima)
    return (
        f"{agree} of {len(optima)} cases agree to {TOLERANCE:g} ({fit} of them with a step that fits): "
        f"{candidates:,} candidates and {ways:,} ways to run their units priced"
    )


def markdown(optima: Sequence[Row]) -> str:
    """The summary and every case in a table."""
    lines = ["# The search against everything tried", "", summary(optima) + ".", ""]
    lines += [f"| {' | '.join(HEADERS)} |", "|---|---|---|---:|---:|---:|---:|---:|---|---|"]
    lines += [f"| {' | '.join(each.cells())} |" for each in optima]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    arguments = parser.parse_args()
    optima: list[Row] = []
    for each in rows(arguments.cases, arguments.seed):
        print("  ".join(each.cells()), flush=True)
        optima.append(each)
        if arguments.markdown:
            arguments.markdown.write_text(markdown(optima))
    print(summary(optima))


if __name__ == "__main__":
    main()
