"""What holds in every plan beyond the kinds of its fields."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from passes.ir.conversions import exists, step_between
from passes.ir.types import parse_type
from passes.plan.plan_data import PlanData, TensorPlan
from passes.plan.step_plan import ChunkPlan, RankMemory, StepCosts, StepPlan

#: What differs more than this is no rounding error of any dtype: a plan that says so would fuse unlike operators.
MAX_TOLERANCE = 1e-3
#: More are no batch of anybody's; each takes time and memory to plan around.
MAX_MICROBATCHES = 2**20
MAX_ELEMENTS = 2**62
#: ``kind`` in the file of a plan of generating text; the file of a step's plan has none.
SERVING = "serving"


class OtherKindOfPlan(ValueError):
    """A plan file of the kind that was not asked for; the message continues one that names the file."""


def check_version(data: Any, version: int, *, kind: str | None = None, where: str = "plan") -> None:
    """``data`` is a table of this kind and version of plan.

    Raises:
        OtherKindOfPlan: if it is of the other kind.
        ValueError: if it is no table, or of another version.
    """
    if not isinstance(data, dict):
        raise ValueError(f"expected a JSON object, got {type(data).__name__}")
    if data.get("kind") != kind and SERVING in (data.get("kind"), kind):
        raise OtherKindOfPlan(
            "is of a training step, and one of generating text is needed: planner plan --serve makes those"
            if kind == SERVING
            else "is of generating text (planner plan --serve), and one of a training step is needed: planner show, "
            "diff, explain and report take both"
        )
    if "version" not in data:
        what = "the config of a model" if "model_type" in data else "a JSON object without a version"
        raise ValueError(f"expected what planner plan -o saves, got {what}")
    if data.get("version") != version:
        raise ValueError(
            f"{where} version {data.get('version')!r} is not supported: this program reads version {version}; "
            "plan again"
        )


def check_plan(plan: PlanData) -> None:
    """Whatever holds in every plan of a step."""
    check_structure(plan)
    check_placements(plan)
    check_step(plan)


def check_structure(plan: PlanData) -> None:
    """Every list has the length, every count the range, that whoever reads the plan relies on."""
    for kind, tensors in (("inputs", plan.inputs), ("states", plan.states), ("outputs", plan.outputs)):
        for name, tensor in tensors.items():
            _check_shape(f"{kind}.{name}", tensor)
    for index, block in enumerate(plan.blocks):
        widths = {len(roots) for roots in block.roots}
        if len(widths) != 1 or 0 in widths:
            raise ValueError(f"blocks[{index}].roots: expected as many module paths for each copy, one or more")
    _check_shared_gathers(plan)
    fusion = plan.fusion
    if fusion is not None:
        if (len(fusion.operators), len(fusion.saved_bytes)) != (2, 2):
            raise ValueError("fusion: expected two numbers, before and after, as operators and as saved_bytes")
        if not 0.0 <= fusion.tolerance <= MAX_TOLERANCE:
            raise ValueError(f"fusion.tolerance: expected 0 to {MAX_TOLERANCE:g}, got {fusion.tolerance:g}")
    _check_stages(plan.step)


def _check_shared_gathers(plan: PlanData) -> None:
    """Each group has two operators of the plan or more, with one strategy, and no operator is in two groups."""
    keys = [key for group in plan.shared_gathers for key in group]
    unknown = [key for key in keys if key not in plan.nodes]
    if unknown or len(set(keys)) < len(keys):
        wrong = unknown[0] if unknown else next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"shared_gathers: expected operators of the plan, each once, got {wrong!r}")
    for group in plan.shared_gathers:
        if len(group) < 2 or len({plan.nodes[key].strategy for key in group}) > 1:
            raise ValueError(f"shared_gathers: expected two operators or more with one strategy, got {list(group)}")


def _check_shape(where: str, tensor: TensorPlan) -> None:
    if math.prod(tensor.shape) > MAX_ELEMENTS:
        raise ValueError(f"{where}: a tensor of {math.prod(tensor.shape):.1e} elements")


def _check_stages(step: StepPlan) -> None:
    counts = {
        **{f"axes.{name}": size for name, size in step.axes.items()},
        "local_batch": step.local_batch,
        "num_microbatches": step.num_microbatches,
        "chunks_per_rank": step.chunks_per_rank,
    }
    for name, count in counts.items():
        if not 1 <= count <= MAX_MICROBATCHES:
            raise ValueError(f"step.{name}: expected 1 to {MAX_MICROBATCHES:,}, got {count:,}")
    ranks = step.axes.get("pp", 1)
    if len(step.chunks) != ranks * step.chunks_per_rank:
        raise ValueError(
            f"step.chunks: expected {step.chunks_per_rank} for each of {ranks} pipeline ranks, got {len(step.chunks)}"
        )
    if len(step.memory) != ranks:
        raise ValueError(f"step.memory: expected one entry for each of {ranks} pipeline ranks, got {len(step.memory)}")
    for index, chunk in enumerate(step.chunks):
        if chunk.rank >= ranks:
            raise ValueError(f"step.chunks[{index}].rank: expected less than {ranks}, got {chunk.rank}")
        _check_costs(f"step.chunks[{index}]", chunk, told_apart=step.decides_units)
        for group in chunk.groups:
            if group.count < 1 or group.zero > 3:
                raise ValueError(
                    f"step.chunks[{index}]: expected groups of at least one unit and ZeRO stages 0 to 3, got "
                    f"{group.count} units of stage {group.zero}"
                )
    _check_zero_ranks(step)
    _check_predictions(step)


def _check_predictions(step: StepPlan) -> None:
    """Seconds, shares and bytes are finite, and none is below zero."""
    rows: list[tuple[str, StepCosts | RankMemory]] = [("step.costs", step.costs)]
    rows += [(f"step.memory[{rank}]", memory) for rank, memory in enumerate(step.memory)]
    for where, row in rows:
        for entry in dataclasses.fields(row):
            if not 0.0 <= getattr(row, entry.name) < math.inf:
                raise ValueError(
                    f"{where}.{entry.name}: expected a finite number of 0 or more, got {getattr(row, entry.name):g}"
                )


def _check_zero_ranks(step: StepPlan) -> None:
    """ZeRO divides over all data ranks, or over neighbours that make up all of them in several groups."""
    ranks = step.zero_ranks
    if not ranks:
        return
    experts = step.axes.get("ep", 1)
    if experts > 1 and (ranks % experts or ranks == experts):
        raise ValueError(
            f"step.zero_ranks: {ranks}, but ranks of every place on ep={experts} must be among them in equal and in "
            f"several numbers, so that experts divide over them too: expected 0 or {2 * experts}, {3 * experts} …"
        )
    if not 1 < ranks < step.data_ranks or step.data_ranks % ranks:
        raise ValueError(
            f"step.zero_ranks: expected 0 (all), or 2 or more that divide the {step.data_ranks} data ranks, got {ranks}"
        )
    if not any(step.zero):
        raise ValueError(f"step.zero_ranks: {ranks}, but no unit has a ZeRO stage from 1 to 3: expected 0")


def _check_costs(where: str, chunk: ChunkPlan, *, told_apart: bool) -> None:
    """A chunk's costs are those of its groups, one by one; of the whole model where units are not told apart."""
    counts = [count for _, count in chunk.costs.layers]
    expected = [group.count for group in chunk.groups] if told_apart else [1]
    if counts != expected or len(chunk.parts) != len(expected):
        raise ValueError(
            f"{where}: expected costs and parts of {len(expected)} groups of {expected} units, got costs of {counts} "
            f"and {len(chunk.parts)} parts"
        )


