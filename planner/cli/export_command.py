"""``planner export``: a saved plan as the configuration of another framework."""

from __future__ import annotations

import argparse
from typing import Any

from cost_models.text import printable, printable_lines
from planner.cli.shared_options import add_plan_argument, refuse_over_plan, subparser
from planner.cli.terminal import folded_output


def add_export(commands: Any) -> None:
    """Add ``planner export``."""
    parser = subparser(
        commands,
        "export",
        help="write a saved plan as another framework's configuration",
        examples=[
            "planner export plan.json --to megatron -o pretrain.sh",
            "planner export plan.json --to accelerate-fsdp2 -o accelerate.yaml",
        ],
    )
    add_plan_argument(parser)
    parser.add_argument(
        "--to",
        required=True,
        metavar="FRAMEWORK",
        help="torchtitan, megatron, accelerate-fsdp2, deepspeed or transformers-tp",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: to the terminal)")
    parser.set_defaults(command=_export, passes_output=True)  # a folded script is another script


def _export(options: argparse.Namespace) -> int:
    from cost_models.files import check_writable
    from passes.plan import Plan
    from planner.exports.export_plan import export, framework_named

    framework_named(options.to)
    if options.output is not None:
        check_writable(options.output)
        refuse_over_plan(options.output, options.plan)
    exported = export(Plan.load(options.plan), options.to)
    if options.output is None:
        print(printable_lines(exported.text), end="")
        return 0
    exported.save(options.output)
    with folded_output():
        print(printable_lines("\n".join(exported.comments())))
        print(f"wrote {printable(options.output)}")
    return 0
