"""Plan offline: from a model or a config to a Plan, with no process group and no parameter in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models import Cluster, CostModel
from cost_models.files import check_writable
from cost_models.memory import HEADROOM
from passes.ir.types import MeshShape
from passes.plan import FusionPlan, Plan
from planner.checkpointed_models import refuse_checkpoints
from planner.extensions import load_extensions
from planner.solvers.collection import no_collection

if TYPE_CHECKING:
    import torch

    from passes.capture.call_arguments import ExampleInputs
    from passes.ir.graph import Graph
    from planner.graph_cache.planned_graph import PlannedGraph
    from planner.whole_step.result.search_progress import Progress


@no_collection()
def plan(
    model: Any,
    cluster: Cluster | str | None = None,
    *,
    mesh: MeshShape | Mapping[str, int] | str | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    example_inputs: ExampleInputs | None = None,
    loss_fn: Callable[..., Any] | None = None,
    dtype: str | None = None,
    training: bool | None = None,
    memory_limit: float | None = None,
    constraints: Mapping[str, Mapping[str, Any]] | None = None,
    forbid_collectives: Sequence[str] = (),
    time_limit: float | None = None,
    max_programs: float | None = None,
    global_batch: int | None = None,
    fix: Mapping[str, Any] | None = None,
    forbid: Mapping[str, Any] | None = None,
    headroom: float | None = None,
    num_devices: int | None = None,
    objective: str = "time",
    target_seconds: float | None = None,
    num_alternatives: int = 1,
    optimizer: str = "adamw",
    gradient_dtype: str | None = None,
    compiled: bool = False,
    overlap_tensor: bool = False,
    offload: str = "never",
    fuse: bool = True,
    solver: str | None = None,
    write_lp: str | Path | None = None,
    framework: str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Decide how a training step of ``model`` runs on ``cluster``.

    Without ``mesh`` everything is decided: how many ways of data, tensor, context and pipeline parallelism and on which
    links, micro-batches and schedule, where the pipeline is cut, and for every layer how it is sharded, what is
    recomputed, and its ZeRO stage. With ``mesh``, only how every operator and parameter is split over its axes; with
    ``mesh`` and a pipeline axis or any option of whole steps (``fix``, ``headroom``, …), the rest of a step on it.

    Args:
        model: an ``nn.Module`` (meta tensors will do), a Hugging Face config, the path of a config, or a name from
            the config library (``"llama-3-8b"``).
        cluster: the hardware, or its short form (``"dgx-h100:32"``); None for this machine's processors.
        mesh: axis sizes, outermost first: ``{"dp": 32, "tp": 8}`` or ``"dp=32,tp=8"``.
        batch_size, global_batch: samples in a step, over all devices (two names of one thing).
        seq_len: tokens in a sample of a Hugging Face model (images: not used).
        example_inputs: for any other model, its keyword arguments (a mapping), positional ones (a tuple), or both
            (``planner.CallArguments``).
        loss_fn: ``loss_fn(outputs, batch) -> scalar`` for a model that does not compute its own loss.
        dtype: parameter dtype of a model built from a config (default: bfloat16).
        training: plan a training step (default: when there is a loss) or inference.
        memory_limit: bytes that a device may hold; None for what it has (with ``mesh``: no bound).
        constraints: pins by glob on names, ``{"model.layers.*.mlp.*": {"tp": "S(0)"}}``.
        forbid_collectives: with ``mesh``: collectives that the plan must not use (``("all_gather",)``).
        time_limit: seconds for the search; on reaching it the best plan so far is returned with its gap. None: what
            ends it is the same on every machine (``max_programs``; with ``mesh`` an effort of the solver, of about 90
            s), and the clock only after 600.
        max_programs: how many integer programs the search of a whole step may solve, in all about as long as so many
            tenths of seconds; on reaching it the best plan so far is returned with its gap, the same on every machine.
            None: 900 unless there is a ``time_limit``, but 400 for a model with experts.
        fix, forbid: values that a choice may, or may not, take: ``{"tp": 8, "schedule": ["1f1b", "gpipe"]}``. There are
            ``pp``, ``dp``, ``cp``, ``tp`` (the axes that a mesh beside them may have), ``micro_batch`` (samples on a
            device at a time), ``num_microbatches``, ``schedule``, ``chunks_per_rank``, ``recompute``, ``zero``,
            ``zero_ranks`` (over how many neighbours of the data ranks ZeRO divides; 0: over all). A unit that has none
            of the recompute policies allowed takes ``"none"``; ``"chunked_loss"`` is of the unit that computes the
            loss, so that ``{"recompute": ["full", "chunked_loss"]}`` is full elsewhere and the better of both there. A
            model with ``torch.utils.checkpoint`` inside is planned with ``{"recompute": "full"}`` unless this names
            ``recompute``.
        headroom: share of each device's memory to leave to what a plan does not count (the allocator's fragmentation,
            communicators, CUDA graphs); None: 6%, see ``cost_models.memory.HEADROOM``.
        num_devices: plan for so many of the cluster's devices.
        objective: ``"time"``, ``"devices"`` (fewest that reach ``target_seconds``), ``"memory"`` (least on a device) or
            ``"plainest"`` (fewest axes and plainest schedule of plans that predictions do not tell apart from the
            fastest).
        num_alternatives: how many plans to prove the best; the others are in ``plan.step.alternatives``, where the best
            of those that were solved on the way are in any case.
        optimizer, gradient_dtype: how parameters are trained; gradients default to float32 or wider.
        compiled: price elementwise chains as the fused kernels that ``torch.compile`` makes.
        overlap_tensor: linear layers may gather or scatter the rows that the tensor axis cuts in pieces, beside their
            own arithmetic (those of one input together, once), where that is better (priced with ``overlap_slowdown``;
            not measured on GPUs yet).
        offload: ``"optimizer"``: optimizer state is in the hosts' memory, and the optimizer runs there
            (``planner.OffloadedOptimizer``); ``"activations"``: blocks may keep what their backward pass needs there,
            where that is better (recompute policy ``"offload"``); ``"all"``: both; ``"auto"``: whichever of these, or
            nothing, is better; ``"never"``. The cluster has to have a ``[host]``.
        fuse: plan and run the fused operators of ``runtime.kernels`` wherever a pattern of them is found.
        solver: who solves the integer programs: ``"HiGHS"`` (None), or any other that PuLP can call on this machine
            (``"CBC"``, ``"GUROBI"``, …). PuLP passes on no bound of theirs: with those the plan's bound rests on linear
            relaxations, which HiGHS solves.
        write_lp: an LP file to write the plan's program to, in microseconds; of a whole step ``plan.lp`` stands for
            ``plan.sharding.lp`` and ``plan.stages.lp``, and ``plan.context.lp`` where that axis was searched by itself.
        framework: search only layouts that another framework has settings for: ``"torchtitan"``, ``"megatron"``,
            ``"accelerate-fsdp2"``, ``"deepspeed"`` or ``"transformers-tp"`` (see ``Plan.export``).
        progress: called with a ``planner.whole_step.result.search_progress.Report`` at every phase and now and then
            while searching.

    Raises:
        ValueError: for input that does not fit together, and when no plan satisfies the constraints.
        CaptureError: when the model cannot be captured.
    """
    from planner.sharding_ilp.pins import check_pins
    from planner.solvers.pulp_solver import solver_named
    from planner.whole_step.candidates.demands import (
        asks_for_step,
        check_count,
        fixed_axes,
        read_demands,
        said,
    )
    from planner.whole_step.candidates.mesh_layout import TENSOR_AXES
    from planner.whole_step.candidates.training_options import TrainingOptions
    from planner.whole_step.plan_step import check_objective, plan_step

    of_step = said(locals())
    check_objective(objective, target_seconds)
    if framework is not None:
        _check_framework(framework, locals())
    for name, value in {
        "batch_size": batch_size, "global_batch": global_batch, "seq_len": seq_len, "num_devices": num_devices
    }.items():  # fmt: skip
        if value is not None:
            check_count(name, value)
    load_extensions()
    shape = None if mesh is None else as_mesh_shape(mesh)
    needed = num_devices if shape is None else shape.num_devices
    hardware = as_cluster(cluster, num_devices=needed or 1)
    if shape is not None and asks_for_step(shape.names, of_step):
        if num_devices not in (None, shape.num_devices):
            raise ValueError(
                f"num_devices is {num_devices}, but mesh {shape} has {shape.num_devices}: drop one of them"
            )
        fix, shape = fixed_axes(shape.as_dict(), fix), None
    if constraints is not None:
        axes = TENSOR_AXES if shape is None else shape.names
        what = f"a step, whose tensors lie on {', '.join(axes)}" if shape is None else f"mesh {shape}"
        check_pins(constraints, axes, what=what)
    if shape is None and forbid_collectives:
        raise ValueError(
            "forbid_collectives means something only if a mesh is given and no option of whole steps: drop one of them"
        )
    if shape is not None and max_programs is not None:
        raise ValueError("max_programs is of plans of whole steps; on a mesh alone there is time_limit: drop it")
    if shape is None and needed is not None:
        hardware = hardware.subset(needed)
    if shape is not None:
        CostModel(hardware, shape.as_dict())  # a mesh of another size is refused before the model is captured
    demands = read_demands(
        fix,
        forbid,
        headroom=HEADROOM if headroom is None else headroom,
        memory_limit=memory_limit,
        training=TrainingOptions(optimizer, gradient_dtype),
        compiled=compiled,
        overlap_tensor=overlap_tensor,
        num_alternatives=num_alternatives,
        time_limit=time_limit,
        max_programs=max_programs,
        solver=solver_named(solver),
        offload=offload,
    )
    if write_lp is not None:
        check_writable(write_lp)
    with graph_to_plan(
        model,
        fuse=fuse,
        batch_size=_one_of(batch_size, global_batch),
        seq_len=seq_len,
        example_inputs=example_inputs,
        loss_fn=loss_fn,
        dtype=dtype,
        training=training,
        progress=progress,
    ) as planned:
        if shape is not None:
            refuse_checkpoints(planned.graph)
            decided = plan_graph(
                planned.graph,
                hardware,
                mesh=shape,
                memory_limit=memory_limit,
                constraints=constraints,
                forbid_collectives=forbid_collectives,
                time_limit=time_limit,
                solver=solver,
                write_lp=write_lp,
            )
        elif framework is not None:
            from planner.exports.export_plan import framework_named
            from planner.exports.framework_search import plan_for

            decided = plan_for(
                framework_named(framework),
                planned.graph,
                hardware,
                demands,
                config=config_of(model),
                config_name=config_name_of(model),
                progress=progress,
            )
        else:
            if planned.graph.checkpointed and not {"recompute"} & (demands.fixed.keys() | demands.forbidden.keys()):
                demands = dataclasses.replace(demands, fixed={**demands.fixed, "recompute": frozenset({"full"})})
            decided = plan_step(
                planned.graph,
                hardware,
                demands,
                pins=constraints,
                objective=objective,
                target_seconds=target_seconds,
                progress=progress,
                write_lp=write_lp,
                spaces=planned.spaces,
            )
    return dataclasses.replace(decided, fusion=planned.fusion, config_name=config_name_of(model))


