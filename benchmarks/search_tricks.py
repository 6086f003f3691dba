"""What each bound and each heuristic of the search of whole steps buys: 12 searches with each switched off in turn.

    python -m benchmarks.search_tricks --record tricks.jsonl --markdown docs/search_tricks.md
    python -m benchmarks.search_tricks gpt2 t5-base     # some of the problems

A search is counted, not timed, as the same one takes a third more or less on a busy machine: candidates looked at,
sharding programs, stage programs, the solver's effort (simplex iterations × entries, or what takes about as long), and
units put on fronts of (seconds, bytes). With ``--record`` rows are kept in a file, and what is in it is not run again.
A search that the clock stops is marked: its counts are too small.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from cost_models import Cluster
from cost_models.memory import HEADROOM
from planner.fusing import fused_for_planning
from planner.planning import capture_for_planning
from planner.solvers.collection import no_collection
from planner.whole_step import best_first as search
from planner.whole_step.candidates.demands import Demands, read_demands
from planner.whole_step.costs import candidate_bounds as bounds
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.sharding import ShardingSpace
from planner.whole_step.costs.unit_costs import StepUnits

#: Seconds after which a search is stopped.
LIMIT = 20.0


@dataclass(frozen=True)
class SearchProblem:
    """A model of the library on a cluster; ``fix`` as users say it."""

    model: str
    cluster: str
    batch: int
    seq_len: int
    fix: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        fixed = ", ".join(f"{name}={value}" for name, value in self.fix.items())
        return f"{self.model} on {self.cluster}" + (f" ({fixed})" if fixed else "")


PROBLEMS = (
    SearchProblem("gpt2", "dgx-h100:1", 32, 512),
    SearchProblem("opt-1.3b", "dgx-v100-16g:1", 16, 1024, {"cp": 1}),
    SearchProblem("llama-3-8b", "dgx-h100:1", 16, 4096, {"pp": 4, "tp": 2, "schedule": "interleaved_1f1b"}),
    SearchProblem("llama-3-8b", "dgx-h100:1", 16, 4096, {"pp": 4, "tp": 2, "schedule": "zbv"}),
    SearchProblem("t5-small", "dgx-a100-40g:1", 32, 512, {"cp": 1, "pp": (1, 2)}),
    SearchProblem("gpt3-6.7b", "dgx-v100-32g:1", 16, 2048, {"pp": 4, "cp": 1, "schedule": "1f1b"}),
    SearchProblem("llama-3.2-1b", "8x-rtx3090", 16, 2048, {"cp": 1}),
    SearchProblem("llama-2-13b", "dgx-a100-40g:2", 32, 4096, {"cp": 1, "tp": (4, 8)}),
    SearchProblem("bert-large", "dgx-v100-16g:1", 32, 512, {"cp": 1}),
    SearchProblem("vit-large", "8x-rtx4090", 32, 224, {"cp": 1}),
    SearchProblem("qwen3-0.6b", "dgx-h100:1", 16, 4096, {"pp": (1, 2)}),
    SearchProblem("gpt3-13b", "dgx-a100-80g:2", 32, 2048, {"cp": 1, "tp": 8}),
)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _never(*_: Any, **__: Any) -> Iterator[Any]:
    return iter(())


def _next_unchanged(self: search.Search, entry: Any) -> Iterator[Any]:
    yield self._next(entry, entry.bound)


def _zero(*_: Any, **__: Any) -> float:
    return 0.0


def _given_lower(*_: Any, lower: float, **__: Any) -> float:
    return lower


def _scaled_by_one_axis(self: bounds.Bounds, cut: Any) -> float:
    return self.known.most(cut)


def _all_arcs(arcs: Mapping[Any, Any]) -> tuple[Any, ...]:
    return tuple(arcs.values())


def _unproved(self: Any, *, remember: bool) -> None:
    return None


_STAGES = "planner.pipeline_ilp"
#: What is switched off: (place in the code, what stands there instead).
TRICKS: Mapping[str, tuple[tuple[str, Any], ...]] = {
    "promising candidates solved first": (("planner.whole_step.best_first.Search._dive", _nothing),),
    "of these, by least bound if far from it": (("planner.whole_step.best_first.FAR", math.inf),),
    "memory of the whole model": (("planner.whole_step.costs.candidate_bounds.Bounds.memory", _zero),),
    "recomputation that memory forces": (("planner.whole_step.costs.candidate_bounds.Bounds.recompute", _zero),),
    "communication that ZeRO forces": (("planner.whole_step.best_first.Search._gather", _next_unchanged),),
    "shares of cuts already searched": (("planner.whole_step.best_first.Search._scale", _next_unchanged),),
    "conversions of both axes added": (
        ("planner.whole_step.costs.candidate_bounds.Bounds.scaled", _scaled_by_one_axis),
    ),
    "each axis searched alone": (("planner.whole_step.best_first.Search._bound_by_axis", _next_unchanged),),
    "context axis priced beside each tensor size": (
        ("planner.whole_step.costs.candidate_bounds.SHARED_FROM", math.inf),
    ),
    "shardings of fewer bytes": (("planner.whole_step.best_first.ALL_WEIGHTS", (0.0,)),),
    "shortfall of memory by rank": (("planner.whole_step.best_first.memory_shortfall", _zero),),
    "load within memory, fractional": ((f"{_STAGES}.loads.LoadWithinMemory.bound", _given_lower),),
    "load of pooled memory (several runs)": ((f"{_STAGES}.loads.pooled_load", _zero),),
    "load within memory, whole units": (
        ("planner.whole_step.best_first.Search._bound_within_memory", _next_unchanged),
    ),
    "ranks taken one by one": ((f"{_STAGES}.stage_search.StageSearch.prove", _unproved),),
    "whole units in contiguous cuts": ((f"{_STAGES}.stage_bounds.bottleneck", _zero),),
    "whole units in rounds": ((f"{_STAGES}.stage_bounds._filled_rounds", _never),),
    "longest chunk of rounds": ((f"{_STAGES}.stage_search.add_longest", _nothing),),
    "hulls of ranks' loads": ((f"{_STAGES}.stage_search.add_tables", _nothing),),
    "whole units on each rank of a V": ((f"{_STAGES}.stage_search.StageSearch.branch_on_shares", _nothing),),
    "boxes of what ranks may hold": ((f"{_STAGES}.stage_search.StageSearch.bound_by_contents", _nothing),),
    "balanced cuts": ((f"{_STAGES}.stage_search.StageSearch.try_balanced", _nothing),),
    "rounds alike": ((f"{_STAGES}.stage_search.by_rounds", _never),),
    "all chunks alike in a V": ((f"{_STAGES}.stage_search.all_alike", _never),),
    "assignments for the whole step": ((f"{_STAGES}.stage_search.StageSearch.improve", _nothing),),
    "shorter tails": ((f"{_STAGES}.stage_search.StageSearch.try_shorter_tail", _nothing),),
    "relaxation before the program": ((f"{_STAGES}.stage_search.StageSearch.relax", _nothing),),
    "best assignment handed to the solver": ((f"{_STAGES}.stage_search.encode", _nothing),),
    "dominated choices left out": (
        (f"{_STAGES}.stage_problem._undominated", lambda choices, better: range(len(choices))),
    ),
    "linear relaxation of shardings first": (("planner.solvers.nearly_integral._is_fractional", lambda *_: True),),
    "conversions by detours left out": (("planner.sharding_ilp.lattice._without_detours", _all_arcs),),
    "HiGHS without its slow heuristics": (("planner.solvers.solver.SLOW_HEURISTICS", ()),),
}
#: What stands above the table.
INTRODUCTION = """# What the tricks of the search buy

