"""Options that the subcommands of ``planner`` share, and readers of option values."""

from __future__ import annotations

import argparse
import os
import re
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from cost_models.text import printable

FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")
MESH_HELP = "mesh axes, outermost first: dp=32,tp=8"


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {printable(' '.join(message.split()))} ({self.prog} --help says more)\n")


def count(text: str) -> int:
    """A whole number of at least 1, for ``type=``."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 10^18 - 1, got {text[:40]!r}")
    return int(text)


def float_dtype(text: str) -> str:
    """A floating-point dtype of parameters, for ``type=``."""
    if text not in FLOAT_DTYPES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(FLOAT_DTYPES)}, got {text[:40]!r}")
    return text


def seconds(text: str) -> float:
    """A positive, finite number, for ``type=``."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text[:40]!r}")
    return number


def price(text: str) -> float:
    """A finite number of at least 0, for ``type=``."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a price of at least 0, got {text[:40]!r}")
    return number


def subparser(commands: Any, name: str, *, help: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of one subcommand, with examples below its options."""
    epilog = "examples:\n" + "\n".join(_example(example) for example in examples)
    return commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(help, 78),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _example(text: str) -> str:
    """A command in lines of a terminal's width, as a shell takes it."""
    lines = textwrap.wrap(text, 70, break_on_hyphens=False, break_long_words=False)
    return "  " + " \\\n      ".join(lines)


def add_model_arguments(
    parser: argparse.ArgumentParser, *, batch_size: int | None = None, seq_len: int | None = None
) -> None:
    """Add the options for the model and its batch."""
    parser.add_argument("model", help="a name from the config library, or the path of a Hugging Face config")
    parser.add_argument("--seq-len", type=count, default=seq_len, help="tokens in a sample")
    parser.add_argument("--global-batch", type=count, default=batch_size, help="samples in a step, over all devices")
    parser.add_argument("--dtype", type=float_dtype, help="parameter dtype (plan: bfloat16; verify: float64)")


def add_plan_argument(parser: argparse.ArgumentParser) -> None:
    """Add the plan that a command looks at."""
    parser.add_argument("plan", help="a plan saved by 'planner plan -o' or Plan.save")


def refuse_over_plan(output: str, plan: str) -> None:
    """Raise ValueError for an output that would be written in the place of the plan that is read."""
    if os.path.realpath(output) == os.path.realpath(plan):
        raise ValueError(f"--output {printable(output)} is the plan that is read: give another file")


def add_model_of_plan_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option for the model that a saved plan is of."""
    parser.add_argument("--model", help="what the plan is of, unless it says so itself; as for planner audit")


def add_solver_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option for the solver of the integer programs."""
    parser.add_argument(
        "--solver", metavar="NAME", help="HiGHS (default), or any other that PuLP can call here: CBC, GUROBI, …"
    )


def read_choices(texts: Sequence[str], *, option: str) -> dict[str, list[int | str]]:
    """``["tp=4,8", "pp=1,dp=2"]`` as ``{"tp": [4, 8], "pp": [1], "dp": [2]}``; the same name twice adds values.

    Raises:
        ValueError: if a text is not ``NAME=VALUE[,VALUE…]``, or several of them with commas between.
    """
    choices: dict[str, list[int | str]] = {}
    for text in texts:
        name = ""
        for part in text.split(","):
            before, equals, value = part.partition("=")
            name, value = (before.strip(), value.strip()) if equals else (name, part.strip())
            if not name or not value:
                raise ValueError(f"{option} takes NAME=VALUE[,VALUE…] (tp=8, schedule=1f1b,zbv), got {text!r}")
            choices.setdefault(name, []).append(int(value) if re.fullmatch(r"[0-9]{1,18}", value) else value)
    return choices


def read_gib(text: str, *, option: str = "--memory", expected: str = "a positive number of GiB") -> float:
    """A positive number of GiB (``60``, ``0.5GiB``), in bytes.

    Args:
        option: whose value it is; ``expected``: what that takes.

    Raises:
        ValueError: if it is not one.
    """
    try:
        gib = float(text.removesuffix("GiB"))
    except ValueError:
        gib = -1.0
    if not 0 < gib < float("inf"):
        raise ValueError(f"{option} takes {expected}, got {text!r}")
    return gib * 2**30


def read_pins(pins: Sequence[Sequence[str]]) -> dict[str, dict[str, str]]:
    """(pattern, axis, type) triples as ``planner.plan(constraints=…)`` takes them.

    Raises:
        ValueError: if one pattern has two types on one axis.
    """
    constraints: dict[str, dict[str, str]] = {}
    for pattern, axis, spmd_type in pins:
        before = constraints.setdefault(pattern, {}).setdefault(axis, spmd_type)
        if before != spmd_type:
            raise ValueError(f"--pin {pattern} has {before} and {spmd_type} on {axis}: drop one of them")
    return constraints
