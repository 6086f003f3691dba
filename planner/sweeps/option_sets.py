"""Named sets of options of a study: what of ``planner.plan`` a row may be planned with, checked before any planning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cost_models.fields import Table, check_keys, shown
from cost_models.memory import HEADROOM
from planner.solvers.pulp_solver import solver_named
from planner.whole_step.candidates.demands import NEVER, read_demands
from planner.whole_step.candidates.training_options import TrainingOptions
from planner.whole_step.plan_step import check_objective

#: Field of an option set → the argument of ``planner.plan`` that it becomes.
OPTION_FIELDS: Mapping[str, str] = {
    "dtype": "dtype",
    "fix": "fix",
    "forbid": "forbid",
    "pins": "constraints",
    "headroom": "headroom",
    "memory_gib": "memory_limit",
    "objective": "objective",
    "target_seconds": "target_seconds",
    "alternatives": "num_alternatives",
    "optimizer": "optimizer",
    "gradient_dtype": "gradient_dtype",
    "compiled": "compiled",
    "overlap_tensor": "overlap_tensor",
    "offload": "offload",
    "fuse": "fuse",
    "solver": "solver",
}
_FLAGS = ("compiled", "overlap_tensor", "fuse")
_TABLES = ("fix", "forbid", "pins")
_FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")


def read_options(table: Table, where: str) -> dict[str, Any]:
    """The arguments of ``planner.plan`` that an option set stands for.

    Raises:
        ValueError: naming ``where`` for an unknown field, or a value that planning does not take.
    """
    check_keys(table, tuple(OPTION_FIELDS), where)
    for name in _FLAGS:
        if not isinstance(table.get(name, False), bool):
            raise ValueError(f"{where}.{name} must be true or false, got {shown(table[name])}")
    for name in _TABLES:
        if not isinstance(table.get(name, {}), Mapping):
            raise ValueError(f"{where}.{name} must be a table, got {shown(table[name])}")
    if table.get("dtype", "bfloat16") not in _FLOAT_DTYPES:
        raise ValueError(f"{where}.dtype must be one of {', '.join(_FLOAT_DTYPES)}, got {shown(table['dtype'])}")
    try:
        json.dumps(dict(table))
    except TypeError as error:
        raise ValueError(f"{where} has a value that no option takes: {error}") from error
    options = {OPTION_FIELDS[name]: value for name, value in table.items()}
    if "memory_gib" in table:
        options["memory_limit"] = _bytes(table["memory_gib"], where)
    try:
        _check(options)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return options


def check_layout(table: Table, where: str) -> dict[str, Any]:
    """The choices of a layout, as ``planner.plan(fix=…)`` takes them.

    Raises:
        ValueError: naming ``where`` for an unknown choice or a value that it cannot have, and if there is none.
    """
    if not table:
        raise ValueError(f"{where} fixes nothing: give choices such as tp = 8")
    try:
        read_demands(table)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return dict(table)


def _bytes(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{where}.memory_gib must be a positive number of GiB, got {shown(value)}")
    return float(value) * 2**30


def _check(options: Mapping[str, Any]) -> None:
    check_objective(options.get("objective", "time"), options.get("target_seconds"))
    read_demands(
        options.get("fix"),
        options.get("forbid"),
        headroom=options.get("headroom", HEADROOM),
        memory_limit=options.get("memory_limit"),
        training=TrainingOptions(options.get("optimizer", "adamw"), options.get("gradient_dtype")),
        num_alternatives=options.get("num_alternatives", 1),
        solver=solver_named(options.get("solver")),
        offload=options.get("offload", NEVER),
    )
