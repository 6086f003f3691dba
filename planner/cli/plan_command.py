"""``planner plan``: decide a whole training step on a cluster, or (with ``--mesh``) the shardings on a given mesh."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cost_models.cluster_format import SLOWEST, UNEQUAL
from cost_models.files import check_writable
from cost_models.island_cluster import has_islands
from cost_models.text import printable, printable_lines
from planner.cli.freeze_command import add_cache_arguments, run_training_timeline
from planner.cli.island_command import run_island_plan
from planner.cli.option_scopes import (
    CACHING,
    ISLANDS,
    SERVING,
    TAKEN_BY_FREEZE,
    TAKEN_BY_ISLANDS,
    TAKEN_BY_SERVING,
    refuse_alone,
    refuse_beside,
)
from planner.cli.shared_options import (
    MESH_HELP,
    add_model_arguments,
    add_solver_argument,
    count,
    read_choices,
    read_gib,
    read_pins,
    seconds,
    subparser,
)
from planner.solvers.collection import no_collection

if TYPE_CHECKING:
    from cost_models import Cluster
    from passes.plan import Plan
    from planner.whole_step.candidates.user_layout import UserLayout

_EXAMPLES = (
    "planner plan llama-3.1-405b --cluster dgx-h100:2048 --seq-len 8192 --global-batch 2048 -o plan.json",
    "planner plan llama-3-70b --cluster dgx-h100:64 --seq-len 8192 --global-batch 1024 --fix tp=8 "
    "--forbid recompute=full",
    "planner plan llama-3-8b --cluster dgx-h100:16 --seq-len 8192 --global-batch 256 --objective devices "
    "--target-seconds 10",
    "planner plan llama-3-8b --cluster dgx-h100:32 --mesh dp=32,tp=8 --seq-len 4096 --global-batch 64 -o plan.json",
    "planner plan llama-3-8b --cluster dgx-h100:1 --serve --prompt-len 1024 --new-tokens 256 --batch 16 "
    "-o serving.json",
    "planner plan tiny-llama --mesh tp=4 --seq-len 64 --global-batch 8 --pin 'model.layers.*.mlp.*' tp 'S(0)'",
)


def add_plan(commands: Any) -> None:
    """Add the subcommand."""
    parser = subparser(
        commands, "plan", help="decide how a model is trained on a cluster, offline", examples=list(_EXAMPLES)
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--cluster",
        help="PRESET[:NODES], several with + between them, or a TOML file (default: this machine's processors)",
    )
    parser.add_argument(
        "--unequal",
        choices=UNEQUAL,
        help="what unequal devices are planned as: stages on different devices, their order being chosen (reorder) or "
        "as the cluster says (in-order), or all as the slowest (default: as the cluster file says, else reorder)",
    )
    parser.add_argument("--memory", metavar="GIB", help="bound on each device (default: its memory)")
    parser.add_argument(
        "--pin",
        nargs=3,
        action="append",
        default=[],
        metavar=("PATTERN", "AXIS", "TYPE"),
        help="fix the type of matching parameters or modules on an axis",
    )
    parser.add_argument(
        "--forbid",
        action="append",
        default=[],
        metavar="NAME=VALUE,…",
        help="values that a choice must not take (names as for --fix); with --mesh alone: a collective not to use",
    )
    parser.add_argument("--no-fuse", action="store_true", help="plan without fused operators")
    parser.add_argument(
        "--time-limit",
        type=seconds,
        metavar="SECONDS",
        help="for the search (default: it ends at the same point on every machine, see --max-programs, or after 600)",
    )
    parser.add_argument(
        "--max-programs",
        type=count,
        metavar="N",
        help="integer programs that the search of a whole step may solve, the same on every machine (default: 900 "
        "unless --time-limit is given, 400 for a model with experts)",
    )
    add_solver_argument(parser)
    parser.add_argument(
        "--write-lp",
        metavar="FILE.lp",
        help="write the program that the plan solves (of a whole step FILE.sharding.lp and FILE.stages.lp)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="save the plan as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="print all that was decided, not ten lines")
    parser.add_argument(
        "--compare",
        metavar="NAME,…",
        help="print experts' layouts beside the plan: megatron, fsdp, hsdp, deepspeed, ddp, redco, alpa, …, or all",
    )
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="'NAME=VALUE …'",
        help="print what you run today beside the plan: 'dp=8,tp=8,pp=16 v=2 zero=1 recompute=full mbs=1 sp=on'; names "
        "as for --fix; tp cuts layers as Megatron does; what is left open is decided in its favour",
    )
    parser.add_argument(
        "--for",
        dest="framework",
        metavar="FRAMEWORK",
        help="search only what it has settings for: torchtitan, megatron, accelerate-fsdp2, deepspeed, transformers-tp",
    )
    parser.add_argument(
        "--freeze",
        metavar="SCHEDULE.toml",
        help="plan a whole training whose first layers freeze on the way, and print when it replans",
    )
    add_cache_arguments(parser.add_argument_group("a cache of what frozen layers give (with --freeze)"))
    islands = parser.add_argument_group("islands with slow links between them (a cluster file with [[islands]])")
    islands.add_argument(
        "--loss-budget",
        type=float,
        metavar="SHARE",
        help="more perplexity than a synchronous run's that is accepted for islands that meet every H steps "
        "(default: 0.02); it says which H",
    )
    islands.add_argument("--inner-steps", type=count, metavar="H", help="H itself, in the place of --loss-budget")
    islands.add_argument("--wire-format", metavar="DTYPE", help="float32 (default), bfloat16, float16 or int8")
    islands.add_argument(
        "--synchronous-share",
        type=float,
        metavar="SHARE",
        help="of all steps, the first, in which islands exchange gradients (default: 0)",
    )
    parser.set_defaults(command=lambda options: run_plan(options, parser))
    _add_step_arguments(
        parser.add_argument_group("planning a whole step (without --mesh, or with --mesh and any of these)")
    )
    serving = parser.add_argument_group("generating text instead of training")
    serving.add_argument(
        "--serve",
        action="store_true",
        help="price prompts and tokens over a sharded cache (on --mesh; default: tp alone)",
    )
    serving.add_argument("--prompt-len", type=count, metavar="P", help="tokens of a prompt")
    serving.add_argument("--new-tokens", type=count, metavar="N", help="tokens of an answer")
    serving.add_argument("--batch", type=count, metavar="B", help="samples at once")
    mesh = parser.add_argument_group("a given mesh")
    mesh.add_argument("--mesh", metavar="AXIS=SIZE,…", help=f"do not choose the mesh: {MESH_HELP}")


def _add_step_arguments(group: Any) -> None:
    group.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="NAME=VALUE,…",
        help="values that a choice may take (pp=1,dp=4,8 fixes two): pp, dp, ep, cp, tp, micro_batch, "
        "num_microbatches, schedule, chunks_per_rank, recompute, zero, zero_ranks",
    )
    group.add_argument(
        "--headroom",
        type=float,
        metavar="SHARE",
        help="of each device's memory to leave to the allocator's fragmentation, communicators and CUDA graphs "
        "(default: 0.06; 0 fills it)",
    )
    group.add_argument("--devices", type=count, metavar="N", help="plan for N of the cluster's devices")
    group.add_argument(
        "--objective",
        default="time",
        metavar="WHAT",
        help="time (default), devices (fewest that reach --target-seconds), memory (least on a device) or plainest (of "
        "plans that predictions do not tell apart from the fastest)",
    )
    group.add_argument("--target-seconds", type=seconds, metavar="SECONDS", help="for --objective devices")
    group.add_argument("--alternatives", type=count, default=1, metavar="N", help="how many plans to find (default: 1)")
    group.add_argument("--optimizer", default="adamw", help="adamw (default), sgd, …")
    group.add_argument("--gradient-dtype", metavar="DTYPE", help="of summed gradients (default: float32 or wider)")
    group.add_argument(
        "--offload",
        default="never",
        metavar="WHAT",
        help="what is in the hosts' memory: nothing (never, the default), the optimizer's state (optimizer), "
        "activations of blocks for which it pays (activations), all, or auto (whichever is needed or pays)",
    )
    group.add_argument("--compiled", action="store_true", help="price fused kernels, as torch.compile makes them")
    group.add_argument(
        "--overlap-tensor",
        action="store_true",
        help="linear layers may gather or scatter the rows that tp cuts in pieces, beside their own arithmetic",
    )


@no_collection()
def run_plan(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Plan, save, print; returns the exit code. ``parser``: whose defaults tell which options are set."""
    from planner.cli.progress import progress_bar
    from planner.planning import plan

    # Invalid options are reported before anything slow is imported or captured.
    if options.output is not None:
        check_writable(options.output)
    if options.serve:
        refuse_beside(options, parser, TAKEN_BY_SERVING, beside="--serve")
        return _run_serving(options)
    refuse_alone(options, SERVING, without="is of generating text: add --serve")
    refuse_unused_length(options)
    if options.cluster is not None and has_islands(options.cluster):
        refuse_beside(options, parser, TAKEN_BY_ISLANDS, beside="a cluster of islands")
        return run_island_plan(options)
    refuse_alone(options, ISLANDS, without="is for islands: give --cluster a file with [[islands]] in it")
    if options.freeze is not None:
        refuse_beside(options, parser, TAKEN_BY_FREEZE, beside="--freeze, which plans several steps")
        return run_training_timeline(options, {**_common(options), **_where(options)})
    refuse_alone(options, CACHING, without="is of a training that freezes: give --freeze SCHEDULE.toml")
    names, layouts = _baselines(options), _user_layouts(options)
    request = {**_common(options), **_where(options)}
    with progress_bar() as progress:
        planned = plan(options.model, progress=progress, **request)
    if options.output is not None:
        planned.save(options.output)
    print(planned.summary() if options.verbose else planned.brief(), end="")
    if names or layouts:
        print(f"\n{printable_lines(_compared(planned, options, names, layouts))}")
    _print_where(options)
    return 0


