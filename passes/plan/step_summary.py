"""The plan of a whole training step as text: layout, stages, memory, where the time goes, and why it is this one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from cost_models import Cluster
from cost_models.hardware import crossed_levels
from cost_models.text import counted
from cost_models.told_apart import are_told_apart
from passes.plan.host_memory import host_lines
from passes.plan.plan_data import PlanData
from passes.plan.stage_table import format_numbers, memory_table, stage_table
from passes.plan.step_plan import CALLERS, Alternative, RankMemory, StepPlan
from passes.plan.text_tables import (
    format_bytes,
    format_bytes_between,
    format_change,
    format_list,
    format_rate,
    format_seconds,
    format_seconds_between,
    format_table,
)

#: A rank this full says that memory shapes the plan.
NEARLY_FULL = 0.9

#: How a note begins that some devices would be faster without the others: told in short, too.
FASTER_ALONE = "faster alone: "
#: Runners-up that are told in short.
BRIEF_ALTERNATIVES = 2
#: Statuses of a search that stopped early.
TIME_LIMIT, EFFORT_LIMIT = "time limit", "effort limit"
_LIMITS = {TIME_LIMIT: "time limit", EFFORT_LIMIT: "max_programs"}


def summarise_step(plan: PlanData, step: StepPlan) -> list[str]:
    """The parts of the text, in order."""
    return [
        _headline(plan, step),
        layout_table(plan, step),
        _batch(step),
        stage_table(step, plan.blocks) if step.decides_units else "",
        memory_table(step),
        *host_lines(plan.cluster, step),
        _time(step) if step.decides_units else "",
        format_list("Why", list(_why(plan, step))),
        _search(plan, step),
        _alternatives(step),
        format_list("Notes", plan.notes),
    ]


def brief_step(plan: PlanData, step: StepPlan) -> str:
    """What matters first, in ten lines: time, mesh on its links, batch, what is recomputed, memory, the next best."""
    costs, certificate = step.costs, plan.certificate
    simulated = format_seconds_between(costs.simulated, step.interval)
    lines = [
        headline(plan, step),
        f"{simulated} a step as simulated ({format_seconds(costs.seconds)} by the objective)",
        f"{_throughput(plan, step)}",
        f"model flops utilisation {costs.utilisation:.1%}; lower bound {format_seconds(certificate.bound)}, gap "
        f"{certificate.gap:.2%}{f' ({stopped_by(plan)})' * bool(stopped_by(plan))}",
        *_brief_links(plan, step),
        _batch(step).splitlines()[0],
    ]
    if step.decides_units:
        chunks = f", {step.chunks_per_rank} chunks a rank" if step.chunks_per_rank > 1 else ""
        schedule = f"{step.schedule}{chunks}; " if step.axes.get("pp", 1) > 1 else ""
        zero = ", ".join(map(str, step.zero)) + step.zero_over
        lines.append(f"{schedule}recompute {', '.join(step.recompute)}; ZeRO {zero}")
    fullest, limit = step.memory[step.fullest_rank], step.memory_limit_of(step.fullest_rank)
    share = f" of {format_bytes(limit)} ({fullest.total / limit:.0%})" if limit else ""
    if step.stage_devices:
        lines.append(f"stages on {', '.join(_stages_on_devices(step))}")
    most, _ = _largest_parts(fullest)[0]
    lines += host_lines(plan.cluster, step)
    lines.append(
        f"fullest device {format_bytes_between(fullest.total, step.memory_interval)}{share}, most of it {most}"
    )
    lines += [_brief_alternative(other, costs.simulated) for other in step.alternatives[:BRIEF_ALTERNATIVES]]
    lines += [note for note in plan.notes if note.startswith(FASTER_ALONE)]
    return "\n".join(lines) + "\n"


def _brief_alternative(other: Alternative, seconds: float) -> str:
    """A runner-up of a plan that takes so many ``seconds``, and whether predictions tell them apart."""
    name = "faster" if other.simulated < seconds else "next best"
    return f"{name}, {format_change(other.simulated, seconds)}{not_told_apart(other, seconds)}: {other.what}"


def not_told_apart(other: Alternative, seconds: float) -> str:
    """What to add to how a runner-up compares with so many ``seconds``: nothing if predictions tell them apart."""
    return "" if are_told_apart(other.simulated, seconds) else " (not told apart)"


def headline(plan: PlanData, step: StepPlan) -> str:
    """What is planned, where, and on which axes: ``gpt2 on 8 devices of dgx-a100:1: dp=4, tp=2``."""
    sizes = ", ".join(f"{axis}={size}" for axis, size in step.axes.items() if size > 1) or "nothing divided"
    cluster = plan.cluster.get("name", "an unnamed cluster")
    return f"{plan.model} on {counted(step.num_devices, 'device')} of {cluster}: {sizes}"


def stopped_by(plan: PlanData) -> str:
    """The limit that stopped the plan's search; empty if it ended by itself."""
    return next((words for limit, words in _LIMITS.items() if limit in plan.certificate.status), "")


