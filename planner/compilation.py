"""``planner.compile``: from a model and a mesh to a sharded module that trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cost_models import Cluster
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Plan
from planner.planning import as_cluster, as_mesh_shape, example_inputs_of, plan_graph
from runtime import ops
from runtime.engine import Engine
from runtime.layout import Layout, RankLayout
from runtime.parallel_module import ParallelModule
from runtime.shards import Shards


def compile(
    model: nn.Module,
    mesh: DeviceMesh | MeshShape | Mapping[str, int] | str | Plan | Path,
    *,
    example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    loss_fn: Callable[..., Any] | None = None,
    cluster: Cluster | str | None = None,
    constraints: Mapping[str, Mapping[str, Any]] | None = None,
    memory_limit: float | None = None,
    plan: Plan | str | Path | None = None,
    **options: Any,
) -> ParallelModule:
    """A sharded version of ``model`` on ``mesh``; every rank of the mesh must call this.

    Args:
        model: its weights are cut to this rank's shards; a model on the meta device stays there until
            ``initialise`` or ``load_full_state_dict``.
        mesh: a ``DeviceMesh``; axis sizes (``{"dp": 2, "tp": 2}``, ``"dp=2,tp=2"``), to be laid over the default
            process group; or a plan (or the path of one), which has its mesh in it.
        example_inputs: arguments of one global batch (a mapping by name, or a tuple), to plan now.
        batch_size, seq_len: the same for a Hugging Face model. Without any of these, planning happens at the first
            call, with its inputs.
        loss_fn: ``loss_fn(outputs, batch) -> scalar`` for a model that does not compute its own loss.
        cluster: the hardware to plan for; None for what can be told from the mesh.
        constraints, memory_limit: as in ``planner.plan``.
        plan: a plan to run instead of searching.
        options: other options of ``planner.search.search`` (``forbid_collectives``, ``time_limit``, …).

    Raises:
        ValueError: if the world size is not the mesh's, if a plan was made for another model, or for no plan.
        CaptureError: if the model cannot be captured.
    """
    mesh_itself, given = _mesh_and_plan(mesh, plan)
    device_mesh, shape = as_device_mesh(mesh_itself)
    layout = RankLayout(device_mesh, shape)
    hardware = _cluster(cluster, device_mesh, shape)
    ops.seed(agreed_seed(device_mesh))
    options = {"constraints": constraints, "memory_limit": memory_limit, **options}

    def find_plan(graph: Graph, pinned: Plan | None) -> Plan:
        return agreed_plan(
            lambda: plan_graph(graph, hardware, mesh=shape, pinned=pinned, **options), device_mesh=device_mesh
        )

    if example_inputs is None and batch_size is not None:
        example_inputs = example_inputs_of(model, batch_size=batch_size, seq_len=seq_len)
    return parallelise(model, layout, plan=given, planner=find_plan, loss_fn=loss_fn, example_inputs=example_inputs)


def parallelise(
    model: nn.Module,
    layout: Layout,
    *,
    plan: Plan | None,
    planner: Callable[[Graph, Plan | None], Plan],
    loss_fn: Callable[..., Any] | None = None,
    example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
) -> ParallelModule:
    """A parallel module on any layout, with its first program made if there are example inputs."""
    if plan is not None and plan.mesh != layout.mesh:
        raise ValueError(f"the plan is for mesh {plan.mesh}, this mesh is {layout.mesh}: plan again for it")
    if plan is not None:
        check_same_model(model, plan)
    shards = Shards(model, layout)
    engine = Engine(model, shards, layout, plan=plan, planner=planner, loss_fn=loss_fn)
    parallel = ParallelModule(shards, engine)
    if example_inputs is not None:
        by_name = isinstance(example_inputs, Mapping)
        args, kwargs = ((), dict(example_inputs)) if by_name else (tuple(example_inputs), {})
        engine.prepare(engine.read(args, kwargs))
    return parallel


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


def _mesh_and_plan(mesh: Any, plan: Plan | str | Path | None) -> tuple[Any, Plan | None]:
    if isinstance(plan, (str, Path)):
        plan = Plan.load(plan)
    if isinstance(mesh, Path) or (isinstance(mesh, str) and mesh.endswith(".json")):
        mesh = Plan.load(mesh)
    if isinstance(mesh, Plan):
        return mesh.mesh, mesh if plan is None else plan
    return mesh, plan


def as_device_mesh(mesh: DeviceMesh | MeshShape | Mapping[str, int] | str) -> tuple[DeviceMesh, MeshShape]:
    """A device mesh and its shape; sizes are laid over the default process group, which is made if need be.

    Raises:
        ValueError: if the world size is not the product of the sizes, or a ``DeviceMesh`` has no axis names.
    """
    if isinstance(mesh, DeviceMesh):
        if not mesh.mesh_dim_names:
            raise ValueError("the mesh has no axis names: pass mesh_dim_names=('dp', 'tp') to init_device_mesh")
        if mesh.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not part of the mesh: call compile on the mesh's ranks only")
        return mesh, MeshShape(tuple(mesh.mesh_dim_names), tuple(mesh.mesh.shape))
    shape = as_mesh_shape(mesh)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_initialized():
        _init_process_group(shape, device)
    if dist.get_world_size() != shape.num_devices:
        raise ValueError(
            f"mesh {shape} needs {shape.num_devices} processes, but the world size is {dist.get_world_size()}: "
            f"start that many (torchrun --nproc-per-node={shape.num_devices}) or choose other axis sizes"
        )
    return init_device_mesh(device, shape.sizes, mesh_dim_names=shape.names), shape


def _init_process_group(shape: MeshShape, device: str) -> None:
    """Join the process group that torchrun describes in the environment."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != shape.num_devices:
        raise ValueError(
            f"mesh {shape} needs {shape.num_devices} processes, but the world size is {world_size}: "
            f"start that many with torchrun --nproc-per-node={shape.num_devices}"
        )
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _cluster(cluster: Cluster | str | None, device_mesh: DeviceMesh, shape: MeshShape) -> Cluster:
    if cluster is None:
        return Cluster.from_device_mesh(device_mesh)
    return as_cluster(cluster, num_devices=shape.num_devices)


