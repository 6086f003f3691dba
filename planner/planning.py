"""Plan offline: from a model or a config to a Plan, with no process group and no parameter in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models import Cluster, CostModel
from passes.ir.types import MeshShape
from passes.plan import Plan

if TYPE_CHECKING:
    import torch

    from passes.ir.graph import Graph


def plan(
    model: Any,
    cluster: Cluster | str | None = None,
    *,
    mesh: MeshShape | Mapping[str, int] | str,
    batch_size: int | None = None,
    seq_len: int | None = None,
    example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    dtype: str | None = None,
    training: bool | None = None,
    memory_limit: float | None = None,
    constraints: Mapping[str, Mapping[str, Any]] | None = None,
    forbid_collectives: Sequence[str] = (),
    time_limit: float = 60.0,
) -> Plan:
    """Choose how every operator and parameter of ``model`` is split over ``mesh``.

    Args:
        model: an ``nn.Module`` (meta tensors will do), a Hugging Face config, the path of a config, or a name from
            the config library (``"llama-3-8b"``).
        cluster: the hardware, or its short form (``"dgx-h100:32"``); None for this machine's processors.
        mesh: axis sizes, outermost first: ``{"dp": 32, "tp": 8}`` or ``"dp=32,tp=8"``.
        batch_size, seq_len: the global batch of a Hugging Face model (images: ``seq_len`` is not used).
        example_inputs: for any other model, its keyword arguments (a mapping) or positional ones (a tuple).
        loss_fn: ``loss_fn(outputs, batch) -> scalar`` for a model that does not compute its own loss.
        dtype: parameter dtype of a model built from a config (default: bfloat16).
        training: plan a training step (default: when there is a loss) or inference.
        memory_limit: bytes that a device may hold; None for no bound.
        constraints: pins by glob on names, ``{"model.layers.*.mlp.*": {"tp": "S(0)"}}``.
        forbid_collectives: collectives that the plan must not use (``("all_gather",)``).
        time_limit: seconds for the solver; on reaching it the best plan so far is returned with its gap.

    Raises:
        ValueError: for input that does not fit together, and when no plan satisfies the constraints.
        CaptureError: when the model cannot be captured.
    """
    shape = as_mesh_shape(mesh)
    hardware = as_cluster(cluster, num_devices=shape.num_devices)
    graph = capture_for_planning(
        model,
        batch_size=batch_size,
        seq_len=seq_len,
        example_inputs=example_inputs,
        loss_fn=loss_fn,
        dtype=dtype,
        training=training,
    )
    return plan_graph(
        graph,
        hardware,
        mesh=shape,
        memory_limit=memory_limit,
        constraints=constraints,
        forbid_collectives=forbid_collectives,
        time_limit=time_limit,
    )


def plan_graph(graph: Graph, cluster: Cluster, *, mesh: MeshShape, **options: Any) -> Plan:
    """Plan a captured graph; ``options`` are those of ``planner.search.search``."""
    from planner.search import search

    cost_model = CostModel(cluster, mesh.as_dict())
    return search(graph, mesh=mesh, cost_model=cost_model, cluster_info=cluster.to_dict(), **options)


def as_mesh_shape(mesh: MeshShape | Mapping[str, int] | str) -> MeshShape:
    """Any of the ways to write a mesh."""
    if isinstance(mesh, MeshShape):
        return mesh
    return MeshShape.parse(mesh) if isinstance(mesh, str) else MeshShape.from_dict(mesh)


def as_cluster(cluster: Cluster | str | None, *, num_devices: int) -> Cluster:
    """A cluster given as such, by its short form, by a TOML file, or (None) this machine with ``num_devices``."""
    if cluster is None:
        return Cluster.parse(f"cpu-local:{num_devices}")
    if isinstance(cluster, str):
        return Cluster.from_toml(cluster) if cluster.endswith(".toml") else Cluster.parse(cluster)
    return cluster


def capture_for_planning(
    model: Any,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    example_inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    dtype: str | None = None,
    training: bool | None = None,
) -> Graph:
    """Capture a model however it is given; see ``plan`` for the arguments."""
    from passes.capture import capture

    module = as_module(model, dtype=dtype)
    if example_inputs is None:
        example_inputs = example_inputs_of(module, batch_size=batch_size, seq_len=seq_len)
    if isinstance(example_inputs, Mapping):
        return capture(module, kwargs=dict(example_inputs), loss_fn=loss_fn, training=training, copy_repeats=True)
    return capture(module, args=tuple(example_inputs), loss_fn=loss_fn, training=training, copy_repeats=True)


def as_module(model: Any, *, dtype: str | None = None) -> torch.nn.Module:
    """A module on the meta device for a name, a path or a config; a module is returned as it is."""
    import torch

    if isinstance(model, torch.nn.Module):
        return model
    from planner.library import build_model, load_config

    config = load_config(str(model)) if isinstance(model, (str, Path)) else model
    return build_model(config, dtype=dtype or "bfloat16", device="meta")


def example_inputs_of(module: torch.nn.Module, *, batch_size: int | None, seq_len: int | None) -> Mapping[str, Any]:
    if not hasattr(module, "config"):
        raise ValueError(
            f"example_inputs is missing: {type(module).__name__} is not a Hugging Face model, so its inputs cannot be "
            "made from batch_size and seq_len; pass example_inputs={name: tensor} or (tensor, ...)"
        )
    if batch_size is None:
        raise ValueError("batch_size is missing: give the number of samples in the global batch")
    from planner.library import example_batch

    return example_batch(module, batch_size=batch_size, seq_len=seq_len)