Each row is the search of whole steps with one bound or heuristic switched off: by how much more (summed over problems)
it looks at candidates, solves sharding and stage programs, works the solver and puts units on fronts. None of them may
change what is proved: *slower plans* and *wider gaps* count problems where the search ended with a worse plan, or with
a gap wider by 0.01 points (it stops at any gap below 0.95%, so a gap may well move below that). Written by
`python -m benchmarks.search_tricks --record tricks.jsonl --markdown docs/search_tricks.md`.

A row of zeros says that these problems do not need it, not that none does: bounds of memory act where memory is short,
prices beside each tensor size from 256 devices on, chunks alike in a V where loads alone mislead.

Two heuristics that these problems did not need either were dropped after this measurement: solving one candidate in
128 at once (-5.4% stage programs without it), and offering every run in its fastest choice where there is one chunk
(+0.3% fronts). Shortening the tails of gradient reductions before the stage program does makes no difference here, but
it does to Llama-3.1-405B on 16,384 devices: 6.809 s with it, 6.864 s without, in the same solver effort.

Whole units on each rank of a V are not in the table yet. Llama-3.1-405B on 2,048 devices with `tp=4`: one candidate of
32 ranks and 256 micro-batches is proved in 0.5 processor seconds with them, and not in 98 without.

"""
#: Counts that are summed over problems, in the order of columns.
COUNTS = ("looks", "shardings", "stages", "effort", "fronts")


@dataclass(frozen=True)
class Row:
    """One search: which problem, with which trick off (none: ""), what it took and what it proved."""

    problem: str
    off: str
    counts: Mapping[str, float]
    objective: float
    gap: float
    is_late: bool


class Prepared:
    """What all searches of one problem share."""

    def __init__(self, problem: SearchProblem) -> None:
        graph = capture_for_planning(problem.model, batch_size=problem.batch, seq_len=problem.seq_len)
        graph, _ = fused_for_planning(graph)
        self.problem, self.cluster = problem, Cluster.parse(problem.cluster)
        self.demands: Demands = read_demands(dict(problem.fix), headroom=HEADROOM, time_limit=LIMIT)
        self.space = ShardingSpace.of(graph)
        self.step_units = StepUnits.of(self.space, compiled=False)

    def searched(self, off: str) -> Row:
        """One search from the beginning."""
        counts: Counter[str] = Counter()
        with contextlib.ExitStack() as stack:
            for place, instead in TRICKS[off] if off else ():
                stack.enter_context(mock.patch(place, instead))
            _count(stack, counts)
            level_one = LevelOne(self.cluster, self.space, self.step_units)
            begin = time.process_time()
            # The search has the seconds of this process, however busy the machine is.
            stack.enter_context(mock.patch("time.monotonic", time.process_time))
            outcome = search.Search(level_one, self.cluster, self.demands).run()
            counts["seconds"] = time.process_time() - begin
        counts["shardings"] = level_one.solved
        best = outcome.solutions[0].seconds if outcome.solutions else math.inf
        return Row(str(self.problem), off, dict(counts), best, outcome.gap, outcome.status != "optimal")


def _count(stack: contextlib.ExitStack, counts: Counter[str]) -> None:
    """Count the calls of a few functions while ``stack`` is open."""

    def wrapped(place: str, name: str, amount: Callable[[Any], float] = lambda _: 1) -> None:
        module, _, attribute = place.rpartition(".")
        original = getattr(pkgutil.resolve_name(module), attribute)

        def counted(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            counts[name] += amount(result)
            return result

        stack.enter_context(mock.patch(place, counted))

    wrapped("planner.whole_step.best_first.Search._advance", "looks")
    wrapped("planner.whole_step.best_first.solve_stages", "stages")
    wrapped("planner.solvers.solver._solve_highs", "effort", lambda solution: solution.effort)
    wrapped("planner.pipeline_ilp.fronts.Front.with_unit", "fronts")


def run(problems: Sequence[SearchProblem], record: Path | None, tricks: Sequence[str]) -> list[Row]:
    """All rows, those that ``record`` has from there."""
    rows = [Row(**json.loads(line)) for line in record.read_text().splitlines()] if record and record.exists() else []
    recorded = {(row.problem, row.off) for row in rows}
    for problem in problems:
        left = [off for off in ("", *tricks) if (str(problem), off) not in recorded]
        if not left:
            continue
        prepared = Prepared(problem)
        for off in left:
            with no_collection():
                row = prepared.searched(off)
            rows.append(row)
            print(problem, "|", off or "all on", "|", row.counts, f"{row.objective:.6g} {row.gap:.4f}", flush=True)
            if record is not None:
                with record.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown: what each count grows by, over the problems that were run with the trick off, and what is lost."""
    on = {row.problem: row for row in rows if not row.off}
    lines = [
        "| switched off | problems | candidates looked at | sharding programs | stage programs | solver's effort "
        "| fronts | slower plans | wider gaps | stopped by the clock |",
        "|" + "---|" * 10,
    ]
    for off in TRICKS:
        mine = [row for row in rows if row.off == off]
        if not mine:
            continue
        cells = [str(len(mine))]
        for name in COUNTS:
            before = sum(on[row.problem].counts.get(name, 0.0) for row in mine)
            after = sum(row.counts.get(name, 0.0) for row in mine)
            cells.append(f"{after / before - 1:+.1%}" if before else "0")
        slower = sum(row.objective > on[row.problem].objective * 1.0001 for row in mine)
        wider = sum(row.gap > on[row.problem].gap + 1e-4 for row in mine)
        cells += [str(slower), str(wider), str(sum(row.is_late for row in mine))]
        lines.append(f"| {off} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="problems of these models only")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--base", action="store_true", help="nothing switched off")
    options = parser.parse_args()
    problems = [each for each in PROBLEMS if not options.models or each.model in options.models]
    rows = run(problems, options.record, () if options.base else tuple(TRICKS))
    searched = "".join(f"* {problem}\n" for problem in dict.fromkeys(row.problem for row in rows))
    text = f"{INTRODUCTION}{table(rows)}\nProblems:\n\n{searched}"
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
