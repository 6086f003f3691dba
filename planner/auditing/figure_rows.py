"""Rows of an audit: the seconds and bytes that a plan claims, beside those priced and counted again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from cost_models.step import LayerCosts
from passes.plan import ConversionPlan, Plan
from passes.plan.step_plan import RankMemory, StepPlan
from passes.plan.text_tables import format_bytes
from planner.auditing.audit_report import BYTES, NUMBER, SECONDS, SHARE, AuditRow, compared, unchecked
from planner.auditing.interval_rows import interval_rows
from planner.auditing.repriced_step import RepricedStep, reprice
from planner.auditing.subject import AuditSubject
from planner.sharding_ilp.model_figures import batch_size_of, compute_dtype, model_flops


def figure_rows(subject: AuditSubject) -> Iterator[AuditRow]:
    """Objective, simulated seconds, costs of a micro-batch, memory, conversions, intervals.

    Raises:
        ValueError: as ``reprice``.
    """
    plan = subject.plan
    priced = reprice(subject.graph, plan, subject.cluster)
    yield compared("objective (closed form of the step)", plan.certificate.objective, priced.seconds.total)
    yield from _time_rows(subject, priced)
    yield from _chunk_rows(plan, priced)
    yield from _micro_batch_rows(plan, priced)
    yield from _memory_rows(plan, priced)
    yield from _limit_rows(subject, priced)
    yield from interval_rows(subject, priced)
    yield _conversion_row(plan.conversions, priced.walk.conversions)
    yield from _extrapolation_rows(priced)


def _extrapolation_rows(priced: RepricedStep) -> Iterator[AuditRow]:
    """Of a measured cluster: kinds of work and collectives that are priced beyond the largest call that was timed."""
    if priced.extrapolation is None:
        return
    for name, (size, factor) in sorted(priced.extrapolation.furthest.items()):
        measured = priced.extrapolation.profile.ranges[name]
        reach = f"{size:.3g} {measured.unit}, measured up to {measured.most:.3g}"
        yield unchecked(f"beyond what was measured, {name}", f"{factor:.3g} times", reach)


def _time_rows(subject: AuditSubject, priced: RepricedStep) -> Iterator[AuditRow]:
    """Seconds of the step by the closed form and by the simulator, and what follows from them."""
    costs, seconds, report = subject.plan.step.costs, priced.seconds, priced.simulated()
    yield compared("step, closed form", costs.seconds, seconds.total)
    yield compared("step, simulated", costs.simulated, report.seconds)
    yield compared("pipeline", costs.pipeline, seconds.pipeline)
    yield compared("gradient reductions left over", costs.tail, seconds.tail, least=seconds.total)
    yield compared("optimizer", costs.update, seconds.update, least=seconds.total)
    yield compared("bubble", costs.bubble, max(rank.bubble_fraction for rank in report.ranks), SHARE, least=1.0)
    exposed = max(rank.exposed_seconds for rank in report.ranks)
    yield compared("exposed communication", costs.exposed, _ratio(exposed, report.seconds), SHARE, least=1.0)
    flops, cluster = model_flops(subject.graph), subject.cluster
    dtype, step = compute_dtype(subject.graph), subject.plan.step
    peak = cluster.peak_flops(dtype) if step.stage_devices else cluster.device.peak_flops(dtype) * step.num_devices
    yield compared("model flops", costs.flops, flops, NUMBER)
    yield compared("utilisation", costs.utilisation, _ratio(flops, report.seconds * peak), SHARE)
    samples = batch_size_of(subject.graph)
    yield compared("samples in a step", subject.plan.step.global_batch, samples, NUMBER)
    yield compared("samples per second", costs.samples_per_second, _ratio(samples, report.seconds), NUMBER)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _chunk_rows(plan: Plan, priced: RepricedStep) -> Iterator[AuditRow]:
    """Seconds of each chunk for one micro-batch."""
    for phase in ("forward", "backward"):
        claimed = [float(getattr(chunk, phase)) for chunk in plan.step.chunks]
        summed = [sum(getattr(layer, phase) * count for layer, count in chunk.layers) for chunk in priced.step.chunks]
        rows = [compared(f"chunk, {phase}", ours, again) for ours, again in zip(claimed, summed, strict=True)]
        yield _worst(rows, "chunk")
    rows = [row for index in range(len(plan.step.chunks)) for row in _layer_rows(plan, priced, index)]
    for unit in (SECONDS, BYTES):
        yield _worst([row for row in rows if row.unit == unit], "figure")


def _layer_rows(plan: Plan, priced: RepricedStep, index: int) -> Iterator[AuditRow]:
    """Every figure of the units of a chunk; what seconds are made of adds up to them."""
    chunk, again = plan.step.chunks[index], priced.step.chunks[index]
    for (claimed, _), (repriced, _), parts in zip(chunk.costs.layers, again.layers, chunk.parts, strict=True):
        least = repriced.forward + repriced.backward
        for figure in (field.name for field in dataclasses.fields(LayerCosts)):
            unit = BYTES if figure.endswith("_bytes") else SECONDS
            ours, recomputed = getattr(claimed, figure), getattr(repriced, figure)
            yield compared(f"units, {figure}", ours, recomputed, unit, least=0.0 if unit == BYTES else least)
        for phase in ("forward", "backward"):
            yield compared(f"units, {phase} by cause", getattr(parts, phase), getattr(repriced, phase))
    for phase in ("receive_forward", "receive_backward"):
        yield compared(f"chunk, {phase}", getattr(chunk.costs, phase), getattr(again, phase))


def _micro_batch_rows(plan: Plan, priced: RepricedStep) -> Iterator[AuditRow]:
    """Of one micro-batch through the whole model: seconds by stream, and bytes if nothing is recomputed or divided."""
    costs, again = plan.costs, priced.walk.costs
    for stream in ("compute", "communication"):
        for phase in ("forward", "backward"):
            name = f"{stream}_{phase}"
            claimed, repriced = getattr(costs, name), getattr(again, name)
            yield compared(f"one micro-batch, {stream} {phase}", claimed, repriced, least=again.total)
    parts = dict.fromkeys((*again.memory, *costs.memory))
    rows = [compared("", costs.memory.get(part, 0), again.memory.get(part, 0), BYTES) for part in parts]
    differing = next((part for part, row in zip(parts, rows) if not row.ok), "")
    claimed_bytes, counted = sum(costs.memory.values()), sum(again.memory.values())
    row = compared("one micro-batch, memory without recomputation", claimed_bytes, counted, BYTES)
    yield dataclasses.replace(row, ok=not differing, why=f"{differing} differ" if differing else "")


def _memory_rows(plan: Plan, priced: RepricedStep) -> Iterator[AuditRow]:
    """Bytes of the ranks at their peak, by part and together."""
    for part in (field.name for field in dataclasses.fields(RankMemory)):
        rows = [
            compared(f"memory at its peak, {part}", getattr(ours, part), getattr(again, part), BYTES, least=total)
            for ours, again, total in zip(plan.step.memory, priced.parts, priced.memory, strict=True)
        ]
        yield _worst(rows, "rank")
    totals = zip(plan.step.memory, priced.memory, strict=True)
    yield _worst([compared("memory at its peak", ours.total, again, BYTES) for ours, again in totals], "rank")


def _worst(rows: Sequence[AuditRow], of_what: str) -> AuditRow:
    """One row for all chunks or ranks: that which differs, or if none does the largest."""
    index = max(range(len(rows)), key=lambda index: (not rows[index].ok, rows[index].recomputed))
    if len(rows) == 1:
        return rows[0]
    which = f"{of_what} {index} of {len(rows)}"
    return dataclasses.replace(rows[index], why=f"{which}, the largest" if rows[index].ok else which)


def _limit_rows(subject: AuditSubject, priced: RepricedStep) -> Iterator[AuditRow]:
    """The memory limit, and whether the fullest rank keeps it if the search had to; of unequal devices each its own."""
    step, demanded = subject.plan.step, subject.plan.certificate.demands.get("memory_limit")
    limits = [_limit(usable, demanded, step) for usable in priced.usable] or [
        _limit(subject.cluster.device.usable_bytes, demanded, step)
    ]
    yield compared("memory limit", step.memory_limit, max(limits), BYTES)
    for rank, (claimed, limit) in enumerate(zip(step.stage_devices, limits)):
        yield compared(f"memory limit of rank {rank}", claimed.memory_limit, limit, BYTES)
    if step.decides_units or demanded is not None:
        by_rank = limits if len(limits) > 1 else limits * len(priced.memory)
        kept = [used <= limit * (1.0 + 1e-9) for used, limit in zip(priced.memory, by_rank, strict=True)]
        why = "" if all(kept) else "the fullest rank holds more"
        most = f"at most {format_bytes(max(limits))}"
        yield AuditRow("memory limit kept", most, max(priced.memory), BYTES, all(kept), why)


def _limit(usable: float, demanded: float | None, step: StepPlan) -> float:
    """Bytes that a plan may take on a device with ``usable`` bytes."""
    if not step.decides_units:
        return usable if demanded is None else demanded
    return (usable if demanded is None else min(usable, demanded)) * (1.0 - step.headroom)


def _conversion_row(claimed: Iterable[ConversionPlan], counted: Iterable[ConversionPlan]) -> AuditRow:
    """Every conversion with its copies, collectives and bytes."""
    ours, again = set(claimed), set(counted)
    wrong = sorted(ours ^ again, key=lambda conversion: (conversion.value, conversion.target))
    why = f"{wrong[0].value} to {' '.join(wrong[0].target)} is done otherwise" if wrong else ""
    return AuditRow("conversions", float(len(ours)), float(len(again)), NUMBER, not wrong, why)
