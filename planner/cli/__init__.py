"""The ``planner`` command: plan offline; show, report, compare, sweep, audit and verify plans; run scripts.

Exit codes: 0 success, 1 a verification or an audit that failed, 2 an error in what was asked (one line on standard
error), and those of a shell for a pipe that was closed (141) and an interrupt (130).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from cost_models.files import check_writable
from cost_models.text import printable
from planner.cli.audit_command import add_audit
from planner.cli.cluster_command import add_cluster
from planner.cli.export_command import add_export
from planner.cli.inspect_commands import add_diff, add_explain, add_report, add_robustness, add_trace, add_why_not
from planner.cli.plan_command import add_plan
from planner.cli.profile_command import add_profile
from planner.cli.python_names import in_options
from planner.cli.run_command import add_run
from planner.cli.shared_options import Parser, add_plan_argument, add_solver_argument, count, price, subparser
from planner.cli.sweep_command import add_sweep
from planner.cli.terminal import folded_output
from planner.cli.verify_command import add_verify
from planner.extensions import load_extensions

#: Environment variable that makes errors raise, with Python's traceback.
TRACEBACK = "MESHWRIGHT_TRACEBACK"

_EPILOG = """Plan, look, ask, run:
  planner plan llama-3-8b --cluster dgx-h100:8 --seq-len 8192 \\
      --global-batch 256 -o plan.json             decide; --verbose prints all
  planner show plan.json                          all that was decided, as text
  planner report plan.json -o plan.html           the same with charts
  planner explain plan.json model.layers.3.mlp    why it is split so
  planner why-not plan.json --fix tp=4            what a wish would cost
  planner why-not plan.json --memory 60           what less memory would cost
  planner robustness plan.json                    how wrong prices may be
  planner sweep study.toml -o results/            many models and clusters
  planner verify tiny-llama --mesh dp=2,tp=2      every rank, in one process
  planner export plan.json --to megatron          for another framework
  planner profile -o cluster.toml                 measure this machine
  planner run --nproc 4 train.py                  start a training script

planner COMMAND --help has the options and more examples of each.
"""


def command() -> int:
    """The command line as a process of its own; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without µ or × shows the rest
    code = main()
    gc.freeze()  # at its end the interpreter looks for cycles in millions of objects: a second and a half
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = argparse.Namespace()
    try:
        options = _parser().parse_args(arguments)
        load_extensions()
        with contextlib.nullcontext() if getattr(options, "passes_output", False) else folded_output():
            return options.command(options)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("planner: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        print(f"planner: error: {in_options(one_line(error), options)}", file=sys.stderr)
        return 2


def one_line(error: Exception) -> str:
    """The text of an error for a terminal; for unexpected errors also how to see the traceback."""
    text = printable(" ".join(str(error).split()))
    if isinstance(error, (ValueError, OSError)):
        return text
    return f"{type(error).__name__}: {text or 'no more is known'} ({TRACEBACK}=1 shows where)"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="planner",
        description="Decide how the training of a PyTorch model is split over a cluster, offline;\n"
        "look at the plan, ask it why, hold it against others, and run it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        add_plan,
        _add_show,
        add_report,
        add_trace,
        add_diff,
        add_why_not,
        add_export,
        add_sweep,
        add_explain,
        add_robustness,
        add_audit,
        add_verify,
        add_cluster,
        add_profile,
        add_run,
        _add_demo,
    ):
        add(commands)
    return parser


def _add_show(commands: Any) -> None:
    parser = subparser(
        commands,
        "show",
        help="print a saved plan",
        examples=["planner show plan.json --operators", "planner show plan.json --price 2.5 --tokens 15000000000000"],
    )
    add_plan_argument(parser)
    parser.add_argument("--operators", action="store_true", help="also one line for each operator")
    parser.add_argument("--price", type=price, help="what one device costs an hour: adds what running the plan costs")
    parser.add_argument("--tokens", type=count, metavar="N", help="adds the days that so many tokens (or samples) take")
    parser.set_defaults(command=_show)


def _add_demo(commands: Any) -> None:
    parser = subparser(
        commands,
        "demo",
        help="plan a small Llama on 4 processes, train it beside one process, and have it write",
        examples=["planner demo", "planner demo --steps 60"],
    )
    parser.add_argument("--steps", type=count, default=40, help="training steps (default: 40)")
    parser.add_argument("--nproc", type=count, default=4, help="processes (default: 4)")
    parser.add_argument("--report", default="demo.html", help="file of the plan's report (default: demo.html)")
    add_solver_argument(parser)
    parser.set_defaults(command=_demo, passes_output=True)


def _show(options: argparse.Namespace) -> int:
    from passes.plan.serving import read_any_plan
    from passes.plan.text_tables import format_list

    plan = read_any_plan(options.plan)
    print(plan.summary(operators=options.operators), end="")
    if options.price is not None or options.tokens is not None:
        from planner.inspection.running_cost import cost_lines

        lines = cost_lines(plan, device_hour_price=options.price, total=options.tokens)
        print(format_list("\nRunning it", list(lines)))
    return 0


def _demo(options: argparse.Namespace) -> int:
    from planner.cli.launch import launch

    solver = ["--solver", options.solver] if options.solver else []
    words = ["--steps", str(options.steps), "--report", str(check_writable(options.report)), *solver]
    return launch(["-m", "planner.cli.demo", *words], num_processes=options.nproc)
