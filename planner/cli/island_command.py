"""``planner plan`` of a cluster of islands: synchronous, or islands that meet every H steps."""

from __future__ import annotations

import argparse

from cost_models.island_cluster import IslandCluster
from cost_models.text import printable

#: Options of ``planner plan`` that say something of islands alone.
ISLAND_OPTIONS = ("loss_budget", "inner_steps", "wire_format")
#: Those that are of one plan.
_OF_ONE_PLAN = ("mesh", "compare", "layout", "pin", "forbid", "memory", "devices", "write_lp", "framework")


def refuse_island_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options of islands on a cluster without."""
    for name in ISLAND_OPTIONS:
        if getattr(options, name) is not None:
            raise ValueError(f"{_flag(name)} is for islands: give --cluster a file with [[islands]] in it")


def run_island_plan(options: argparse.Namespace) -> int:
    """Plan both ways, save, print; returns the exit code."""
    from planner.cli.shared_options import read_choices
    from planner.island_planning import plan_islands

    for name in _OF_ONE_PLAN:
        if getattr(options, name) not in (None, []):
            raise ValueError(f"{_flag(name)} does not go with a cluster of islands: plan an island alone with it")
    if options.objective != "time":
        raise ValueError("--objective of a cluster of islands is time")
    if options.loss_budget is not None and options.inner_steps is not None:
        raise ValueError("--loss-budget says which H, and so does --inner-steps: drop one of them")
    said = {name: value for name in ISLAND_OPTIONS if (value := getattr(options, name)) is not None}
    plans = plan_islands(
        options.model,
        IslandCluster.from_toml(options.cluster),
        global_batch=options.global_batch,
        seq_len=options.seq_len,
        dtype=options.dtype,
        time_limit=options.time_limit,
        fuse=not options.no_fuse,
        solver=options.solver,
        fix=read_choices(options.fix, option="--fix"),
        headroom=options.headroom,
        num_alternatives=options.alternatives,
        optimizer=options.optimizer,
        gradient_dtype=options.gradient_dtype,
        compiled=options.compiled,
        **said,
    )
    print(plans.summary(), end="")
    if options.output is not None:
        print(f"\nsaved to {', '.join(printable(str(path)) for path in plans.save(options.output))}")
    return 0


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
