"""``planner sweep``: plan all combinations of a study, in parallel, resumed where it was stopped."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from cost_models.text import counted, printable
from passes.plan.text_tables import format_seconds
from planner.cli.shared_options import count, subparser

if TYPE_CHECKING:
    from planner.sweeps.sweep_row import SweepRow


def add_sweep(commands: Any) -> None:
    """Add the subcommand."""
    parser = subparser(
        commands,
        "sweep",
        help="plan models × clusters × sizes × options of a study into tables and charts; goes on where it was stopped",
        examples=["planner sweep study.toml -o results/", "planner sweep study.toml -o results/ --jobs 2"],
    )
    parser.add_argument("study", help="a TOML file, see docs/sweeps.md")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="where to write plans, tables, a page")
    parser.add_argument("--jobs", type=count, metavar="N", help="processes (default: one for each core)")
    parser.set_defaults(command=_sweep)


def _sweep(options: argparse.Namespace) -> int:
    from planner.sweeps.run_sweep import sweep

    done = sweep(options.study, options.output, jobs=options.jobs, listener=_tell)
    print(f"{counted(len(done.rows), 'row')}, {done.num_errors:,} without a plan")
    for path in done.files:
        print(f"wrote {printable(str(path))}")
    return 0


def _tell(num_finished: int, num_rows: int, row: SweepRow, is_new: bool) -> None:
    """Print a line for a row that was planned now."""
    if not is_new:
        return
    request = row.request
    batch = f"{request.global_batch:,}" + (f"×{request.seq_len:,}" if request.seq_len else "")
    where = f"{counted(row.num_devices, 'device')} of {request.cluster}"
    what = f"{request.model} on {where}, {batch}, {request.options}, {request.layout}"
    if row.error is None:
        result = f"{format_seconds(row.figure('step_seconds'))} a step, gap {row.figure('gap'):.2%}"
    else:
        result = f"no plan: {row.error}"
    print(printable(f"[{num_finished:,}/{num_rows:,}] {what}: {result}"), flush=True)
