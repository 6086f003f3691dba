"""``planner run``: start a script on several processes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from planner.cli.launch import Hosts, launch
from planner.cli.shared_options import Parser, count, subparser
from runtime.launch.place import DEFAULT_PORT, LaunchError

_EXAMPLES = (
    "planner run --nproc 8 train.py --epochs 3",
    "planner run train.py --nproc 8 -- --port 7",
    "planner run --nproc 4 --elastic 2 train.py      # a script with planner.Elastic",
    "planner run train.py --nnodes 2 --node-rank 0 --address node01    # on node01; --node-rank 1 on the other",
)


def add_run(commands: Any) -> None:
    """Add the subcommand."""
    parser = subparser(
        commands,
        "run",
        help="start a script on several processes, of this host or of many (through torchrun)",
        examples=list(_EXAMPLES),
    )
    _add_options(parser)
    parser.add_argument("script", help="the script to run")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="its arguments; the options above may also stand at their beginning ('--' ends them)",
    )
    parser.set_defaults(command=run_script, passes_output=True)


#: Option → type, what it is called in the help, and the help.
_OPTIONS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "--nproc": (count, "N", "processes on each host (default: one for each GPU)"),
    "--nnodes": (int, "N", "number of hosts (default: 1); run the same command on each, with its own --node-rank"),
    "--node-rank": (int, "R", "this host's number, from 0"),
    "--address": (str, "HOST", "host name of host 0"),
    "--port": (int, "PORT", f"where host 0 listens (default: {DEFAULT_PORT})"),
    "--elastic": (
        count,
        "MIN",
        "for a script with planner.Elastic: go on with MIN processes at least when some are lost",
    ),
    "--max-restarts": (int, "N", "with --elastic: processes that are started in the place of lost ones (default: 10)"),
    "--timeout": (float, "SECONDS", "within which all hosts must have come (default: 300)"),
}


def _add_options(parser: argparse.ArgumentParser) -> None:
    for name, (kind, metavar, text) in _OPTIONS.items():
        parser.add_argument(name, type=kind, metavar=metavar, help=text)


def run_script(options: argparse.Namespace) -> int:
    """Run the script; returns the exit code."""
    arguments = _read_leading(options)
    if not Path(options.script).is_file():
        raise FileNotFoundError(f"no script at {options.script!r}")
    hosts = _read_hosts(options)
    num_processes = options.nproc if options.nproc is not None else _num_gpus()
    if options.elastic is not None:
        if hosts.count > 1:
            raise ValueError("--elastic looks after the processes of one host: leave out --nnodes")
        restarts = 10 if options.max_restarts is None else options.max_restarts
        from planner.cli.elastic_launch import launch_elastic  # loads torch

        return launch_elastic(
            [options.script, *arguments], num_processes=num_processes, least=options.elastic, max_restarts=restarts
        )
    if options.max_restarts is not None:
        raise ValueError("--max-restarts means something only with --elastic")
    try:
        return launch([options.script, *arguments], num_processes=num_processes, hosts=hosts)
    except LaunchError as error:
        print(f"planner: {error}", file=sys.stderr)
        return 1


def _read_leading(options: argparse.Namespace) -> list[str]:
    """Move our own options from the start of the script's arguments to ``options``; return the others."""
    parser = Parser(prog="planner run", add_help=False, allow_abbrev=False)
    _add_options(parser)
    arguments: Sequence[str] = options.arguments
    num_leading = 0
    while num_leading < len(arguments) and arguments[num_leading].partition("=")[0] in _OPTIONS:
        num_leading += 1 if "=" in arguments[num_leading] else 2
    values = vars(parser.parse_args(arguments[:num_leading]))
    for name, value in values.items():
        if value is not None:
            setattr(options, name, value)
    rest = list(arguments[num_leading:])
    return rest[1:] if rest[:1] == ["--"] else rest


def _read_hosts(options: argparse.Namespace) -> Hosts:
    count = options.nnodes or 1
    if options.nnodes is not None and options.nnodes < 1:
        raise ValueError(f"--nnodes must be at least 1, got {options.nnodes}")
    if count > 1 and options.node_rank is None:
        raise ValueError(f"--nnodes {count} needs --node-rank: this host's number, from 0")
    alone = [f"--{name}" for name in ("address", "port") if count == 1 and getattr(options, name) is not None]
    if alone:
        raise ValueError(f"{' and '.join(alone)} mean something only with --nnodes: one host picks a free port itself")
    connection = {name: getattr(options, name) for name in ("address", "port", "timeout")}
    return Hosts(
        count, options.node_rank or 0, **{name: value for name, value in connection.items() if value is not None}
    )


def _num_gpus() -> int:
    import torch

    if not torch.cuda.device_count():
        raise ValueError("how many processes? There is no GPU here to count: --nproc N")
    return torch.cuda.device_count()