def refuse_unused_length(options: argparse.Namespace) -> None:
    """Raise ValueError for a number of tokens if the model takes none."""
    if options.seq_len is None:
        return
    from planner.library.batch_sizes import takes_tokens

    if takes_tokens(options.model) is False:
        raise ValueError(f"--seq-len is of models whose samples are tokens, {options.model} takes images: drop it")


def _print_where(options: argparse.Namespace) -> None:
    """Say where the plan is, or what prints more of it."""
    if options.output is not None:
        more = "" if options.verbose else f": planner show {printable(options.output)} prints all of it"
        print(f"\nsaved to {printable(options.output)}{more}")
    elif not options.verbose:
        parts = "tensors" if options.serve else "stages, memory, tensors"
        print(f"\n--verbose prints all of it: {parts}, collectives, the bound")


def _run_serving(options: argparse.Namespace) -> int:
    """Plan generation, save, print what it costs; returns the exit code."""
    from planner.serving_plan import plan_serving

    sizes = {"prompt_len": options.prompt_len, "new_tokens": options.new_tokens, "batch": options.batch}
    missing = [f"--{name.replace('_', '-')}" for name, value in sizes.items() if value is None]
    if missing:
        raise ValueError(f"--serve needs {', '.join(missing)}")
    if options.unequal not in (None, SLOWEST):
        raise ValueError(f"--unequal {options.unequal} does not go with --serve: it counts all devices as the slowest")
    planned = plan_serving(options.model, options.cluster, mesh=options.mesh, dtype=options.dtype, **sizes)
    if options.output is not None:
        planned.save(options.output)
    print(planned.summary() if options.verbose else planned.brief(), end="")
    _print_where(options)
    return 0