def _stages_on_devices(step: StepPlan) -> Iterator[str]:
    """Ranks that follow each other on equal devices: ``0–1: NVIDIA A100 SXM 80GB (24 units)``."""
    units = {chunk.rank: sum(group.count for group in chunk.groups) for chunk in step.chunks}
    names = [device.name for device in step.stage_devices]
    for name, ranks in itertools.groupby(range(len(names)), key=names.__getitem__):
        together = list(ranks)
        yield f"{format_numbers(together)}: {name} ({' + '.join(str(units[rank]) for rank in together)} units)"


def _brief_links(plan: PlanData, step: StepPlan) -> Iterator[str]:
    """The links of the axes, those on the same links together."""
    stride, by_links = step.num_devices, dict[str, list[str]]()
    for axis, size in step.axes.items():
        stride //= size
        if size > 1:
            by_links.setdefault(" + ".join(_links(plan.cluster, stride=stride, size=size)), []).append(axis)
    if any(by_links):
        yield "; ".join(f"{', '.join(axes)} over {links}" for links, axes in by_links.items() if links)


def _headline(plan: PlanData, step: StepPlan) -> str:
    costs, certificate = step.costs, plan.certificate
    simulated = format_seconds_between(costs.simulated, step.interval)
    axes = ",".join(f"{name}={size}" for name, size in step.axes.items())
    kind = "a training step" if plan.training else "an inference step"
    cluster = plan.cluster.get("name", "an unnamed cluster")
    lines = [
        f"{plan.model}: {kind} on {counted(step.num_devices, 'device')} of {cluster} ({axes})",
        f"{simulated} a step as simulated, {format_seconds(costs.seconds)} by the objective",
        f"{_throughput(plan, step)}; model flops utilisation {costs.utilisation:.1%}",
        f"lower bound {format_seconds(certificate.bound)}, gap {certificate.gap:.3%} ({certificate.status})",
    ]
    return "\n".join(lines)


def _throughput(plan: PlanData, step: StepPlan) -> str:
    rate = step.costs.samples_per_second
    text = f"{format_rate(rate)} samples/s"
    tokens = tokens_per_sample(plan)
    if not tokens:
        return text
    return f"{text}, {rate * tokens:,.0f} tokens/s ({rate * tokens / step.num_devices:,.0f} a device)"


def tokens_per_sample(plan: PlanData) -> int | None:
    """Length of the first input if it is [batch, sequence] of integers, else None."""
    first = next(iter(plan.inputs.values()), None)
    if first is None or len(first.shape) != 2 or not first.dtype.startswith("int"):
        return None
    return first.shape[1]


def seq_len_of(plan: PlanData) -> int | None:
    """The ``seq_len`` that the plan was asked for: tokens of a sample, of speech its labels; None for other samples."""
    ids = (value.shape for value in plan.inputs.values() if value.dtype.startswith("int") and len(value.shape) == 2)
    return next((length for _, length in ids), None)


def layout_table(plan: PlanData, step: StepPlan) -> str:
    """The axes of a mesh with the links that they run on."""
    rows = []
    stride = step.num_devices
    for axis, size in step.axes.items():
        stride //= size
        if size > 1:
            rows.append([axis, str(size), str(stride), " + ".join(_links(plan.cluster, stride=stride, size=size))])
    return format_table("Layout, outermost axis first", ("axis", "size", "stride", "runs on"), rows)


