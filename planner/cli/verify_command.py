"""``planner verify``: every rank of a plan in this process, against one device."""

from __future__ import annotations

import argparse
from typing import Any

from cost_models.text import printable_lines
from planner.cli.shared_options import (
    MESH_HELP,
    add_solver_argument,
    count,
    float_dtype,
    read_choices,
    read_pins,
    subparser,
)

#: Samples and tokens of the batch where neither the user nor a plan says.
BATCH_SIZE, SEQ_LEN = 8, 16


def add_verify(commands: Any) -> None:
    """Add the subcommand."""
    parser = subparser(
        commands,
        "verify",
        help="run every rank of a plan in this process and compare with one device",
        examples=[
            "planner verify tiny-llama --mesh dp=2,tp=2",
            "planner verify plan.json",
            "planner verify tiny-t5 --plan plan.json --global-batch 16",
            "planner verify tiny-llama --cluster dgx-h100:1 --fix pp=2 --fix zero=1",
            "planner verify tiny-llama --mesh tp=2 --pin 'model.layers.*.mlp.*' tp 'S(0)'",
        ],
    )
    parser.add_argument("model", help="a config of the library, the path of one, or a saved plan of one of the library")
    parser.add_argument("--plan", metavar="FILE", help="a saved plan to verify (then there is nothing to plan)")
    parser.add_argument("--mesh", metavar="AXIS=SIZE,…", help=f"{MESH_HELP}; or a saved plan")
    parser.add_argument("--cluster", help="PRESET[:NODES] or a TOML file; without --mesh a whole step is planned")
    parser.add_argument("--fix", action="append", default=[], metavar="NAME=VALUE,…", help="as for planner plan")
    parser.add_argument("--forbid", action="append", default=[], metavar="NAME=VALUE,…", help="as for planner plan")
    parser.add_argument(
        "--pin",
        nargs=3,
        action="append",
        default=[],
        metavar=("PATTERN", "AXIS", "TYPE"),
        help="as for planner plan",
    )
    parser.add_argument("--global-batch", type=count, help="samples in a step (default: the plan's, or 8)")
    parser.add_argument("--seq-len", type=count, help="tokens in a sample (default: the plan's, or 16)")
    parser.add_argument("--dtype", type=float_dtype, help="of parameters (default: float64)")
    parser.add_argument("--steps", type=count, default=3, help="optimizer steps to compare (default: 3)")
    add_solver_argument(parser)
    parser.set_defaults(command=run_verify)


def run_verify(options: argparse.Namespace) -> int:
    """Verify and print the table; returns 1 if numbers differ."""
    # Invalid options are reported before torch is imported or a model is built.
    plan = _saved_plan(options)
    choices = {
        "fix": read_choices(options.fix, option="--fix"),
        "forbid": read_choices(options.forbid, option="--forbid"),
        "constraints": read_pins(options.pin),
        "solver": options.solver,
    }
    asked = {name: value for name, value in choices.items() if value}
    if plan is not None:
        refused = [f"--{name.replace('constraints', 'pin')}" for name in asked]
        refused += ["--cluster"] if options.cluster else []
        if refused:
            raise ValueError(f"{refused[0]} asks for another plan, but a saved one is verified as it is: drop it")
    where = _checked(options, plan, asked)
    from passes.plan.step_summary import seq_len_of
    from planner import verify

    report = verify(
        options.model if plan is None or options.model != _plan_path(options) else _model_of(plan),
        where,
        cluster=options.cluster,
        batch_size=options.global_batch or (BATCH_SIZE if plan is None else plan.step.global_batch),
        seq_len=options.seq_len or (plan and seq_len_of(plan)) or SEQ_LEN,
        dtype=options.dtype,
        steps=options.steps,
        **asked,
    )
    print(printable_lines(report.table()))
    return 0 if report.ok else 1


def _plan_path(options: argparse.Namespace) -> str | None:
    """The path of the saved plan: of ``--plan``, of ``--mesh``, or in the place of the model."""
    if options.plan is not None:
        return str(options.plan)
    if options.mesh is not None and options.mesh.endswith(".json"):
        return str(options.mesh)
    alone = options.mesh is None and options.cluster is None and options.model.endswith(".json")
    return str(options.model) if alone else None


def _saved_plan(options: argparse.Namespace) -> Any:
    from passes.plan import Plan

    path = _plan_path(options)
    if path is not None and options.plan is not None and options.mesh is not None:
        raise ValueError("--plan and --mesh both say what to verify: drop one of them")
    return None if path is None else Plan.load(path)


def _checked(options: argparse.Namespace, plan: Any, asked: dict[str, Any]) -> Any:
    """What to verify on: a plan, a mesh, or None for the cluster.

    Raises:
        ValueError: for options that cannot be read, or where none says it.
    """
    from planner.planning import as_cluster, as_mesh_shape
    from planner.whole_step.candidates.demands import read_demands

    read_demands(asked.get("fix"), asked.get("forbid"))
    if plan is not None:
        from planner.verification.verify_model import dtype_to_compare_in

        dtype_to_compare_in(plan)
        return plan
    if options.mesh is None and options.cluster is None:
        raise ValueError("verify needs to know on what: --mesh dp=2,tp=2, --cluster dgx-h100:1, or a saved plan")
    shape = None if options.mesh is None else as_mesh_shape(options.mesh)
    if options.cluster is not None:
        as_cluster(options.cluster, num_devices=1 if shape is None else shape.num_devices)
    return shape


def _model_of(plan: Any) -> str:
    from planner.inspection.plan_graph import library_model

    return library_model(plan)
