"""``planner profile``: measure the machine that it runs on, and write the cluster file that plans are made for."""

from __future__ import annotations

import argparse
from typing import Any

from cost_models.text import printable
from planner.cli.shared_options import subparser


def add_profile(commands: Any) -> None:
    """Add the subcommand."""
    parser = subparser(
        commands,
        "profile",
        help="measure this machine (operators, collectives) and write a cluster file; goes on where it was stopped",
        examples=[
            "planner profile -o laptop.toml --quick",
            "torchrun --nproc-per-node 8 -m planner profile -o cluster.toml",
            "planner plan gpt2 --cluster cluster.toml --seq-len 1024 --global-batch 64",
        ],
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE.toml", help="the cluster file to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what to measure (default: a GPU if there is one)")
    parser.add_argument("--name", help="of the cluster in the file")
    parser.add_argument("--quick", action="store_true", help="leave out calls of more than ten milliseconds")
    parser.add_argument("--fresh", action="store_true", help="measure anew what an earlier run has measured")
    parser.set_defaults(command=_profile)


def _profile(options: argparse.Namespace) -> int:
    from planner.calibration import profile_machine

    profile_machine(
        options.output,
        device=options.device,
        name=options.name,
        quick=options.quick,
        fresh=options.fresh,
        listener=lambda line: print(printable(line), flush=True),
    )
    return 0
