"""``planner audit``: recompute what a saved plan claims."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cost_models.text import printable_lines
from planner.cli.shared_options import add_plan_argument, seconds, subparser


def add_audit(commands: Any) -> None:
    """Add the subcommand."""
    parser = subparser(
        commands,
        "audit",
        help="recompute every figure of a saved plan from its model and cluster",
        examples=[
            "planner audit plan.json",
            "planner audit plan.json --model ./my-model/config.json --no-bound",
            "planner audit plan.json --model my_model.py:build --loss-fn my_model.py:loss",
        ],
    )
    add_plan_argument(parser)
    parser.add_argument(
        "--model",
        help="what the plan is of, unless it says so itself: a library name, the path of a Hugging Face config, or "
        "MODULE:FUNCTION or FILE.py:FUNCTION that returns the module",
    )
    parser.add_argument("--loss-fn", metavar="MODULE:FUNCTION", help="for a model that does not compute its own loss")
    parser.add_argument("--cluster", help="PRESET[:NODES] or a TOML file to price on (default: the plan's)")
    parser.add_argument("--no-bound", action="store_true", help="do not search again for the lower bound")
    parser.add_argument("--time-limit", type=seconds, metavar="SECONDS", help="for that search, as of planner plan")
    parser.set_defaults(command=run_audit)


def run_audit(options: argparse.Namespace) -> int:
    """Audit and print the table; returns 1 if a figure is wrong."""
    from passes.plan import Plan
    from planner.auditing.audit import audit

    plan = Plan.load(options.plan)
    report = audit(
        plan,
        read_model(options.model),
        loss_fn=None if options.loss_fn is None else imported(options.loss_fn, option="--loss-fn"),
        cluster=options.cluster,
        prove_bound=not options.no_bound,
        time_limit=options.time_limit,
    )
    print(printable_lines(report.table()))
    return 0 if report.ok else 1


def read_model(text: str | None) -> Any:
    """What ``--model`` names: a module where it is a function's name, else the text itself.

    Raises:
        ValueError: for a function that cannot be called without arguments, or returns no module.
    """
    if text is None or ":" not in text or Path(text).exists():
        return text
    make = imported(text, option="--model")
    import torch

    expected = "expected a function without arguments that returns the module"
    try:
        model = make()
    except Exception as error:  # it is the user's
        raise ValueError(f"--model: {text} raised {type(error).__name__}: {error}; {expected}") from error
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"--model: {text} returned a {type(model).__name__}; {expected}")
    return model


def imported(text: str, *, option: str) -> Callable[..., Any]:
    """The function that ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION`` names.

    Raises:
        ValueError: if there is no such module, file or function.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ValueError(f"{option} takes MODULE:FUNCTION or FILE.py:FUNCTION, got {text!r}")
    function = getattr(_module(place, option), name, None)
    if not callable(function):
        raise ValueError(f"{option}: {place} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _module(place: str, option: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(f"{option}: cannot import {place!r}: {error}") from error
        finally:
            sys.path.pop(0)
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"{option}: there is no file {place!r}")
    name = f"_audited_{path.stem}"
    if name not in sys.modules:  # the model and its loss may be in one file
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
