"""The programs of a plan of a whole step as LP files: the shardings on the context and tensor axes, and the stages."""

from __future__ import annotations

import copy
from pathlib import Path

from planner.pipeline_ilp.stage_ilp import whole_program
from planner.pipeline_ilp.stage_problem import StageProblem
from planner.sharding_ilp.program_files import MICROSECONDS, write_sharding_program
from planner.solvers.pulp_solver import write_program
from planner.whole_step.result.outcome import StepSolution


def lp_paths(path: str | Path) -> dict[str, Path]:
    """The files that a plan written to ``plan.lp`` has, by what they are: ``plan.stages.lp`` and so on."""
    base = Path(path)
    return {what: base.with_name(f"{base.stem}.{what}.lp") for what in ("context", "sharding", "stages")}


def write_step_programs(solution: StepSolution, path: str | Path) -> None:
    """Write ``sharding`` and ``stages`` of ``lp_paths``; ``context`` where the context axis was searched by itself.

    Raises:
        ValueError: if a file cannot be written.
    """
    paths = lp_paths(path)
    variant = solution.sharded.variant
    if variant.along is not None:
        write_sharding_program(variant.along.ilp, paths["context"], what="context")
    write_sharding_program(variant.ilp, paths["sharding"])
    write_stage_program(solution.problem, paths["stages"])


def write_stage_program(problem: StageProblem, path: Path) -> None:
    """The stage program with its constant as a variable that is one: its objective is the step in microseconds.

    Raises:
        ValueError: if the file cannot be written.
    """
    stage = whole_program(problem)
    program = copy.deepcopy(stage.program)
    program.row([(program.variable(stage.constant, upper=1.0), 1.0)], lower=1.0)
    runs = stage.problem.runs
    names = {
        move.column: f"chunk{chunk}_{runs[move.run].name}_{'_'.join(move.option.label)}"
        for chunk, moves in enumerate(stage.moves)
        for move in moves
    }
    write_program(program, path, what="stages", scale=stage.second * MICROSECONDS, names=names)