def agreed_plan(find: Callable[[], Plan], *, device_mesh: DeviceMesh) -> Plan:
    """The plan that the mesh's first rank finds, on every rank; an error of its is raised everywhere."""
    first = int(device_mesh.mesh.flatten()[0])
    if device_mesh.mesh.numel() == 1:
        return find()
    message: list[Any] = [None]
    if dist.get_rank() == first:
        try:
            message = [("plan", find().to_json())]
        except Exception as error:  # every rank must hear of it, or the others wait for ever
            message = [("error", error)]
    _broadcast(message, device_mesh)
    kind, content = message[0]
    if kind == "error":
        raise content
    import json

    return Plan.from_dict(json.loads(content))


def agreed_seed(device_mesh: DeviceMesh) -> int:
    """The seed of the first rank's default generator: every rank draws its masks from one sequence."""
    message: list[Any] = [torch.initial_seed()]
    if device_mesh.mesh.numel() > 1:
        _broadcast(message, device_mesh)
    return int(message[0])


def _broadcast(message: list[Any], device_mesh: DeviceMesh) -> None:
    """Send the first rank's ``message`` to all ranks of the mesh, along one axis after the other."""
    coordinate: Sequence[int] = device_mesh.get_coordinate() or []
    for axis in range(device_mesh.mesh.ndim):
        # Ranks behind the first on a later axis have not heard yet.
        if any(coordinate[axis + 1 :]) or device_mesh.mesh.shape[axis] == 1:
            continue
        group = device_mesh.get_group(axis)
        dist.broadcast_object_list(message, src=dist.get_process_group_ranks(group)[0], group=group)
