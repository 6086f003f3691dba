"""``planner.compile``: from a model and a mesh, a cluster or a plan to a sharded module that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cost_models import Cluster
from cost_models.unequal_devices import in_order
from passes.capture import refuse_inputs, refuse_unsupported
from passes.capture.call_arguments import CallArguments, ExampleInputs, arguments_of
from passes.capture.nested_values import flatten
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Plan
from planner.checkpointed_models import CheckpointedModel, enables_checkpoints, refuse_checkpoints
from planner.engine_under_another_plan import ModelReplanner
from planner.extensions import load_extensions
from planner.later_planning import is_step_on_axes, planned_later
from planner.operators_of_calls import within_a_stage
from planner.planning import as_cluster, check_samples, example_inputs_of, plan_graph
from planner.planning import plan as make_plan
from planner.rank_comparison import check_compiled_alike, ranks_of
from planner.sharding_ilp.constraints import dividing
from planner.targets import (
    Target,
    as_device_mesh,
    axis_sizes,
    check_options,
    join_process_group,
    plans_step,
    process_group_as_cluster,
    read_target,
    step_device_mesh,
)
from planner.whole_step.candidates.demands import fixed_axes, without_defaults
from runtime import ops
from runtime.execution.engine import Engine
from runtime.execution.mixed_precision import compute_dtype, computing_in
from runtime.execution.rank_mapping import Places, RankPlaces
from runtime.execution.replanning import Planner
from runtime.launch.groups import mesh_of_axes
from runtime.mesh.first_rank import broadcast_objects
from runtime.module.parallel_module import ParallelModule
from runtime.parameters.adoption import adopt
from runtime.parameters.optimizer_steps import remember_originals


def compile(
    model: nn.Module,
    mesh: Target | None = None,
    *,
    example_inputs: ExampleInputs | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    loss_fn: Callable[..., Any] | None = None,
    cluster: Cluster | str | None = None,
    constraints: Mapping[str, Mapping[str, Any]] | None = None,
    memory_limit: float | None = None,
    plan: Plan | str | Path | None = None,
    precision: str | torch.dtype | None = None,
    fuse: bool = True,
    dynamic: bool = False,
    optimizer: torch.optim.Optimizer | str | None = None,
    **options: Any,
) -> ParallelModule:
    """A sharded version of ``model`` on ``mesh``; every rank of the mesh must call this.

    Args:
        model: its weights, as the first rank of the mesh has them, are cut to this rank's shards (what other ranks have
            does not count, as with DDP); what the first rank has on the meta device stays there until ``initialise``,
            ``load_full_state_dict`` or ``load_pretrained``.
        mesh: where it runs. None for the process group there is (or that torchrun's environment names): the whole step
            is planned for its devices, on the mesh that is best for them; without example inputs at the first call (on
            one without a pipeline, unless that is ``train_step``), which rank 0 then says in one line. Else one of

            * a ``DeviceMesh``, or axis sizes (``{"dp": 2, "tp": 2}``, ``"dp=2,tp=2"``) to be laid over the default
              process group: how tensors are split over these axes is planned;
            * a cluster (a ``Cluster``, ``"dgx-h100:1"``, ``"cluster.toml"``) with as many devices as there are
              processes: the whole step is planned, as by ``planner.plan`` without a mesh: mesh, pipeline,
              micro-batches, recomputation, ZeRO;
            * axis sizes with a pipeline (``"pp=2,dp=2"``; axes ``pp``, ``dp``, ``cp``, ``tp``), or any such mesh with
              ``fix`` or ``forbid``, or for a model after ``gradient_checkpointing_enable()`` or that calls
              ``torch.utils.checkpoint`` (``fix={"recompute": "full"}``): the rest of the step is planned on that mesh;
            * a plan, or the path of one (``"plan.json"``), which has its mesh in it.

            ``planner.targets.read_target`` says how text is told apart.
        example_inputs: arguments of one global batch (a mapping by name, a tuple by position, or a
            ``planner.CallArguments`` of both), to plan now.
        batch_size, seq_len: the same for a Hugging Face model. Without any of these, planning happens at the first
            call, with its inputs (on a cluster that is named: refused).
        loss_fn: ``loss_fn(outputs, batch) -> scalar`` for a model that does not compute its own loss.
        cluster: the hardware to plan for, with a mesh or, where that is None, the best one; None for what can be told.
        constraints, memory_limit: as in ``planner.plan``.
        plan: a plan to run instead of searching.
        precision: dtype to compute in (``"bfloat16"``) with a model whose parameters are wider: those stay as the
            masters that the optimizer updates; gradients are added up and reduced in float32, and losses are computed
            in it, as under a GPU's autocast. Inputs keep their dtype, also as under autocast: products with weights
            round them, sums with what is narrower are in theirs, and ``loss_fn`` gets the model's outputs in float32.
            A whole step is planned.
        fuse: plan and run fused operators, as in ``planner.plan``; a plan that is given says so itself.
        dynamic: batches will have many sizes: the model is traced once for any size of each dim of its inputs (of 2 and
            more) that it allows, which takes a few times as long as for one. Without it that is done at the first call
            of other sizes, by another trace.
        optimizer: one that was made before, over the parameters of ``model``: it trains the parallel module from then
            on (without it, it refuses to step). Its name (``"adamw"``), as in ``planner.plan``, only says what a whole
            step is planned for.
        options: on a mesh, other options of ``planner.sharding_ilp.search`` (``forbid_collectives``, ``time_limit``,
            …); on a cluster, of ``planner.plan`` (``fix``, ``forbid``, ``headroom``, …).

    Raises:
        ValueError: if ranks differ in their arguments (but for weights and values of inputs), their model or versions;
            if the world size is not the mesh's or the cluster's, if a plan was made for another model, needs
            what no rank can do, or for no plan.
        CaptureError: if the model cannot be captured.
    """
    has_inputs = example_inputs is not None or batch_size is not None
    if mesh is None and plan is None and cluster is not None and has_inputs:
        mesh, cluster = cluster, None
    lasting: dict[str, Any] = {"loss_fn": loss_fn, "precision": precision, "fuse": fuse, "dynamic": dynamic}
    lasting["optimizer"] = optimizer if isinstance(optimizer, str) else None
    replanner = ModelReplanner(engine_for, lasting)
    options |= {"constraints": constraints, "memory_limit": memory_limit, "cluster": cluster, **lasting}
    if has_inputs:
        options |= {"example_inputs": example_inputs, "batch_size": batch_size, "seq_len": seq_len}
    elif plan is None and (mesh is None or is_step_on_axes(model, mesh, options)):
        parallel = planned_later(model, mesh, without_defaults(options), engine_for)
        return in_place_of(model, parallel, optimizer, replanner)
    if mesh is None:
        mesh = process_group_as_cluster() if plan is None else plan
    make = partial(engine_for, model, mesh, plan=plan, **options)
    try:
        engine = make()
    except CheckpointedModel:
        if example_inputs is None and batch_size is None:
            raise
        engine = make(fix={"recompute": "full"})
    return in_place_of(model, ParallelModule(engine), optimizer, replanner)


@torch.random.fork_rng(devices=[])  # a script draws afterwards what it draws without a plan
def engine_for(
    model: nn.Module,
    mesh: Target,
    *,
    example_inputs: ExampleInputs | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    loss_fn: Callable[..., Any] | None = None,
    cluster: Cluster | str | None = None,
    constraints: Mapping[str, Mapping[str, Any]] | None = None,
    memory_limit: float | None = None,
    plan: Plan | str | Path | None = None,
    precision: str | torch.dtype | None = None,
    fuse: bool = True,
    dynamic: bool = False,
    optimizer: str | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    ranks: Sequence[int] | None = None,
    **options: Any,
) -> Engine:
    """What ``compile`` makes a parallel module of, with the same arguments.

    Args:
        buffers: as of ``Engine``.
        ranks: of the default process group, over which the target is laid and who alone call this; None for all.

    Raises:
        ValueError, CaptureError: as ``compile``.
    """
    together = ranks_of(mesh, ranks)
    together.together(load_extensions)
    target, user_plan = together.together(lambda: _read_arguments(model, mesh, cluster, plan, example_inputs))
    options = without_defaults(options)
    compared: dict[str, Any] = {
        "constraints": constraints,
        "memory_limit": memory_limit,
        "precision": precision,
        "fuse": fuse,
        "dynamic": dynamic,
    }
    if user_plan is None and enables_checkpoints(model) and not plans_step(target, options):
        options["fix"] = {"recompute": "full"}
    compared |= {"example_inputs": example_inputs, "batch_size": batch_size, "seq_len": seq_len, "cluster": cluster}
    check_compiled_alike(
        together, model, target=target, plan=user_plan, loss_fn=loss_fn, options={**compared, **options}
    )
    step = precision is not None or (user_plan is None and plans_step(target, options))
    check_options(options, step=None if user_plan is not None or isinstance(target, Plan) else step)
    demands = {"constraints": constraints, "memory_limit": memory_limit, **options}
    if optimizer is not None:
        demands["optimizer"] = optimizer
    check_samples(example_inputs, batch_size)
    if example_inputs is None and batch_size is not None:
        example_inputs = example_inputs_of(model, batch_size=batch_size, seq_len=seq_len)
    compute = None if precision is None else compute_dtype(precision)
    captured = model if compute is None else computing_in(model, compute)
    if isinstance(target, Plan):
        user_plan = target if user_plan is None else user_plan
    elif user_plan is None and step:
        user_plan = plan_on_devices(
            captured, target, hardware=cluster, ranks=ranks, example_inputs=example_inputs, loss_fn=loss_fn, fuse=fuse,
            **demands,
        )  # fmt: skip
    if user_plan is not None and options.get("compiled") and not user_plan.step.compiled:
        raise ValueError("compiled=True is part of a plan, and this one is without: plan again with compiled=True")
    if compute is not None and user_plan is not None and user_plan.step.optimizer_on_host:
        raise ValueError(
            f"precision={str(precision)!r} keeps wider parameters as masters on the device, and the plan offloads "
            "optimizer state: make the model in that dtype, whose masters are on the host, or drop one of them"
        )
    if user_plan is not None and user_plan.step.decides_units:
        places = RankPlaces(step_device_mesh(user_plan, target, ranks), user_plan.mesh)
        find_plan = None
    else:
        assert not isinstance(target, Cluster)
        device_mesh, shape = as_device_mesh(target, ranks)
        places = RankPlaces(device_mesh, shape)
        priced = _cluster(cluster, device_mesh, shape)

        def find_plan(graph: Graph, pinned: Plan | None) -> Plan:
            # A graph that comes with a plan to pin is fused already, if that says so.
            first = pinned is None
            if first:
                refuse_checkpoints(graph)
            demanded = demands
            if not first and constraints is not None:
                demanded = demands | {"constraints": dividing(graph, constraints, shape)}
            return agreed_plan(
                lambda: plan_graph(graph, priced, mesh=shape, pinned=pinned, fuse=fuse and first, **demanded),
                device_mesh=device_mesh,
            )

    ops.seed(agreed_seed(places.device_mesh))
    return _engine(
        model,
        places,
        plan=user_plan,
        planner=find_plan,
        loss_fn=loss_fn,
        example_inputs=example_inputs,
        compute=compute,
        buffers=buffers,
        dynamic=dynamic,
    )


def in_place_of(
    model: nn.Module, parallel: ParallelModule, optimizer: torch.optim.Optimizer | str | None, replanner: ModelReplanner
) -> ParallelModule:
    """``parallel``, with optimizers informed that it is trained in place of ``model``."""
    parallel.replanned_by(replanner)
    remember_originals(model)
    if isinstance(optimizer, torch.optim.Optimizer):
        if optimizer.state and not parallel.is_planned:
            raise ValueError("an optimizer with state needs a plan to cut it by: give example_inputs to compile()")
        named = dict(parallel.named_parameters(remove_duplicate=False))
        adopt(optimizer, dict(model.named_parameters()), named, parallel.owned())
    return parallel


def _read_arguments(
    model: nn.Module, mesh: Target, cluster: Cluster | str | None, plan: Plan | str | Path | None, example_inputs: Any
) -> tuple[DeviceMesh | MeshShape | Plan | Cluster, Plan | None]:
    """The target to run on, and the user's plan, if any."""
    refuse_unsupported(model)
    if example_inputs is not None:
        tensors = flatten(arguments_of(example_inputs))[1]
        refuse_inputs({path[1:]: tensor for path, tensor in tensors.items()})
    target = read_target(mesh)
    if isinstance(target, Cluster):
        _refuse_with_cluster(cluster=cluster, plan=plan)
    return target, Plan.load(plan) if isinstance(plan, (str, Path)) else plan


def plan_on_devices(
    model: nn.Module,
    target: Cluster | DeviceMesh | MeshShape,
    *,
    hardware: Cluster | str | None,
    ranks: Sequence[int] | None = None,
    example_inputs: ExampleInputs | None,
    fix: Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """The best step on a cluster or on axes of given sizes, over ``ranks`` (None: all); or over a device mesh.

    Raises:
        ValueError: if there is another number of processes, no input, or no plan.
    """
    if example_inputs is None:
        raise ValueError(
            "example_inputs is missing: a whole step is planned before the first call; give example_inputs "
            "(or batch_size, and seq_len, for a Hugging Face model)"
        )
    if isinstance(target, Cluster):
        cluster: Cluster | None = in_order(target)  # the processes are on their devices already
        needed = options.get("num_devices") or target.num_devices
        requested_axes = dict(fix or {})
    else:
        requested_axes = fixed_axes(axis_sizes(target), fix)
        needed = target.mesh.numel() if isinstance(target, DeviceMesh) else target.num_devices
        cluster = as_cluster(hardware, num_devices=needed) if hardware is not None else None
    if isinstance(target, DeviceMesh):  # perhaps of some of the processes only
        everyone = mesh_of_axes(target.device_type, target.mesh.flatten(), ("ranks",))
    else:
        needed_by = str(target) if cluster is None else f"cluster {cluster.name!r}"
        device = join_process_group(needed, needed_by=needed_by, ranks=ranks)
        numbers = torch.arange(needed, device="cpu") if ranks is None else torch.tensor(list(ranks), device="cpu")
        everyone = mesh_of_axes(device, numbers, ("ranks",))
    priced = Cluster.from_device_mesh(everyone) if cluster is None else cluster
    plan_options = {name: value for name, value in options.items() if value is not None}

    def find() -> Plan:
        return make_plan(model, priced, example_inputs=example_inputs, fix=requested_axes, **plan_options)

    return agreed_plan(find, device_mesh=everyone)


def _refuse_with_cluster(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} does not go with a cluster in the place of the mesh: drop one of the two")


def parallelise(model: nn.Module, places: Places, *, plan: Plan | None, **options: Any) -> ParallelModule:
    """A parallel module on any places, see ``_engine``."""
    return ParallelModule(_engine(model, places, plan=plan, **options))


def _engine(
    model: nn.Module,
    places: Places,
    *,
    plan: Plan | None,
    planner: Planner | None = None,
    loss_fn: Callable[..., Any] | None = None,
    example_inputs: ExampleInputs | None = None,
    compute: torch.dtype | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    dynamic: bool = False,
) -> Engine:
    """An engine on any places, with its first programs built if there are example inputs.

    Args:
        plan: None to plan at the first call, by ``planner``. Without ``example_inputs``, programs of a plan of a whole
            step are made for inputs as in the plan.
        planner: finds plans; None to split operators that a plan does not know over the ranks of one stage.
        compute: dtype that the plan computes in, if it is not that of the parameters.
    """
    if plan is not None:
        if plan.mesh != places.layout.mesh:
            raise ValueError(f"the plan is for mesh {plan.mesh}, this mesh is {places.layout.mesh}: plan again for it")
        check_same_model(model, plan)
        if plan.step.decides_units and example_inputs is None:
            example_inputs = planned_inputs(plan)
        if planner is None:
            planner = within_a_stage(plan, places)
    example: Any = None
    if example_inputs is not None:
        example = arguments_of(example_inputs)
    options: dict[str, Any] = {"loss_fn": loss_fn, "compute": compute, "planner": planner, "buffers": buffers}
    options["dynamic"] = dynamic
    return Engine(model, places, plan=plan, example=example, **options)


def planned_inputs(plan: Plan) -> CallArguments:
    """Inputs without data of the shapes that ``plan`` was made for.

    Raises:
        ValueError: if they are not all whole arguments, or a positional one is no tensor.
    """
    places = sorted(int(name) for name in plan.inputs if name.isdecimal())
    unclear = [name for name in plan.inputs if not name.isidentifier() and not name.isdecimal()]
    if not unclear and places != list(range(len(places))):
        unclear = [str(places[-1])]
    if unclear:
        raise ValueError(f"example_inputs is missing: the plan's input {unclear[0]!r} cannot be made up from its name")
    inputs = {
        name: torch.empty(planned.shape, dtype=getattr(torch, planned.dtype), device="meta")
        for name, planned in plan.inputs.items()
    }
    positional = [inputs.pop(str(place)) for place in places]
    return CallArguments(*positional, **inputs)


def check_same_model(model: nn.Module, plan: Plan) -> None:
    """Raise ValueError if ``plan`` places parameters that ``model`` does not have."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name, planned in plan.states.items():
        tensor = tensors.get(name)
        if tensor is None and planned.trainable:
            raise ValueError(
                f"a plan made for another model: it places {name!r} of a {plan.model}, which this "
                f"{type(model).__name__} does not have"
            )
        if tensor is not None and tuple(tensor.shape) != tuple(planned.shape):
            raise ValueError(
                f"a plan made for another model: {name!r} has shape {list(planned.shape)} in the plan and "
                f"{list(tensor.shape)} in this {type(model).__name__}"
            )


def _cluster(cluster: Cluster | str | None, device_mesh: DeviceMesh, shape: MeshShape) -> Cluster:
    if cluster is None:
        return Cluster.from_device_mesh(device_mesh)
    return as_cluster(cluster, num_devices=shape.num_devices)


def agreed_plan(find: Callable[[], Plan], *, device_mesh: DeviceMesh) -> Plan:
    """The plan that the mesh's first rank finds, on every rank; every rank raises the first rank's error."""
    first = int(device_mesh.mesh.flatten()[0])
    if device_mesh.mesh.numel() == 1:
        return find()
    message: list[Any] = [None]
    if dist.get_rank() == first:
        try:
            message = [("plan", find().to_json())]
        except Exception as error:  # every rank must hear of it, or the others wait for ever
            message = [("error", error)]
    broadcast_objects(message, device_mesh)
    kind, content = message[0]
    if kind == "error":
        raise content
    import json

    return Plan.from_dict(json.loads(content))


def agreed_seed(device_mesh: DeviceMesh) -> int:
    """The seed of the first rank's default generator, so that all ranks draw masks from one sequence."""
    message: list[Any] = [torch.initial_seed()]
    if device_mesh.mesh.numel() > 1:
        broadcast_objects(message, device_mesh)
    return int(message[0])
