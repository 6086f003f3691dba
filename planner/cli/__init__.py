"""The ``planner`` command: plan offline, show a plan, verify it, run a script on several processes.

Exit codes: 0 success, 1 a verification that failed, 2 an error in what was asked (one line on standard error).
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_EXAMPLES = """examples:
  planner plan llama-3-8b --cluster dgx-h100:32 --mesh dp=32,tp=8 --seq-len 4096 --global-batch 64 -o plan.json
  planner plan ./my-model/config.json --cluster my-cluster.toml --mesh dp=4,tp=2 --global-batch 32 --seq-len 512
  planner show plan.json --operators
  planner verify tiny-llama --mesh dp=2,tp=2
  planner run --nproc 4 train.py --epochs 3
  planner demo
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.command(options)
    except (ValueError, FileNotFoundError, IsADirectoryError, PermissionError) as error:
        message = " ".join(str(error).split())
        print(f"planner: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("planner: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="planner",
        description="Plan how a PyTorch model is split over a cluster.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_add_plan, _add_show, _add_verify, _add_run, _add_demo):
        add(commands)
    return parser


def _subparser(commands: Any, name: str, *, help: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    epilog = "examples:\n" + "\n".join(f"  {example}" for example in examples)
    return commands.add_parser(
        name, help=help, description=help, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _add_plan(commands: Any) -> None:
    parser = _subparser(
        commands,
        "plan",
        help="choose how a model is split over a cluster, offline",
        examples=[
            "planner plan llama-3-8b --cluster dgx-h100:32 --mesh dp=32,tp=8 --seq-len 4096 --global-batch 64 "
            "-o plan.json",
            "planner plan tiny-llama --mesh tp=4 --seq-len 64 --global-batch 8 --pin 'model.layers.*.mlp.*' tp 'S(0)'",
        ],
    )
    _add_model_arguments(parser)
    parser.add_argument("--cluster", help="PRESET[:NODES] or a TOML file (default: this machine's processors)")
    parser.add_argument("--memory", metavar="GIB", help="bound on each device ('none': no bound; default: its memory)")
    parser.add_argument(
        "--pin",
        nargs=3,
        action="append",
        default=[],
        metavar=("PATTERN", "AXIS", "TYPE"),
        help="fix the type of matching parameters or modules on an axis",
    )
    parser.add_argument("--forbid", action="append", default=[], metavar="COLLECTIVE", help="do not use a collective")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="for the solver")
    parser.add_argument("-o", "--output", metavar="FILE", help="save the plan as JSON")
    parser.set_defaults(command=_plan)


def _add_show(commands: Any) -> None:
    parser = _subparser(
        commands,
        "show",
        help="print a saved plan",
        examples=["planner show plan.json", "planner show plan.json --operators"],
    )
    parser.add_argument("plan", help="a plan saved by 'planner plan -o'")
    parser.add_argument("--operators", action="store_true", help="also one line for each operator")
    parser.set_defaults(command=_show)


def _add_verify(commands: Any) -> None:
    parser = _subparser(
        commands,
        "verify",
        help="run every rank of a plan in this process and compare with one device",
        examples=["planner verify tiny-llama --mesh dp=2,tp=2", "planner verify tiny-t5 --mesh dp=4,tp=8"],
    )
    _add_model_arguments(parser, batch_size=8, seq_len=16)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps to compare (default: 3)")
    parser.set_defaults(command=_verify)


def _add_model_arguments(
    parser: argparse.ArgumentParser, *, batch_size: int | None = None, seq_len: int | None = None
) -> None:
    parser.add_argument("model", help="a name from the config library, or the path of a Hugging Face config")
    parser.add_argument("--mesh", required=True, metavar="AXIS=SIZE,…", help="mesh axes, outermost first: dp=32,tp=8")
    parser.add_argument("--seq-len", type=int, default=seq_len, help="tokens in a sample")
    parser.add_argument("--global-batch", type=int, default=batch_size, help="samples in a step, over all devices")
    parser.add_argument("--dtype", help="parameter dtype (plan: bfloat16; verify: float64)")


def _add_run(commands: Any) -> None:
    parser = _subparser(
        commands,
        "run",
        help="start a script on several processes of this machine (through torchrun)",
        examples=["planner run --nproc 4 train.py --epochs 3"],
    )
    parser.add_argument("--nproc", type=int, required=True, help="number of processes")
    parser.add_argument("script", help="the script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(command=_run)


def _add_demo(commands: Any) -> None:
    parser = _subparser(
        commands,
        "demo",
        help="plan a small Llama on 4 processes and train it beside one process",
        examples=["planner demo", "planner demo --steps 60"],
    )
    parser.add_argument("--steps", type=int, default=40, help="training steps (default: 40)")
    parser.add_argument("--nproc", type=int, default=4, help="processes (default: 4)")
    parser.set_defaults(command=_demo)


def _plan(options: argparse.Namespace) -> int:
    gc.disable()  # nearly all that planning makes stays: looking for garbage takes an eighth of the time
    from planner.planning import as_cluster, as_mesh_shape, plan

    mesh = as_mesh_shape(options.mesh)
    cluster = as_cluster(options.cluster, num_devices=mesh.num_devices)
    found = plan(
        options.model,
        cluster,
        mesh=mesh,
        batch_size=options.global_batch,
        seq_len=options.seq_len,
        dtype=options.dtype,
        memory_limit=_memory_limit(options.memory, device_bytes=cluster.device.memory_bytes),
        constraints=_pins(options.pin),
        forbid_collectives=tuple(options.forbid),
        time_limit=options.time_limit,
    )
    if options.output:
        found.save(options.output)
    print(found.summary(), end="")
    if options.output:
        print(f"\nsaved to {options.output}")
    return 0


def _memory_limit(text: str | None, *, device_bytes: float) -> float | None:
    if text is None:
        return device_bytes
    if text == "none":
        return None
    try:
        gib = float(text)
    except ValueError:
        gib = -1.0
    if gib <= 0:
        raise ValueError(f"--memory takes a positive number of GiB or 'none', got {text!r}")
    return gib * 2**30


def _pins(pins: Sequence[Sequence[str]]) -> dict[str, dict[str, str]]:
    constraints: dict[str, dict[str, str]] = {}
    for pattern, axis, spmd_type in pins:
        constraints.setdefault(pattern, {})[axis] = spmd_type
    return constraints


def _show(options: argparse.Namespace) -> int:
    from passes.plan import Plan

    print(Plan.load(options.plan).summary(operators=options.operators), end="")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from planner import verify

    report = verify(
        options.model,
        options.mesh,
        batch_size=options.global_batch,
        seq_len=options.seq_len,
        dtype=options.dtype or "float64",
        steps=options.steps,
    )
    print(report.table())
    return 0 if report.ok else 1


def _run(options: argparse.Namespace) -> int:
    if not Path(options.script).is_file():
        raise FileNotFoundError(f"no script at {options.script!r}")
    from planner.cli.launch import launch

    return launch([options.script, *options.arguments], num_processes=options.nproc)


def _demo(options: argparse.Namespace) -> int:
    from planner.cli.launch import launch

    return launch(["-m", "planner.cli.demo", "--steps", str(options.steps)], num_processes=options.nproc)
