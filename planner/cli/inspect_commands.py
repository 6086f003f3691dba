"""``planner report``, ``trace``, ``diff`` and ``why-not``: saved plans looked at, compared, and asked why."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models.text import printable, printable_lines
from planner.cli.audit_command import read_model
from planner.cli.shared_options import (
    add_model_of_plan_argument,
    add_plan_argument,
    count,
    price,
    read_choices,
    read_gib,
    refuse_over_plan,
    seconds,
    subparser,
)

if TYPE_CHECKING:
    from passes.plan import Plan


def add_report(commands: Any) -> None:
    """Add ``planner report``."""
    parser = subparser(
        commands,
        "report",
        help="write a saved plan as one HTML file with charts, to open offline",
        examples=[
            "planner report plan.json -o plan.html --price 2.5",
            "planner report plan.json -o plan.html --emit --robustness --compare megatron,fsdp",
            "planner report serving.json -o serving.html --price 2.5",
        ],
    )
    add_plan_argument(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE.html", help="where to write it")
    parser.add_argument("--price", type=price, help="what one device costs an hour: adds the cost per million tokens")
    parser.add_argument("--source", metavar="FILE.py", help="an emitted program to show beside the model")
    parser.add_argument("--emit", action="store_true", help="capture the model and show its programs beside it")
    parser.add_argument("--robustness", action="store_true", help="add what 'planner robustness' finds: takes minutes")
    parser.add_argument("--compare", metavar="NAME,…", help="add experts' layouts, named as for planner plan")
    add_model_of_plan_argument(parser)
    parser.set_defaults(command=_report)


def add_trace(commands: Any) -> None:
    """Add ``planner trace``."""
    parser = subparser(
        commands,
        "trace",
        help="write the simulated step of a saved plan for Perfetto (ui.perfetto.dev)",
        examples=["planner trace plan.json -o trace.json"],
    )
    add_plan_argument(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE.json", help="where to write it")
    parser.set_defaults(command=_trace)


def add_diff(commands: Any) -> None:
    """Add ``planner diff``."""
    parser = subparser(
        commands,
        "diff",
        help="print what differs between two saved plans",
        examples=["planner diff a.json b.json", "planner diff a.json b.json --all"],
    )
    parser.add_argument("first", help="a saved plan")
    parser.add_argument("second", help="another one")
    parser.add_argument("--all", action="store_true", help="every tensor and operator that differs")
    parser.set_defaults(command=_diff)


def add_why_not(commands: Any) -> None:
    """Add ``planner why-not``."""
    parser = subparser(
        commands,
        "why-not",
        help="search again under a wish or asked for something else, and print what it costs",
        examples=[
            "planner why-not plan.json --fix tp=4",
            "planner why-not plan.json --forbid recompute=full",
            "planner why-not plan.json --memory 60",
            "planner why-not plan.json --seq-len 16384 --global-batch 1024",
        ],
    )
    add_plan_argument(parser)
    parser.add_argument("--fix", action="append", default=[], metavar="NAME=VALUE,…", help="as for planner plan")
    parser.add_argument("--forbid", action="append", default=[], metavar="NAME=VALUE,…", help="as for planner plan")
    parser.add_argument("--memory", metavar="GIB", help="another bound on each device")
    parser.add_argument("--seq-len", type=count, metavar="N", help="samples of so many tokens")
    parser.add_argument("--global-batch", type=count, metavar="N", help="so many samples in a step")
    parser.add_argument("--cluster", help="another cluster: PRESET[:NODES] or a TOML file")
    add_model_of_plan_argument(parser)
    parser.add_argument("--time-limit", type=seconds, metavar="SECONDS", help="for the search, as of planner plan")
    parser.add_argument("--all", action="store_true", help="every tensor and operator that differs")
    parser.add_argument("-o", "--output", metavar="FILE", help="save the plan that meets the wish")
    parser.set_defaults(command=_why_not)


def add_explain(commands: Any) -> None:
    """Add ``planner explain``."""
    parser = subparser(
        commands,
        "explain",
        help="why operators are split as they are, and what else would cost",
        examples=[
            "planner explain plan.json model.layers.3.mlp.down_proj",
            "planner explain plan.json 'model.layers.*.mlp' --all",
            "planner explain serving.json lm_head",
        ],
    )
    add_plan_argument(parser)
    parser.add_argument("name", help="module, parameter, input, output or operator, or a pattern of them")
    add_model_of_plan_argument(parser)
    parser.add_argument("--all", action="store_true", help="search every alternative of every operator")
    parser.set_defaults(command=_explain)


def add_robustness(commands: Any) -> None:
    """Add ``planner robustness``."""
    parser = subparser(
        commands,
        "robustness",
        help="by which factor the cluster's figures must be wrong before another plan wins",
        examples=["planner robustness plan.json", "planner robustness plan.json --figure 'memory of *'"],
    )
    add_plan_argument(parser)
    add_model_of_plan_argument(parser)
    parser.add_argument(
        "--figure", action="append", metavar="NAME", help="look at this figure alone, or a pattern; may be repeated"
    )
    parser.add_argument(
        "--time-limit", type=seconds, metavar="SECONDS", help="for each of the searches, as of planner plan"
    )
    parser.set_defaults(command=_robustness)


def _report(options: argparse.Namespace) -> int:
    from cost_models.files import check_writable, read_text
    from passes.plan.serving import ServingPlan, read_any_plan

    path = check_writable(options.output)
    refuse_over_plan(options.output, options.plan)
    if options.emit and options.source is not None:
        raise ValueError("--emit shows the plan's own programs, --source another file: drop one of them")
    source = None if options.source is None else read_text(options.source, what="emitted program")
    plan = read_any_plan(options.plan)
    if isinstance(plan, ServingPlan):
        _refuse_additions(options)
        plan.report(path, device_hour_price=options.price)
    else:
        _report_of_step(plan, path, options, source)
    print(f"wrote {printable(str(path))}")
    return 0


def _report_of_step(plan: Plan, path: Path, options: argparse.Namespace, source: str | None) -> None:
    additions = {"source": source, **_additions(plan, options)}
    plan.report(path, device_hour_price=options.price, **additions)


def _refuse_additions(options: argparse.Namespace) -> None:
    """Raise ValueError for what the report of a plan of generating text does not show."""
    for name in ("source", "emit", "robustness", "compare"):
        if getattr(options, name):
            raise ValueError(f"--{name} is of plans of a training step, and this is one of generating text: drop it")


def _additions(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """What a report has besides for which the model is needed."""
    from planner.inspection.baseline_comparison import baseline_names, compare_saved
    from planner.inspection.emitted_source import emitted_sources
    from planner.inspection.robustness import robustness

    names = () if options.compare is None else baseline_names(options.compare)
    if not (options.emit or options.robustness or names):
        return {}
    model = read_model(options.model)
    additions: dict[str, Any] = {}
    if options.emit:
        additions["source"] = emitted_sources(plan, model)
    if options.robustness:
        additions["break_evens"] = robustness(plan, model=model)
    if names:
        additions["layouts"] = compare_saved(plan, names, model=model)
    return additions


def _trace(options: argparse.Namespace) -> int:
    from passes.plan import Plan
    from planner.inspection.step_trace import write_trace

    refuse_over_plan(options.output, options.plan)
    write_trace(Plan.load(options.plan), options.output)
    print(f"wrote {printable(options.output)}: open it at ui.perfetto.dev or chrome://tracing")
    return 0


def _diff(options: argparse.Namespace) -> int:
    from passes.plan.serving import read_any_plan
    from planner.inspection.serving_difference import difference_of

    changes = difference_of(read_any_plan(options.first), read_any_plan(options.second))
    print(printable_lines(changes.table(all_rows=options.all)))
    return 0


def _why_not(options: argparse.Namespace) -> int:
    from cost_models.files import check_writable
    from passes.plan import Plan
    from planner.inspection.why_not import why_not

    if options.output is not None:
        check_writable(options.output)
        refuse_over_plan(options.output, options.plan)
    answer = why_not(
        Plan.load(options.plan),
        fix=read_choices(options.fix, option="--fix"),
        forbid=read_choices(options.forbid, option="--forbid"),
        memory_limit=None if options.memory is None else read_gib(options.memory),
        seq_len=options.seq_len,
        global_batch=options.global_batch,
        cluster=options.cluster,
        model=read_model(options.model),
        time_limit=options.time_limit,
    )
    print(printable_lines(answer.table(all_rows=options.all)))
    if options.output is not None and answer.wished is not None:
        answer.wished.save(options.output)
        print(f"saved to {printable(options.output)}")
    return 0


def _explain(options: argparse.Namespace) -> int:
    from passes.plan.serving import read_any_plan

    plan = read_any_plan(options.plan)
    reasons = plan.explain(options.name, model=read_model(options.model), everything=options.all)
    print(printable_lines(reasons.table()))
    return 0


def _robustness(options: argparse.Namespace) -> int:
    from passes.plan import Plan
    from planner.inspection.robustness import robustness, robustness_table

    rows = robustness(
        Plan.load(options.plan),
        model=read_model(options.model),
        figures=options.figure or ("*",),
        time_limit=options.time_limit,
    )
    print(printable_lines(robustness_table(rows)))
    return 0
