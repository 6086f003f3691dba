"""Inputs of calls: along which dim they hold samples, also those that the plan of a step does not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from passes.ir.types import R, shard, shard_dim
from passes.pipeline_cut import BATCH_AXIS
from passes.plan import Plan
from passes.plan.plan_data import TensorPlan
from passes.shard import input_key
from runtime.calls.model_call import Path


def dim_on(plan: Plan, path: Path, axis: str) -> int | None:
    """The dim of an input that the plan cuts over a mesh axis."""
    planned = plan.inputs.get(input_key(path))
    return None if planned is None else shard_dim(planned.placement[plan.mesh.names.index(axis)])


def sample_dim(plan: Plan, tensors: Mapping[Path, torch.Tensor], path: Path) -> int | None:
    """The dim along which an input of a call holds samples, of which each data rank may pass its own.

    Of an input that no program reads the plan knows nothing: it has samples along its first dim if that is as long as
    those of the others.

    Args:
        tensors: of the call, all whole or all this rank's own.
    """
    if input_key(path) in plan.inputs:
        return dim_on(plan, path, BATCH_AXIS)
    dims = [(tensor, dim_on(plan, other, BATCH_AXIS)) for other, tensor in tensors.items()]
    lengths = {tensor.shape[dim] for tensor, dim in dims if dim is not None}
    return 0 if tensors[path].shape[:1] and tensors[path].shape[0] in lengths else None


def with_inputs_of_samples(plan: Plan, tensors: Mapping[Path, torch.Tensor]) -> Plan:
    """A plan that cuts the samples of inputs that it does not know, too: data ranks may pass their own of them.

    Args:
        tensors: of a call with a global batch.
    """
    if BATCH_AXIS not in plan.mesh.names:
        return plan
    place, size = plan.mesh.names.index(BATCH_AXIS), plan.mesh.size(BATCH_AXIS)
    more = {}
    for path, tensor in tensors.items():
        is_known = input_key(path) in plan.inputs or tensor.requires_grad
        if not is_known and sample_dim(plan, tensors, path) == 0 and tensor.shape[0] % size == 0:
            placement = tuple(shard(0) if number == place else R for number in range(len(plan.mesh.names)))
            dtype = str(tensor.dtype).removeprefix("torch.")
            more[input_key(path)] = TensorPlan(tuple(tensor.shape), dtype, placement)
    return dataclasses.replace(plan, inputs={**plan.inputs, **more}) if more else plan
