"""What a worker of a sweep does: one row is planned, and comes back as plain data, whatever happens."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cost_models import Cluster
from passes.plan import Plan
from passes.plan.step_plan import StepPlan
from passes.plan.step_summary import tokens_per_sample
from planner.planning import graph_to_plan, plan
from planner.sweeps.row_request import RowRequest


def plan_row(request: RowRequest) -> dict[str, Any]:
    """Plan a row.

    Returns:
        ``{"record": …, "plan": text of the plan or None, "seconds": …, "processor_seconds": …}``. The record has the
        row's ``figures`` and ``baselines``, or its ``error`` and whether that is ``final``: what is wrong with the
        request is wrong at every attempt, anything else may be the machine's fault and is tried again by the next run.
    """
    clock, processor = time.perf_counter(), time.process_time()
    text: str | None = None
    try:
        planned = _planned(request)
        record = {"figures": figures(planned), "baselines": _baselines(planned, request)}
        text = planned.to_json()
    except Exception as error:  # one row's error is that row's; the others are planned
        record = error_record(error)
    return {
        "record": record,
        "plan": text,
        "seconds": time.perf_counter() - clock,
        "processor_seconds": time.process_time() - processor,
    }


def error_record(error: Exception) -> dict[str, Any]:
    """The record of a row that has no plan."""
    text = " ".join(str(error).split())
    final = isinstance(error, ValueError)
    return {"error": text if final else f"{type(error).__name__}: {text or 'no more is known'}", "final": final}


def _planned(request: RowRequest) -> Plan:
    cluster = Cluster.from_dict(request.cluster_data)
    if request.num_devices > cluster.num_devices:
        raise ValueError(f"{request.cluster} has {cluster.num_devices:,} devices, fewer than {request.num_devices:,}")
    return plan(
        request.model_path,
        cluster,
        num_devices=request.num_devices if request.num_devices != cluster.num_devices else None,
        global_batch=request.global_batch,
        seq_len=request.seq_len,
        time_limit=math.inf,  # a clock would make the table depend on how busy the machine is
        max_programs=request.max_programs,
        **request.arguments,
    )


def figures(planned: Plan) -> dict[str, Any]:
    """What a table says of a plan: seconds, bytes, and its choice in words."""
    step, costs, certificate = planned.step, planned.step.costs, planned.certificate
    tokens = tokens_per_sample(planned)
    return {
        "devices": step.num_devices,
        "step_seconds": costs.simulated,
        **_bounds("step_seconds", step.interval),
        "closed_form_seconds": costs.seconds,
        "samples_per_second": costs.samples_per_second,
        "tokens_per_second": None if tokens is None else costs.samples_per_second * tokens,
        "utilisation": costs.utilisation,
        "memory_bytes": max(rank.total for rank in step.memory),
        **_bounds("memory_bytes", step.memory_interval),
        "memory_limit_bytes": step.memory_limit,
        "bound_seconds": certificate.bound,
        "gap": certificate.gap,
        "status": certificate.status,
        "choice": choice_text(step),
    }


def _bounds(name: str, interval: tuple[float, float] | None) -> dict[str, float | None]:
    """The interval of a figure, None where it has none."""
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def choice_text(step: StepPlan) -> str:
    """Mesh, micro-batches, schedule, recomputation and ZeRO in one line."""
    mesh = "×".join(f"{axis}{size}" for axis, size in step.axes.items() if size > 1) or "one device"
    schedule = step.schedule + (f"×{step.chunks_per_rank}" if step.chunks_per_rank > 1 else "")
    parts = [mesh, f"{step.num_microbatches}×{step.local_batch} samples"]
    if step.axes.get("pp", 1) > 1:
        parts.append(schedule)
    parts.append(f"recompute {'+'.join(step.recompute)}")
    parts.append(f"ZeRO {'+'.join(map(str, sorted(step.zero)))}{step.zero_over}")
    return ", ".join(parts)


def _baselines(planned: Plan, request: RowRequest) -> Mapping[str, Any]:
    """Baseline → its seconds (None: it cannot run), memory, and what it is or why it cannot."""
    if not request.baselines:
        return {}
    from planner.inspection.baseline_comparison import compare, needs_config
    from planner.library import load_config

    arguments = request.arguments
    with graph_to_plan(
        request.model_path,
        fuse=arguments.get("fuse", True),
        batch_size=request.global_batch,
        seq_len=request.seq_len,
        dtype=arguments.get("dtype"),
    ) as graph:
        config = load_config(request.model_path) if needs_config(request.baselines) else None
        layouts = compare(planned, graph.graph, request.baselines, config=config, max_programs=request.max_programs)
    return {layout.name: asdict(layout) for layout in layouts}
