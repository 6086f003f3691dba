"""The sharding ILP as an LP file."""

from __future__ import annotations

from pathlib import Path

from planner.sharding_ilp.sharding_program import ShardingIlp
from planner.solvers.pulp_solver import write_program

#: Objectives in files are in microseconds, which keeps them well above solvers' tolerances.
MICROSECONDS = 1e6


def write_sharding_program(ilp: ShardingIlp, path: str | Path, *, what: str = "sharding") -> None:
    """Write the program of ``ilp`` with its x variables named by operator and choice, the objective in microseconds.

    Raises:
        ValueError: if the file cannot be written.
    """
    names = {
        column: f"{name}_{'_'.join(option.labels)}"
        for name, columns in ilp.x.items()
        for column, option in zip(columns, ilp.problem.elements[name].options)
    }
    write_program(ilp.program, path, what=what, scale=MICROSECONDS, names=names)
