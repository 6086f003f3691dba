"""The objective of a step as a sum of its layers' seconds, which ``explain`` shows."""

from __future__ import annotations

import random

import pytest

from cost_models.schedules import SCHEDULES
from cost_models.step import ChunkCosts, LayerCosts, PipelineStep
from cost_models.step_time import step_seconds
from planner.inspection.objective_shares import objective_shares, seconds_at


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shares_of_all_seconds_are_the_whole_step(schedule: str) -> None:
    """Of chunks that nothing has made alike, whose order is played to its longest path, with communication to hide."""
    draw = random.Random(0)
    per_rank = SCHEDULES[schedule].chunks_per_rank or 2
    for gathers in (0.0, 2.0):
        chunks = []
        for _ in range(3 * per_rank):
            weight, inputs = draw.uniform(0.2, 1.5), draw.uniform(0.2, 2.0)
            layer = LayerCosts(
                forward=draw.uniform(0.2, 2.0),
                backward=inputs + weight,
                backward_weight=weight,
                gather_forward=gathers,
                gather_backward=gathers,
                reduce_step=draw.uniform(0.0, 9.0),
                update_step=draw.uniform(0.0, 1.0),
            )
            chunks.append(ChunkCosts(layers=((layer, 2),), receive_forward=0.1, receive_backward=0.2))
        step = PipelineStep(schedule=schedule, num_microbatches=6, num_ranks=3, chunks=tuple(chunks))
        total = sum(share * seconds_at(step, part) for part, share in objective_shares(step).items())
        assert total == pytest.approx(step_seconds(step).total, rel=1e-12)
