"""Any solver of PuLP's plans the same; what it does not prove is not claimed; what was solved can be read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import highspy
import pytest
import torch
from search_cases import Linears

import planner
from cost_models.step import LayerCosts
from passes.plan import Plan
from planner.pipeline_ilp.stage_ilp import solve_stages
from planner.pipeline_ilp.stage_problem import StageProblem, UnitChoice, UnitRun
from planner.solvers.linear import OPTIMAL, UNPROVED, LinearProgram
from planner.solvers.pulp_solver import checked, solver_named
from planner.solvers.solver import solve
from planner.whole_step.result.lp_files import write_stage_program

CBC = "PULP_CBC_CMD"


def planned(**options: object) -> Plan:
    """Two linear layers, trained by the square of what they give."""
    x = torch.ones(8, 64, device="meta")
    return planner.plan(
        Linears(64, 256, 64), "cpu-local:4", example_inputs=(x,), loss_fn=lambda y, _: (y**2).mean(), **options
    )  # type: ignore[arg-type]


def optimum(path: Path) -> float:
    """Seconds of the best solution of an LP file in microseconds, as HiGHS reads it."""
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("mip_rel_gap", 1e-9)
    assert highs.readModel(str(path)) == highspy.HighsStatus.kOk
    highs.run()
    assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return highs.getInfo().objective_function_value / 1e6


def knapsack(rows: float = 7.0) -> LinearProgram:
    """Whose linear relaxation is 9 1/3 and whose optimum 11."""
    program = LinearProgram()
    columns = [program.variable(cost, upper=3.0, integer=True) for cost in (5.0, 4.0, 3.0)]
    program.row(zip(columns, (2.0, 3.0, 1.0)), lower=rows)
    return program


@pytest.mark.parametrize(("name", "solver"), [(None, "HiGHS"), ("highs", "HiGHS"), ("CBC", CBC), ("pulp_cbc_cmd", CBC)])
def test_solvers_have_short_names(name: str | None, solver: str) -> None:
    assert solver_named(name) == solver


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CPLEX", "'CPLEX' is not installed on this machine: expected one of .*CBC, HiGHS"),
        ("HiGSH", "'HiGSH' is none that PuLP knows: expected one of .*CBC, HiGHS"),
    ],
)
@pytest.mark.parametrize("mesh", [{}, {"mesh": "dp=4"}])
def test_a_solver_that_is_not_there_is_refused_with_those_that_are(name: str, message: str, mesh: dict) -> None:
    with pytest.raises(ValueError, match=message):
        planned(solver=name, **mesh)


def test_another_solver_plans_the_same_mesh_and_is_named() -> None:
    highs, cbc = (planned(mesh="dp=2,tp=2", solver=solver).certificate for solver in (None, "CBC"))
    assert highs.solver.startswith("HiGHS 1.")
    assert cbc.solver.startswith("CBC (PuLP ") and "bounds: linear relaxations by HiGHS" in cbc.solver
    assert cbc.objective == pytest.approx(highs.objective, rel=1e-6)
    assert cbc.bound <= highs.objective * (1 + 1e-9)


def test_another_solver_plans_the_same_step_and_is_named() -> None:
    highs, cbc = (planned(fix={"dp": 1, "cp": 1, "zero": 0}, solver=solver).certificate for solver in (None, "CBC"))
    assert "CBC (PuLP " in cbc.solver
    assert cbc.objective == pytest.approx(highs.objective, rel=0.01)
    assert cbc.bound <= highs.objective * (1 + 1e-9)
    assert cbc.gap == pytest.approx(1 - cbc.bound / cbc.objective)


def test_no_gap_is_claimed_that_only_the_other_solver_vouches_for() -> None:
    program = knapsack()
    solution = solve(program, solver=CBC)
    assert solution.values is not None and program.cost_of(solution.values) == pytest.approx(11.0)
    assert solution.bound == pytest.approx(28 / 3) and solution.status == UNPROVED
    assert solve(program).bound == pytest.approx(11.0) and solve(program).status == OPTIMAL


def test_nothing_fits_only_if_highs_agrees() -> None:
    program = knapsack(rows=12.5)
    assert not solve(program, solver=CBC).infeasible
    program.row([(0, 2.0)], lower=0.5, upper=1.5)  # between two integers
    assert not solve(program.relaxed()).infeasible and solve(program, solver=CBC).infeasible


@pytest.mark.parametrize("wrong", [[1.0, 1.0, 1.0], [3.0, 0.0, 0.5], [-1.0, 3.0, 0.0], [4.0, 0.0, 0.0]])
def test_an_answer_that_breaks_a_row_a_bound_or_an_integer_is_none(wrong: list[float]) -> None:
    assert checked(knapsack(), [3.0, 0.0, 1.0 + 1e-7]) == [3.0, 0.0, 1.0]
    assert checked(knapsack(), wrong) is None


def tight_stages() -> StageProblem:
    """Eight layers on two ranks whose memory holds a part of the fast choices, and a first layer that takes longer."""
    costs = (
        LayerCosts(forward=1.0, backward=2.0, state_bytes=1.0, saved_bytes=2.0, reduce_step=7.0),
        LayerCosts(forward=1.0, backward=3.0, state_bytes=1.0, saved_bytes=0.5, peak_bytes=0.7),
        LayerCosts(forward=1.1, backward=2.1, state_bytes=1.0, saved_bytes=1.9),
    )
    choices = tuple(UnitChoice(label=(str(index),), costs=cost) for index, cost in enumerate(costs))
    return StageProblem(
        runs=(
            UnitRun(name="first", count=2, choices=choices[:2], receive_forward=0.2),
            UnitRun(name="layers", count=7, choices=choices),
        ),
        schedule="1f1b",
        num_ranks=2,
        num_chunks=2,
        num_microbatches=4,
        memory=(16.0, 13.0),
    )


def test_stages_that_need_the_integer_program_are_the_same() -> None:
    highs, cbc = (solve_stages(tight_stages(), gap=1e-6, solver=solver) for solver in ("HiGHS", CBC))
    assert highs is not None and cbc is not None and highs.num_variables
    assert cbc.objective == pytest.approx(highs.objective, rel=1e-6)
    assert cbc.bound <= highs.objective * (1 + 1e-9)


def test_the_program_of_stages_is_written_and_has_the_same_optimum(tmp_path: Path) -> None:
    best = solve_stages(tight_stages(), gap=1e-6)
    write_stage_program(tight_stages(), tmp_path / "stages.lp")
    assert best is not None and optimum(tmp_path / "stages.lp") == pytest.approx(best.objective, rel=1e-6)


def test_the_program_of_a_mesh_is_written_and_has_the_same_optimum(tmp_path: Path) -> None:
    plan = planned(mesh="dp=2,tp=2", write_lp=tmp_path / "plan.lp")
    assert optimum(tmp_path / "plan.lp") == pytest.approx(plan.certificate.objective, rel=1e-6)


def test_the_programs_of_a_step_are_written(tmp_path: Path) -> None:
    plan = planned(fix={"pp": 1, "dp": 1, "cp": 2}, write_lp=tmp_path / "plan.lp")
    assert {file.name for file in tmp_path.iterdir()} == {"plan.context.lp", "plan.sharding.lp", "plan.stages.lp"}
    stages, sharding = optimum(tmp_path / "plan.stages.lp"), optimum(tmp_path / "plan.sharding.lp")
    assert plan.certificate.bound <= stages * (1 + 1e-6)
    assert 0 < sharding <= stages <= plan.certificate.objective * (1 + 1e-9)


def test_programs_that_cannot_be_written_are_refused_before_planning(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot write .*there is no directory"):
        planned(mesh="dp=4", write_lp=tmp_path / "missing" / "plan.lp")


def test_settled_bounds_serve_programs_of_the_same_rows_alone() -> None:
    program = LinearProgram()
    columns = [program.variable(cost, upper=2.0) for cost in (-1.0, -3.0)]
    program.row(((column, 1.0) for column in columns), upper=3.0)
    program.settle()
    dearer = replace(program, costs=[-3.0, -1.0])
    assert dearer.bounds() is program.settled
    assert solve(program).values == pytest.approx([1.0, 2.0]) and solve(dearer).values == pytest.approx([2.0, 1.0])
    narrower = replace(program, uppers=[2.0, 0.5])
    assert narrower.bounds() is not program.settled
    assert solve(narrower).values == pytest.approx([2.0, 0.5])