def _user_layouts(options: argparse.Namespace) -> tuple[UserLayout, ...]:
    """The layouts in ``--layout``."""
    if not options.layout:
        return ()
    from planner.whole_step.candidates.user_layout import read_layout

    if options.mesh is not None:
        raise ValueError("--layout goes with plans of whole steps, whose mesh is chosen: drop --mesh")
    return tuple(map(read_layout, options.layout))


def _baselines(options: argparse.Namespace) -> tuple[str, ...]:
    """The names in ``--compare``."""
    if options.compare is None:
        return ()
    from planner.inspection.baseline_comparison import baseline_names

    if options.mesh is not None:
        raise ValueError("--compare goes with plans of whole steps, whose mesh is chosen: drop --mesh")
    return baseline_names(options.compare)


def _compared(plan: Plan, options: argparse.Namespace, names: tuple[str, ...], layouts: tuple[UserLayout, ...]) -> str:
    """The table of other layouts beside ``plan``."""
    from planner.inspection.baseline_comparison import compare, comparison_table, needs_config
    from planner.library import load_config
    from planner.planning import graph_to_plan

    config = load_config(options.model) if needs_config(names) else None
    with graph_to_plan(
        options.model,
        fuse=not options.no_fuse,
        batch_size=options.global_batch,
        seq_len=options.seq_len,
        dtype=options.dtype,
    ) as planned:
        return comparison_table(plan, compare(plan, planned.graph, names, layouts=layouts, config=config))