def _links(cluster: Mapping[str, Any], *, stride: int, size: int) -> Iterator[str]:
    """The link levels that an axis uses, innermost first."""
    try:
        levels = Cluster.from_dict(cluster).levels
    except ValueError:
        return  # a plan made for prices that are not a cluster's
    for level in crossed_levels(levels, stride=stride, size=size):
        yield f"{level.name} ({level.bandwidth / 1e9:g} GB/s)"


def _batch(step: StepPlan) -> str:
    dp, ep, m = step.axes.get("dp", 1), step.axes.get("ep", 1), step.num_microbatches
    experts = f" × ep {ep:,}" if ep > 1 else ""
    if step.decides_units:
        cut = f"= dp {dp:,}{experts} × {counted(m, 'micro-batch')} × {counted(step.local_batch, 'sample')}"
    else:
        cut = f"at once, {step.local_batch:,} on each device"
    lines = [f"Batch: {counted(step.global_batch, 'sample')} {cut}"]
    if step.axes.get("pp", 1) > 1:
        chunks = f", {step.chunks_per_rank} chunks a rank" if step.chunks_per_rank > 1 else ""
        lines.append(f"Schedule: {step.schedule}{chunks}")
    if step.zero_ranks:
        lines.append(f"ZeRO divides{step.zero_over}; what those reduced is summed over the others once a step")
    kernels = "fused by torch.compile" if step.compiled else "one kernel an operator"
    lines.append(f"Training: {_training(step)}; {kernels}")
    return "\n".join(lines)


def _training(step: StepPlan) -> str:
    if step.optimizer == CALLERS:
        return "the caller's optimizer (memory counts AdamW's state, time none), gradients in the parameters' dtypes"
    where = " on the host" if step.optimizer_on_host else ""
    return f"{step.optimizer}{where}, gradients in {step.gradient_dtype or 'float32 or wider'}"


def busy_seconds(step: StepPlan) -> float:
    """Seconds of all micro-batches on the busiest rank."""
    loads: dict[int, float] = {}
    for chunk in step.chunks:
        loads[chunk.rank] = loads.get(chunk.rank, 0.0) + chunk.forward + chunk.backward
    return step.num_microbatches * max(loads.values(), default=0.0)


def _time(step: StepPlan) -> str:
    costs, busy = step.costs, busy_seconds(step)
    parts = {
        "micro-batches on the busiest rank": busy,
        "pipeline filling and draining, waiting for communication": costs.pipeline - busy,
        "gradient reductions left over": costs.tail,
        "optimizer, parameters gathered again": costs.update,
        "step": costs.seconds,
    }
    rows = [
        [name, format_seconds(max(0.0, seconds)), _share(seconds, costs.seconds)] for name, seconds in parts.items()
    ]
    rows.append(["step, simulated", format_seconds(costs.simulated), _share(costs.simulated, costs.seconds)])
    table = format_table("Time of one step", ("part", "seconds", "share"), rows)
    return (
        f"{table}\n  bubble {costs.bubble:.1%}, exposed communication {costs.exposed:.1%} (most of any rank, simulated)"
    )


def _share(part: float, whole: float) -> str:
    return f"{max(0.0, part) / whole:.1%}" if whole else ""


