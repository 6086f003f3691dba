"""The search finds what trying everything finds: every candidate, sharding, cut, and choice of every unit.

``python -m benchmarks.exhaustive`` does the same for as many random cases as one likes.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cost_models import Cluster
from cost_models.schedules import SCHEDULES
from cost_models.simulator import MOST_PLAYED
from cost_models.step import LayerCosts
from cost_models.step_time import step_memory, step_seconds
from planner.auditing.repriced_step import reprice
from planner.pipeline_ilp.late_bounds import late_bound
from planner.pipeline_ilp.stage_ilp import bound_within_memory, solve_stages
from planner.pipeline_ilp.stage_problem import StageProblem, UnitChoice, UnitRun, as_step
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.candidates import candidates
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.plan_step import plan_step
from planner.whole_step.result.outcome import Outcome, StepSolution
from tests.cells import cells, named_cells
from tests.exhaustive import every_candidate, fastest, fastest_of_all
from tests.exhaustive_models import CONFIGS, level_one

pytestmark = pytest.mark.usefixtures("models_traced_once")

PIPELINES = (2, 4, 8)


@dataclass(frozen=True)
class Case:
    """A model on eight devices, what is left to choose (enough to differ, little enough to try it all), and the share
    of memory that there is of what the fastest step takes."""

    model: str
    cluster: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    share: float | None = None


CASES: Mapping[str, Case] = {
    "every choice": Case("2-block mlp", "eight"),
    "every choice, half the memory": Case("2-block mlp", "boxes", share=0.5),
    "six blocks": Case("6-block mlp", "eight", {"recompute": "none", "zero": (0, 3), "pp": 4}),
    "six blocks, recomputed": Case("6-block mlp", "eight", {"recompute": ("none", "full"), "zero": 2, "pp": (1, 4)},
                                   0.7),
    "uneven, recomputed": Case("uneven", "boxes", {"recompute": ("none", "full"), "zero": 2, "pp": (1, 4)}, 0.6),
    "uneven in four, recomputed": Case("uneven", "boxes", {"recompute": ("none", "full"), "zero": 2, "pp": 4}, 0.8),
    "encoder and decoder": Case("t5", "boxes", {"recompute": ("none", "full"), "zero": 0, "pp": 2}),
    "encoder, decoder and whole sequences": Case("t5", "boxes", {"recompute": ("none", "full"), "zero": 0, "pp": 2,
                                                                 "cp": 1, "tp": (1, 2)}),
    "tied ends": Case("gpt2", "eight", {"recompute": ("regather", "selective"), "zero": (1, 3)}, 0.6),
    "tied ends of a pipeline": Case("gpt2", "eight", {"recompute": ("regather", "selective"), "zero": (1, 3), "pp": 2,
                                                      "cp": 1}, 0.9),
    "experts": Case("mixture", "boxes", {"recompute": "selective", "zero": 3, "ep": (2, 4), "pp": (1, 2)}),
    "transformer": Case("llama", "boxes", {"recompute": ("none", "full"), "zero": 3, "cp": (1, 2)}, 0.6),
    "transformer of cut sequences": Case("llama", "boxes", {"recompute": ("none", "full"), "zero": 3, "cp": 2,
                                                            "pp": (1, 2)}, 0.6),
    "rounds": Case("llama", "boxes", {"recompute": ("none", "selective"), "zero": 1, "pp": PIPELINES,
                                      "schedule": "interleaved_1f1b"}),
    "split backward": Case("llama", "boxes", {"recompute": ("none", "full"), "zero": 0, "pp": PIPELINES,
                                              "schedule": ("zb_h1", "zbv", "dualpipev")}, 0.8),
    "split backward of long pipelines": Case("llama", "boxes", {"recompute": ("none", "full"), "zero": 0, "pp": (4, 8),
                                                                "schedule": ("zb_h1", "zbv", "dualpipev")}, 0.8),
    "as much in flight, half of it": Case("llama", "boxes", {"recompute": ("none", "full"), "zero": 0,
                                                             "pp": PIPELINES, "schedule": ("zb_h2", "v_half")}, 0.8),
    "copies": Case("2-block mlp", "copying", {"recompute": "none", "zero": 0, "pp": (1, 2)}),
    "copies of sequences": Case("llama", "copying", {"recompute": "none", "zero": 0, "pp": 1, "cp": 1, "tp": (4, 8)}),
    "neighbours": Case("6-block mlp", "boxes", {"recompute": ("none", "full"), "zero": 3, "pp": 1, "tp": 1}, 0.6),
}  # fmt: skip


def searched(case: Case, **options: Any) -> tuple[Search, Outcome]:
    if case.model in CONFIGS:
        pytest.importorskip("transformers")
    model = level_one(case.model, case.cluster)
    search = Search(model, model.cluster, read_demands(case.fixed, gap=0.0, time_limit=600.0, **options))
    return search, search.run()


#: Of each there is a smaller one.
SLOW = (
    "six blocks, recomputed", "uneven, recomputed", "encoder and decoder", "tied ends", "transformer", "split backward",
)  # fmt: skip
CELLS = named_cells(CASES, *SLOW)


@pytest.mark.parametrize("case", CELLS.values(), ids=CELLS)
def test_search_finds_the_fastest_of_all(case: Case) -> None:
    search, outcome = searched(case)
    if case.share is not None:
        free = outcome.solutions[0]
        limit = case.share * max(step_memory(as_step(free.problem, free.assignment)))
        search, outcome = searched(case, memory_limit=limit)
        assert outcome.solutions[0].seconds > free.seconds
    optimum = outcome.solutions[0]
    assert optimum.seconds == pytest.approx(fastest_of_all(search).seconds, rel=1e-9)
    assert optimum.seconds == pytest.approx(step_seconds(as_step(optimum.problem, optimum.assignment)).total, rel=1e-9)
    assert outcome.bound == pytest.approx(optimum.seconds, rel=1e-9)


def test_parameters_are_gathered_from_neighbours_where_links_are_slow_beyond_them() -> None:
    """Unless memory has no room for pieces of a box of four."""
    case = CASES["neighbours"]
    _, outcome = searched(case)
    free = outcome.solutions[0]
    assert free.candidate.layout.zero_ranks == 4
    limit = 0.4 * max(step_memory(as_step(free.problem, free.assignment)))
    assert searched(case, memory_limit=limit)[1].solutions[0].candidate.layout.zero_ranks == 0


def test_recomputation_that_memory_forces_is_no_more_than_plans_recompute() -> None:
    pytest.importorskip("transformers")
    model = level_one("gpt2", "eight")
    fixed = {"recompute": ("none", "full"), "zero": 3, "cp": (1, 2)}
    free = Search(model, model.cluster, read_demands(fixed, time_limit=600.0)).run().solutions[0]
    limit = 0.5 * max(step_memory(as_step(free.problem, free.assignment)))
    demands = read_demands(fixed, memory_limit=limit, num_alternatives=100, time_limit=600.0)
    search = Search(model, model.cluster, demands)
    forced = []
    for solution in search.run().solutions:
        layout = solution.candidate.layout
        bound = search.bounds.recompute(solution.candidate, search.memory)
        assert bound <= recomputed(solution) * (1 + 1e-9)
        forced.append(bound * layout.context * layout.tensor > recomputed(solution))
    assert any(forced)  # a bound that forgets what the devices divide would be too high


def recomputed(solution: StepSolution) -> float:
    """Seconds of one micro-batch, over all units, on what is computed a second time."""
    seconds = 0.0
    for run, choice, count in (group for groups in solution.assignment for group in groups):
        name = solution.problem.runs[run].choices[choice].label[0]
        (policy,) = (each for each in solution.sharded.figures[run].policies if each.name == name)
        seconds += count * (policy.compute + policy.communication)
    return seconds


def test_search_finds_nothing_where_nothing_fits() -> None:
    search, outcome = searched(CASES["every choice"], memory_limit=5e3)
    assert not outcome.solutions
    assert fastest_of_all(search).seconds == math.inf


@pytest.mark.parametrize("cluster", ["eight", "boxes"])
def test_the_walk_passes_all_candidates(cluster: str) -> None:
    search, _ = searched(Case("2-block mlp", cluster), num_alternatives=1)
    optimum = candidates(search.cluster, global_batch=8, num_units=4, demands=search.demands)
    assert set(optimum) <= set(every_candidate(search))


def test_schedules_of_which_every_micro_batch_is_played_are_left_out_where_there_are_too_many() -> None:
    cluster, demands = Cluster.parse("cpu-local:4"), read_demands({"pp": 4, "schedule": ["1f1b", "v_half"]})
    most = {"1f1b": 0, "v_half": 0}
    for each in candidates(cluster, global_batch=4 * MOST_PLAYED, num_units=16, demands=demands):
        most[each.schedule] = max(most[each.schedule], each.num_microbatches)
    assert most == {"1f1b": 4 * MOST_PLAYED, "v_half": MOST_PLAYED}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_arrays_find_what_units_one_by_one_find(schedule: str) -> None:
    for seed in cells(range(2), range(2, 5)):
        chooser = random.Random(seed)
        problem = random_problem(schedule, chooser)
        best = fastest(problem, chooser).seconds
        assert best == pytest.approx(one_by_one(problem), rel=1e-12)


def test_every_copy_converts_what_it_takes_also_right_behind_another_row_of_blocks() -> None:
    level = level_one("two rows", "boxes")
    problem = level.space.structure
    for run, count in enumerate((2, 3)):
        parts = problem.parts(problem.streams[f"carry:{run}#0"])
        assert {(phase, copies) for phase, copies, _ in parts} == {("forward", count), ("backward", count)}
    plan = plan_step(level.space.graph, level.cluster, read_demands({"tp": 2}))
    priced = reprice(level.space.graph, plan, level.cluster)
    assert plan.certificate.objective == pytest.approx(priced.seconds.total, rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_what_rows_leave_to_reduce_in_one_chunk_is_in_program_and_enumeration(seed: int) -> None:
    chooser = random.Random(seed)
    problem = random_problem("1f1b", chooser)
    limit = problem.memory[0] * chooser.choice((1.0, 2.0))
    problem = replace(problem, num_ranks=1, num_chunks=1, num_microbatches=1, memory=(limit,))
    best = one_by_one(problem)
    assert fastest(problem, chooser).seconds == pytest.approx(best, rel=1e-12)
    solved = solve_stages(problem, gap=0.0)
    assert (math.inf if solved is None else solved.objective) == pytest.approx(best, rel=1e-9)
    assert late_bound(problem.folded) <= bound_within_memory(problem) <= best * (1.0 + 1e-9)


def random_problem(schedule: str, chooser: random.Random) -> StageProblem:
    """Two ranks, five units in three runs, three choices each, and memory that not everything fits in."""

    def choice() -> UnitChoice:
        seconds = {
            name: chooser.choice((0.0, 1.0, 2.5))
            for name in ("gather_forward", "gather_backward", "reduce_backward", "reduce_step", "update_step")
        }
        num_bytes = {name: float(chooser.randint(1, 9)) for name in ("state_bytes", "saved_bytes", "peak_bytes")}
        backward = chooser.uniform(1.0, 4.0)
        costs = LayerCosts(
            forward=chooser.uniform(1.0, 2.0), backward=backward, backward_weight=backward / 2, **seconds, **num_bytes
        )
        return UnitChoice(label=(), costs=costs)

    runs = tuple(
        UnitRun(
            name=f"run {index}",
            count=count,
            choices=(choice(), choice(), choice()),
            receive_forward=chooser.uniform(0.0, 0.2),
            receive_backward=chooser.uniform(0.0, 0.2),
        )
        for index, count in enumerate((2, 2, 1))
    )
    num_chunks = 2 * (SCHEDULES[schedule].chunks_per_rank or 2)
    limit = chooser.uniform(60.0, 90.0)
    return StageProblem(
        runs=runs, schedule=schedule, num_ranks=2, num_chunks=num_chunks, num_microbatches=4, memory=(limit, limit)
    )


def one_by_one(problem: StageProblem) -> float:
    """The fastest step that fits: every choice of every unit in its place, nothing taken for equal."""
    units = [run for run, each in enumerate(problem.runs) for _ in range(each.count)]
    best = math.inf
    for cuts in itertools.combinations(range(1, len(units)), problem.num_chunks - 1):
        for chosen in itertools.product(*(range(len(problem.runs[run].choices)) for run in units)):
            groups = [(run, choice, 1) for run, choice in zip(units, chosen)]
            ends = (0, *cuts, len(units))
            step = as_step(problem, tuple(tuple(groups[begin:end]) for begin, end in itertools.pairwise(ends)))
            if all(used <= limit for used, limit in zip(step_memory(step), problem.memory)):
                best = min(best, step_seconds(step).total)
    return best
