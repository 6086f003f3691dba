"""``planner plan`` of a cluster of islands: synchronous, or islands that meet every H steps."""

from __future__ import annotations

import argparse

from cost_models.island_cluster import IslandCluster
from cost_models.text import printable
from planner.cli.option_scopes import ISLANDS


def run_island_plan(options: argparse.Namespace) -> int:
    """Plan both ways, save, print; returns the exit code."""
    from planner.cli.shared_options import read_choices
    from planner.island_planning import plan_islands

    if options.loss_budget is not None and options.inner_steps is not None:
        raise ValueError("--loss-budget says which H, and so does --inner-steps: drop one of them")
    said = {name: value for name in ISLANDS if (value := getattr(options, name)) is not None}
    plans = plan_islands(
        options.model,
        IslandCluster.from_toml(options.cluster),
        global_batch=options.global_batch,
        seq_len=options.seq_len,
        dtype=options.dtype,
        time_limit=options.time_limit,
        max_programs=options.max_programs,
        fuse=not options.no_fuse,
        solver=options.solver,
        fix=read_choices(options.fix, option="--fix"),
        headroom=options.headroom,
        num_alternatives=options.alternatives,
        optimizer=options.optimizer,
        gradient_dtype=options.gradient_dtype,
        compiled=options.compiled,
        offload=options.offload,
        **said,
    )
    print(plans.summary(), end="")
    if options.output is not None:
        print(f"\nsaved to {', '.join(printable(str(path)) for path in plans.save(options.output))}")
    return 0
