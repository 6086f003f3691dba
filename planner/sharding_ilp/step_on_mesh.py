"""The step of a plan on a given mesh: one stage, the batch at once, nothing recomputed or sharded by ZeRO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cost_models import Cluster
from cost_models.step import ChunkCosts, LayerCosts, LayerSeconds
from passes.ir.graph import Graph
from passes.ir.types import MeshShape, shard_dim
from passes.plan import Costs, TensorPlan
from passes.plan.step_plan import CALLERS, ChunkPlan, RankMemory, StepCosts, StepPlan
from planner.sharding_ilp.model_figures import batch_size_of, compute_dtype, model_flops


def step_on_mesh(
    graph: Graph,
    *,
    mesh: MeshShape,
    inputs: Mapping[str, TensorPlan],
    costs: Costs,
    cluster: Mapping[str, Any],
    memory_limit: float | None,
) -> StepPlan:
    """How a step runs on ``mesh``. Its only chunk names no groups: every unit of the model is in it.

    Args:
        inputs: the inputs as they are placed, which tell how many samples a device has.
        costs: of the whole batch, forward and backward; whoever calls the step times its optimizer.
        cluster: as plain data; of one that is none (prices of a test), utilisation and memory limit are not known.
    """
    seconds, samples = costs.total, batch_size_of(graph)
    flops = model_flops(graph)
    peak, capacity = _limits(cluster, compute_dtype(graph))
    parts = {"parameters": 0, "gradients": 0, "optimizer": 0, "activations": 0, "converted": 0, **costs.memory}
    saved = parts["activations"] + parts["converted"]
    memory = RankMemory(*map(float, (parts["parameters"], parts["gradients"], parts["optimizer"], saved, 0)))
    return StepPlan(
        axes={"pp": 1, **mesh.as_dict()},
        global_batch=samples,
        local_batch=_local_batch(samples, mesh, inputs),
        num_microbatches=1,
        schedule="none",
        chunks_per_rank=1,
        chunks=(ChunkPlan(0, (), _whole_model(costs, memory), (_seconds_by_cause(costs),)),),
        optimizer=CALLERS,
        gradient_dtype="",
        compiled=False,
        costs=StepCosts(
            seconds=seconds,
            pipeline=seconds,
            tail=0.0,
            update=0.0,
            simulated=seconds,
            bubble=0.0,
            exposed=0.0,
            flops=flops,
            utilisation=flops / (seconds * peak * mesh.num_devices) if seconds and peak else 0.0,
            samples_per_second=samples / seconds if seconds else 0.0,
        ),
        memory=(memory,),
        memory_limit=capacity if memory_limit is None else memory_limit,
    )


def _whole_model(costs: Costs, memory: RankMemory) -> ChunkCosts:
    """All layers together as one: ``costs`` are of the whole batch, which is one micro-batch."""
    layer = LayerCosts(
        forward=costs.compute_forward + costs.communication_forward,
        backward=costs.compute_backward + costs.communication_backward,
        state_bytes=memory.parameters + memory.gradients + memory.optimizer,
        saved_bytes=memory.activations,
    )
    return ChunkCosts(layers=((layer, 1),))


def _seconds_by_cause(costs: Costs) -> LayerSeconds:
    return LayerSeconds(
        compute_forward=costs.compute_forward,
        compute_backward=costs.compute_backward,
        communication_forward=costs.communication_forward,
        communication_backward=costs.communication_backward,
    )


def _limits(cluster: Mapping[str, Any], dtype: str) -> tuple[float, float]:
    """Flops per second and bytes of one device; None for what ``cluster`` does not say."""
    try:
        device = Cluster.from_dict(dict(cluster)).device
    except ValueError:
        return 0.0, 0.0
    return device.peak_flops(dtype), device.usable_bytes


def _local_batch(samples: int, mesh: MeshShape, inputs: Mapping[str, TensorPlan]) -> int:
    """The largest number of samples that a device holds of any input; 1 for an empty batch, as plans count from 1."""
    local = [samples]
    for tensor in inputs.values():
        if tensor.shape and tensor.shape[0] == samples:
            local_samples = samples
            for axis, size in enumerate(mesh.sizes):
                local_samples //= size if shard_dim(tensor.placement[axis]) == 0 else 1
            local.append(local_samples)
    return max(1, min(local))