def check_placements(plan: PlanData) -> None:
    """Every placement has one readable type for each mesh axis."""
    placements = [
        *((f"inputs.{name}", tensor.placement) for name, tensor in plan.inputs.items()),
        *((f"states.{name}", tensor.placement) for name, tensor in plan.states.items()),
        *((f"outputs.{name}", tensor.placement) for name, tensor in plan.outputs.items()),
        *((f"nodes.{key}", placement) for key, node in plan.nodes.items() for placement in node.outputs),
        *((f"conversions of {item.value}", p) for item in plan.conversions for p in (item.source, item.target)),
        *((f"blocks of {block.first_node}", placement) for block in plan.blocks for placement in block.carried),
    ]
    for where, placement in placements:
        if len(placement) != len(plan.mesh.names):
            raise ValueError(f"{where}: {len(placement)} types for the {len(plan.mesh.names)} axes of mesh {plan.mesh}")
        for spmd_type in placement:
            parse_type(spmd_type)
    for conversion in plan.conversions:
        step = step_between(conversion.source, conversion.target) if conversion.source != conversion.target else None
        if step is None or not exists(step) or conversion.axis != step.axis_name(plan.mesh):
            raise ValueError(f"conversions of {conversion.value}: no axis {conversion.axis!r} in mesh {plan.mesh}")


def check_step(plan: PlanData) -> None:
    """The mesh of a plan is its step's without the pipeline, and every sample is in a micro-batch."""
    step = plan.step
    if sorted(step.axes) != sorted(("pp", *plan.mesh.names)):
        raise ValueError(f"step: axes {', '.join(step.axes)} do not go with mesh {plan.mesh}")
    for name, size in plan.mesh.as_dict().items():
        if step.axes[name] != size:
            raise ValueError(f"step: axis {name!r} has size {step.axes[name]}, but {size} in mesh {plan.mesh}")
    _check_num_devices(plan)
    for name, unit in (("interval", "seconds"), ("memory_interval", "numbers of bytes")):
        interval = getattr(step, name)
        if interval is not None and not 0.0 <= interval[0] <= interval[1] < math.inf:
            raise ValueError(f"step.{name}: expected two finite {unit} in order, got {interval}")
    if step.stage_devices and len(step.stage_devices) != step.axes["pp"]:
        raise ValueError(f"step.stage_devices: {len(step.stage_devices)} for {step.axes['pp']} pipeline ranks")
    if not step.decides_units:
        _check_one_chunk(step)
        return
    samples = step.sample_groups * step.num_microbatches * step.local_batch
    if samples != step.global_batch:
        raise ValueError(
            f"step: {step.num_microbatches} micro-batches of {step.local_batch} on {step.sample_groups} groups "
            f"are {samples} samples, not {step.global_batch}"
        )


def _check_num_devices(plan: PlanData) -> None:
    """The cluster, as far as it can be read, has as many devices as the mesh."""
    levels = plan.cluster.get("levels")
    if not isinstance(levels, list) or not levels or not all(isinstance(level, dict) for level in levels):
        return
    num_devices = 1
    for level in levels:
        size = level.get("size")
        if not isinstance(size, int):
            return
        num_devices *= size
    if num_devices != plan.step.num_devices:
        raise ValueError(f"cluster: {num_devices} devices, but the axes of the step have {plan.step.num_devices}")


def _check_one_chunk(step: StepPlan) -> None:
    """Units are told apart unless one chunk runs the whole batch at once."""
    if len(step.chunks) != 1 or step.num_microbatches != 1:
        raise ValueError(
            f"step.chunks: {len(step.chunks)} chunks and {step.num_microbatches} micro-batches, but no groups of units"
        )
    if step.global_batch % step.local_batch:
        raise ValueError(f"step: {step.local_batch} samples on a device do not divide {step.global_batch}")