def _why(plan: PlanData, step: StepPlan) -> Iterator[str]:
    """What limits the step, and what the next best plan would have cost."""
    yield _memory_reason(step)
    costs = plan.costs
    collectives = costs.communication_forward + costs.communication_backward
    if collectives and costs.total:
        yield f"collectives inside layers that compute waits for: {collectives / costs.total:.1%} of a micro-batch"
    if step.costs.exposed >= 0.01:
        yield f"communication that finds nothing to hide behind: {step.costs.exposed:.1%} of the step"
    waiting = _launch_seconds(step)
    if waiting >= 0.01 * step.costs.seconds > 0:
        share = _share(waiting, step.costs.seconds)
        yield f"waiting for the host to launch operators: {share} of the step"
    if step.axes.get("pp", 1) > 1:
        passing = f"{counted(step.num_microbatches, 'micro-batch')} pass {counted(step.axes['pp'], 'rank')}"
        yield f"pipeline bubble {step.costs.bubble:.1%}: {passing}"
    if step.alternatives:
        yield _against(step, step.alternatives[0])
    if TIME_LIMIT in plan.certificate.status:
        bound = format_seconds(plan.certificate.bound)
        yield f"the search ran out of time: a better plan may exist, down to {bound} (a longer time limit would tell)"
    if EFFORT_LIMIT in plan.certificate.status:
        bound = format_seconds(plan.certificate.bound)
        yield f"the search reached max_programs: a better plan may exist, down to {bound} (more programs would tell)"


def _launch_seconds(step: StepPlan) -> float:
    """Seconds of all micro-batches in which the rank that does so the longest waits for its host."""
    waits: dict[int, float] = {}
    for chunk in step.chunks:
        for (_, count), parts in zip(chunk.costs.layers, chunk.parts, strict=True):
            each = count * (parts.host_forward + parts.host_backward)
            waits[chunk.rank] = waits.get(chunk.rank, 0.0) + each
    return step.num_microbatches * max(waits.values(), default=0.0)


def _memory_reason(step: StepPlan) -> str:
    rank = step.fullest_rank
    memory = step.memory[rank]
    full = memory.total / step.memory_limit_of(rank) if step.memory_limit else 0.0
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in _largest_parts(memory))
    where = f"rank {rank} is" if len(step.memory) > 1 else "each device is"
    verdict = (
        "memory does not suffice" if full > 1.0 else "memory binds" if full >= NEARLY_FULL else "memory does not bind"
    )
    paid = [policy for policy in step.recompute if policy != "none"]
    price = f"; recomputed to fit or to save time: {', '.join(paid)}" if paid else ""
    between = f", {format_bytes_between(memory.total, step.memory_interval)}" if step.memory_interval else ""
    return f"{verdict}: {where} {full:.1%} full{between} (most of it {largest}){price}"


def _largest_parts(memory: RankMemory) -> list[tuple[str, float]]:
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "transient": memory.transient,
    }
    return sorted(parts.items(), key=lambda part: -part[1])[:2]


def _against(step: StepPlan, other: Alternative) -> str:
    costs = step.costs
    fullest = max(memory.total for memory in step.memory)
    simulated, objective = format_change(other.simulated, costs.simulated), format_change(other.seconds, costs.seconds)
    return (
        f"closest other plan that was solved: {other.what}: {simulated} time as simulated, {objective} by the "
        f"objective, {format_bytes(other.memory)} against {format_bytes(fullest)} on the fullest device"
    )


def _search(plan: PlanData, step: StepPlan) -> str:
    counts = "; ".join(f"{name} {count:,}" for name, count in step.search.items())
    lines = ["Certificate", *(f"  {line}" for line in certificate_lines(plan, step))]
    return "\n".join([*lines, f"  layouts × micro-batches × schedules: {counts}"] if counts else lines)


def certificate_lines(plan: PlanData, step: StepPlan) -> list[str]:
    """The objective with its bound, and the size of the program that was solved."""
    certificate = plan.certificate
    program = "stages" if step.decides_units else "shardings"
    return [
        f"objective {format_seconds(certificate.objective)}, no plan searched takes less than "
        f"{format_seconds(certificate.bound)}: gap {certificate.gap:.3%} ({certificate.status})",
        f"{certificate.solver}; {program}: {counted(certificate.num_variables, 'variable')}, "
        f"{counted(certificate.num_constraints, 'constraint')}",
    ]


def _alternatives(step: StepPlan) -> str:
    rows = [
        [
            other.what,
            format_seconds(other.seconds),
            format_seconds(other.simulated) + not_told_apart(other, step.costs.simulated),
            format_bytes(other.memory),
        ]
        for other in step.alternatives
    ]
    return format_table("Runners-up that were solved", ("plan", "seconds", "simulated", "memory"), rows)
