"""Any plans of a step of a small model: mesh, schedule, cuts, micro-batches, recomputation and ZeRO of each unit."""

from __future__ import annotations

import functools
from dataclasses import replace

from hypothesis import strategies as st

import planner
from cost_models.schedules import SCHEDULES, rank_of_chunk, reason_not
from passes.plan import Plan
from passes.plan.step_plan import ChunkPlan, GroupPlan
from planner.verification.verify_model import slow_devices
from runtime.program_tools.recompute import POLICIES
from tests.chunk_plans import chunk_plan
from tests.small_models import Mlp, mlp_batch, seeded, squared_error

#: Schedules, and a step of one stage.
KINDS = (*SCHEDULES, "none")
BATCH = 8
NUM_RANKS = 4
#: Sizes of pp, dp, tp.
_PIPELINES = ((4, 1, 1), (2, 2, 1), (2, 1, 2))
_SINGLE_STAGES = ((1, 4, 1), (1, 2, 2))


def small_model() -> Mlp:
    return seeded(functools.partial(Mlp, layers=6))


@functools.cache
def searched_plan(pp: int, dp: int, tp: int) -> Plan:
    """How the planner splits the operators on a mesh."""
    fix = {"pp": pp, "dp": dp, "tp": tp, "num_microbatches": pp if pp > 1 else 2, "zero": 0, "recompute": "none"}
    return planner.plan(
        small_model(), slow_devices(NUM_RANKS), example_inputs=mlp_batch(), loss_fn=squared_error, fix=fix
    )


@st.composite
def any_plans(draw: st.DrawFn, kind: str) -> Plan:
    """Plans that run under a schedule ("none": one stage), whether or not a search would choose them."""
    pp, dp, tp = draw(st.sampled_from(_SINGLE_STAGES if kind == "none" else _PIPELINES))
    plan = searched_plan(pp, dp, tp)
    assert plan.step is not None
    units = [
        replace(group, unit=_path_of_copy(group.unit, place), first=group.first + place, count=1)
        for chunk in plan.step.chunks
        for group in chunk.groups
        for place in range(group.count)
    ]
    groups = [
        replace(unit, recompute=draw(st.sampled_from(POLICIES)), zero=draw(st.integers(0, 3 if dp > 1 else 0)))
        for unit in units
    ]
    num_chunks = 1 if kind == "none" else pp * (SCHEDULES[kind].chunks_per_rank or min(2, len(units) // pp))
    cuts = draw(st.sets(st.integers(1, len(units) - 1), min_size=num_chunks - 1, max_size=num_chunks - 1))
    counts = [
        count
        for count in (1, 2, 4, 8)
        if BATCH % (dp * count) == 0
        and (kind == "none" or not reason_not(kind, num_ranks=pp, num_microbatches=count, num_chunks=num_chunks))
    ]
    num_microbatches = draw(st.sampled_from(counts))
    return replace(
        plan,
        step=replace(
            plan.step,
            schedule=kind,
            chunks_per_rank=num_chunks // pp,
            num_microbatches=num_microbatches,
            local_batch=BATCH // dp // num_microbatches,
            chunks=_chunks(groups, sorted(cuts), kind, pp),
        ),
    )


def _path_of_copy(unit: str, place: int) -> str:
    """The module path of a copy of a block: ``layers.0`` and 2 give ``layers.2``."""
    head, _, number = unit.rpartition(".")
    return f"{head}.{int(number) + place}" if number.isdigit() else unit


def _chunks(groups: list[GroupPlan], cuts: list[int], kind: str, num_ranks: int) -> tuple[ChunkPlan, ...]:
    bounds = [0, *cuts, len(groups)]
    num_chunks = len(bounds) - 1
    ranks = [
        0 if kind == "none" else rank_of_chunk(kind, chunk, num_ranks=num_ranks, num_chunks=num_chunks)
        for chunk in range(num_chunks)
    ]
    return tuple(
        chunk_plan(rank, tuple(groups[start:end]), forward=1.0, backward=2.0)
        for rank, start, end in zip(ranks, bounds, bounds[1:])
    )


def describe(plan: Plan) -> str:
    """A plan in one line: ``pp2 dp2 zbv 4 micro-batches | none0 full3 | …``."""
    step = plan.step
    assert step is not None
    axes = " ".join(f"{axis}{size}" for axis, size in step.axes.items() if size > 1)
    chunks = (" ".join(f"{group.recompute}{group.zero}" for group in chunk.groups) for chunk in step.chunks)
    return f"{axes} {step.schedule} {step.num_microbatches} micro-batches | {' | '.join(chunks)}"