def graph_to_plan(
    model: Any,
    *,
    fuse: bool = True,
    batch_size: int | None = None,
    seq_len: int | None = None,
    example_inputs: ExampleInputs | None = None,
    loss_fn: Callable[..., Any] | None = None,
    dtype: str | None = None,
    training: bool | None = None,
    progress: Progress | None = None,
) -> AbstractContextManager[PlannedGraph]:
    """The graph that ``plan`` plans for these arguments, kept or captured, to plan on inside of a ``with`` block."""
    from planner.graph_cache.planned_graph import PlannedGraph, planned_graph
    from planner.library.batch_sizes import check_batch_sizes

    if example_inputs is None and isinstance(model, (str, Path)):
        check_batch_sizes(model, batch_size=batch_size, seq_len=seq_len)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "seq_len": seq_len,
        "example_inputs": example_inputs,
        "loss_fn": loss_fn,
        "dtype": "bfloat16" if dtype is None and isinstance(model, (str, Path)) else dtype,
        "training": training,
    }

    def captured() -> PlannedGraph:
        graph = capture_for_planning(model, progress=progress, **options)
        return PlannedGraph(*_fused(graph)) if fuse else PlannedGraph(graph, None)

    return planned_graph(model, captured, fuse=fuse, **options)


def _check_framework(framework: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown framework, or an option that a search for one does not take."""
    from planner.exports.export_plan import framework_named
    from planner.exports.framework_search import options_not_taken

    framework_named(framework)
    for name in options_not_taken(options):
        raise ValueError(f"{name} does not go with framework={framework!r}, whose layouts are searched whole: drop one")


def config_of(model: Any) -> Any:
    """The transformers config of a model, None if it has none."""
    if isinstance(model, (str, Path)):
        from planner.library import load_config

        return load_config(model)
    return getattr(model, "config", None)


def config_name_of(model: Any) -> str:
    """``model`` if it is a name in the config library, else an empty string."""
    if not isinstance(model, str):
        return ""
    from planner.library.configs import config_names

    return model if model in config_names() else ""


def _fused(graph: Graph) -> tuple[Graph, FusionPlan]:
    from planner.fusing import fused_for_planning

    return fused_for_planning(graph)


def _one_of(batch_size: int | None, global_batch: int | None) -> int | None:
    if batch_size is not None and global_batch is not None and batch_size != global_batch:
        raise ValueError(
            f"batch_size {batch_size} and global_batch {global_batch} are the same thing: give one of them"
        )
    return batch_size if batch_size is not None else global_batch


def plan_graph(graph: Graph, cluster: Cluster, *, mesh: MeshShape, fuse: bool = False, **options: Any) -> Plan:
    """Plan a captured graph; ``options`` are those of ``planner.sharding_ilp.search``.

    With ``fuse`` the plan is of the fused graph, as ``Plan.fusion`` then says.
    """
    from planner.sharding_ilp import search
    from planner.whole_step.result.step_collectives import step_collectives

    graph, fusion = _fused(graph) if fuse else (graph, None)
    cost_model = CostModel(cluster, mesh.as_dict())
    sharding = search(graph, mesh=mesh, cost_model=cost_model, cluster_info=cluster.to_dict(), **options)
    return dataclasses.replace(sharding, fusion=fusion, collectives=step_collectives(graph, sharding))


def as_mesh_shape(mesh: MeshShape | Mapping[str, int] | str) -> MeshShape:
    """Any of the ways to write a mesh."""
    if isinstance(mesh, MeshShape):
        return mesh
    if isinstance(mesh, Mapping):
        return MeshShape.from_dict(mesh)
    if isinstance(mesh, str):
        return MeshShape.parse(mesh)
    raise ValueError(f'mesh must be axis sizes such as \'dp=2,tp=4\' or {{"dp": 2, "tp": 4}}, got {mesh!r}')


def as_cluster(cluster: Cluster | str | None, *, num_devices: int) -> Cluster:
    """A cluster given as such, by its short form, by a TOML file, or (None) this machine with ``num_devices``."""
    if cluster is None:
        return Cluster.parse(f"cpu-local:{num_devices}")
    if isinstance(cluster, str):
        return Cluster.from_toml(cluster) if cluster.endswith(".toml") else Cluster.parse(cluster)
    if not isinstance(cluster, Cluster):
        raise ValueError(f"cluster must be a Cluster, 'dgx-h100:2' or a .toml file, got {cluster!r}")
    return cluster


def capture_for_planning(
    model: Any,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    example_inputs: ExampleInputs | None = None,
    loss_fn: Callable[..., Any] | None = None,
    dtype: str | None = None,
    training: bool | None = None,
    progress: Progress | None = None,
) -> Graph:
    """Capture a model however it is given; see ``plan`` for the arguments."""
    from planner.whole_step.result.search_progress import CAPTURING, READING, Report

    tell = progress or (lambda _: None)
    tell(Report(READING))
    import torch

    from passes.capture import capture
    from passes.capture.call_arguments import arguments_of
    from passes.ir.errors import MissingValues
    from planner.library import example_ids

    module = as_module(model, dtype=dtype)
    made_up = example_inputs is None
    check_samples(example_inputs, batch_size)
    if example_inputs is None:
        example_inputs = example_inputs_of(module, batch_size=batch_size, seq_len=seq_len)
    tell(Report(CAPTURING))
    options: dict[str, Any] = {"loss_fn": loss_fn, "training": training, "copy_repeats": True}
    options["args"], options["kwargs"] = arguments_of(example_inputs)
    options["progress"] = lambda count: tell(Report(CAPTURING, operators=count))
    try:
        return capture(module, **options)
    except MissingValues:
        if not made_up or batch_size is None:
            raise
        ids = example_ids(module, batch_size=batch_size, seq_len=seq_len)
        values: dict[tuple[str | int, ...], torch.Tensor] = {
            (name,): value for name, value in ids.items() if isinstance(value, torch.Tensor)
        }
        return capture(module, values=values, **options)


def as_module(model: Any, *, dtype: str | None = None) -> torch.nn.Module:
    """A module on the meta device for a name, a path or a config; a module is returned as it is."""
    import torch

    if isinstance(model, torch.nn.Module):
        return model
    from planner.library import build_model, load_config

    config = load_config(str(model)) if isinstance(model, (str, Path)) else model
    return build_model(config, dtype=dtype or "bfloat16", device="meta")


def check_samples(example_inputs: Any, batch_size: int | None) -> None:
    """Raise ValueError for a number of samples that example inputs, which are planned for, do not have."""
    from passes.capture.nested_values import flatten

    sizes = {tensor.shape[0] for tensor in flatten(example_inputs)[1].values() if tensor.dim()}
    if batch_size is not None and sizes and batch_size not in sizes:
        raise ValueError(
            f"a step of {batch_size} samples (batch_size, global_batch) is asked for, but example_inputs have "
            f"{' or '.join(map(str, sorted(sizes)))}, and a step is planned for them: give inputs of {batch_size} "
            "samples (tensors on meta will do), or leave the number out"
        )


def example_inputs_of(module: torch.nn.Module, *, batch_size: int | None, seq_len: int | None) -> Mapping[str, Any]:
    if not hasattr(module, "config"):
        raise ValueError(
            f"example_inputs is missing: {type(module).__name__} is not a Hugging Face model, so its inputs cannot be "
            "made from batch_size and seq_len; pass example_inputs={name: tensor} or (tensor, ...)"
        )
    from planner.library import example_batch
    from planner.library.batch_sizes import NO_SAMPLES

    if batch_size is None:
        raise ValueError(NO_SAMPLES)

    return example_batch(module, batch_size=batch_size, seq_len=seq_len)