def _common(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "global_batch": options.global_batch,
        "seq_len": options.seq_len,
        "dtype": options.dtype,
        "constraints": read_pins(options.pin),
        "time_limit": options.time_limit,
        "max_programs": options.max_programs,
        "fuse": not options.no_fuse,
        "solver": options.solver,
        "write_lp": options.write_lp,
        "framework": options.framework,
        **_step_options(options),
    }


def _step_options(options: argparse.Namespace) -> dict[str, Any]:
    """Options of a whole step; with a mesh, any that is set asks for one."""
    return {
        "fix": read_choices(options.fix, option="--fix"),
        "headroom": options.headroom,
        "num_devices": options.devices,
        "objective": options.objective,
        "target_seconds": options.target_seconds,
        "num_alternatives": options.alternatives,
        "optimizer": options.optimizer,
        "gradient_dtype": options.gradient_dtype,
        "compiled": options.compiled,
        "overlap_tensor": options.overlap_tensor,
        "offload": options.offload,
    }


def _where(options: argparse.Namespace) -> dict[str, Any]:
    """Cluster, mesh, memory, and what is forbidden: choices of a whole step, or collectives on a given mesh."""
    from planner.planning import as_cluster, as_mesh_shape
    from planner.whole_step.candidates.demands import asks_for_step, said

    shape = None if options.mesh is None else as_mesh_shape(options.mesh)
    num_devices = (options.devices or 1) if shape is None else shape.num_devices
    cluster = as_cluster(options.cluster, num_devices=num_devices)
    if options.unequal is not None:
        cluster = replace(cluster, unequal=options.unequal)
    where = {"cluster": cluster, "mesh": shape}
    forbids_choice = any("=" in text for text in options.forbid)
    if shape is None or forbids_choice or asks_for_step(shape.names, said(_step_options(options))):
        return {**where, **_of_step(options, cluster)}
    return {**where, "memory_limit": _memory(options, cluster), "forbid_collectives": tuple(options.forbid)}


def _memory(options: argparse.Namespace, cluster: Cluster) -> float | None:
    """The memory bound on a given mesh, where no other option keeps a plan within its devices."""
    from cost_models.memory import HEADROOM
    from planner.whole_step.candidates.demands import refuse_beyond_devices

    if options.memory is None:
        return cluster.device.usable_bytes * (1.0 - HEADROOM)
    if options.memory == "none":
        return None
    limit = read_gib(options.memory, expected="a positive number of GiB or 'none'")
    refuse_beyond_devices(limit, cluster, instead="--memory none plans without a bound")
    return limit


def _of_step(options: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    for text in options.forbid:
        if "=" not in text:
            raise ValueError(
                f"--forbid takes NAME=VALUE[,VALUE…] (recompute=full), got {text!r}; a collective can be forbidden "
                "with --mesh alone"
            )
    from planner.whole_step.candidates.demands import refuse_beyond_devices

    if options.memory == "none":
        raise ValueError("--memory none goes with --mesh alone: a step has to fit in the devices' memory")
    limit = None if options.memory is None else read_gib(options.memory)
    if limit is not None:
        refuse_beyond_devices(limit, cluster, instead="leave --memory out, or give a cluster whose devices have more")
    return {"memory_limit": limit, "forbid": read_choices(options.forbid, option="--forbid")}
