"""Inputs of calls: along which dim they hold samples, also those that the plan of a step does not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

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


def refuse_other_cuts(plan: Plan, tensors: Mapping[Path, torch.Tensor]) -> None:
    """Raise ValueError for inputs of a call, each rank's own, that the plan cuts otherwise than ranks pass samples.

    Samples are along the first dim of an input where that is, in the plan, as long as of most inputs, and in this call
    too. Such an input has to be cut along that dim, and all that is cut has to be as long for as many samples as in
    the plan. A plan on a mesh may cut features, or leave an input whole: of each data rank's own samples it would make
    one batch whose features differ, or take each rank's for those of all.
    """
    if BATCH_AXIS not in plan.mesh.names:
        return
    if not any(dim_on(plan, path, BATCH_AXIS) is not None for path in tensors):
        if plan.mesh.size(BATCH_AXIS) > 1:
            raise ValueError(
                f"local_inputs=True passes each {BATCH_AXIS} rank's own samples, but the plan cuts no input over "
                f"{BATCH_AXIS}: pin it (constraints={{'input:*': {{'{BATCH_AXIS}': 'S(0)'}}}}) or pass the whole batch"
            )
        return
    pairs = [
        (path, tensor.shape, plan.inputs[input_key(path)].shape, dim_on(plan, path, BATCH_AXIS))
        for path, tensor in tensors.items()
        if tensor.shape and input_key(path) in plan.inputs
    ]
    here = _most_common([shape[0] for _, shape, _, _ in pairs])
    planned = _most_common([whole[0] for _, _, whole, _ in pairs])
    lengths = [(shape[dim], whole[dim]) for _, shape, whole, dim in pairs if dim is not None]
    some, all_samples = max(lengths, key=lambda pair: (lengths.count(pair), pair), default=(1, 1))
    wrong = [
        (path, shape, whole, dim)
        for path, shape, whole, dim in pairs
        if dim != 0 and shape[0] == here and whole[0] == planned and not _has_other_samples(shape, whole, dim)
    ] or [
        (path, shape, whole, dim)
        for path, shape, whole, dim in pairs
        if dim is not None and shape[dim] * all_samples != whole[dim] * some
    ]
    for path, shape, whole, dim in wrong:
        how = "leaves it whole" if dim is None else f"cuts its dim {dim}"
        raise ValueError(
            f"local_inputs=True passes each {BATCH_AXIS} rank's own samples, and of input {input_key(path)!r} (shape "
            f"{list(shape)}, planned for {list(whole)}) the plan {how} over {BATCH_AXIS}: plan with "
            f"constraints={{'input:*': {{'{BATCH_AXIS}': 'S(0)'}}}} if its samples are along its first dim, or pass "
            "the whole batch"
        )


def _has_other_samples(shape: Sequence[int], whole: Sequence[int], dim: int | None) -> bool:
    """Whether samples are along ``dim``, of which a call has another number than the plan, and not along the first."""
    return dim is not None and shape[0] == whole[0] and shape[dim] != whole[dim]


def _most_common(sizes: Sequence[int]) -> int | None:
    return max(sizes, key=lambda size: (sizes.count(size), size), default=None)


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
