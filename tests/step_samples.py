"""Steps to play: equal chunks, random ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from cost_models.schedules import SCHEDULES
from cost_models.step import ChunkCosts, LayerCosts, PipelineStep

CHUNKS_PER_RANK = {name: row.chunks_per_rank or 3 for name, row in SCHEDULES.items()}


def equal_step(
    schedule: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    chunks_per_rank: int = 0,
    layers: int = 1,
    forward: float = 1.0,
    backward: float = 2.0,
    backward_weight: float = 1.0,
    **costs: Any,
) -> PipelineStep:
    """Equal chunks; seconds are those of one layer."""
    layer = LayerCosts(forward=forward, backward=backward, backward_weight=backward_weight, **costs)
    num_chunks = num_ranks * (chunks_per_rank or CHUNKS_PER_RANK[schedule])
    return PipelineStep(
        schedule=schedule,
        num_microbatches=num_microbatches,
        num_ranks=num_ranks,
        chunks=(ChunkCosts(layers=((layer, layers),)),) * num_chunks,
    )


def any_steps(schedule: str, num_ranks: int, num_microbatches: int) -> st.SearchStrategy[PipelineStep]:
    """Any chunks: several layers of any seconds, with communication of every kind and receives."""
    seconds = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 3.0])
    names = ("gather_forward", "gather_backward", "reduce_backward", "reduce_step", "update_step", "gather_step")
    layer = st.builds(
        lambda weight, **costs: LayerCosts(backward_weight=weight, **costs),
        st.sampled_from([0.0, 0.25, 0.5]),
        forward=st.sampled_from([0.5, 1.0, 2.0]),
        backward=st.sampled_from([1.0, 2.0, 3.5]),
        **dict.fromkeys(names, seconds),
    )
    chunk = st.builds(
        lambda layers, forward, backward: ChunkCosts(
            layers=tuple(layers), receive_forward=forward, receive_backward=backward
        ),
        st.lists(st.tuples(layer, st.integers(1, 2)), min_size=1, max_size=3),
        seconds,
        seconds,
    )
    num_chunks = num_ranks * CHUNKS_PER_RANK[schedule]
    return st.lists(chunk, min_size=num_chunks, max_size=num_chunks).map(
        lambda chunks: PipelineStep(
            schedule=schedule, num_microbatches=num_microbatches, num_ranks=num_ranks, chunks=tuple(chunks)
        )
    )


def nearly_equal_steps(
    schedule: str, *, num_ranks: int, num_microbatches: int, spread: float
) -> st.SearchStrategy[PipelineStep]:
    """Chunks up to (1 + spread) times as slow as the quickest, nothing overlapping; receives of 1% of a forward."""
    scale = st.floats(1.0, 1.0 + spread)
    num_chunks = num_ranks * CHUNKS_PER_RANK[schedule]

    def step(scales: list[float]) -> PipelineStep:
        return PipelineStep(
            schedule=schedule,
            num_microbatches=num_microbatches,
            num_ranks=num_ranks,
            chunks=tuple(
                ChunkCosts(
                    layers=((LayerCosts(forward=s, backward=2.1 * s, backward_weight=s), 1),),
                    receive_forward=0.01 if k else 0.0,
                    receive_backward=0.01 if k < num_chunks - 1 else 0.0,
                )
                for k, s in enumerate(scales)
            ),
        )

    return st.lists(scale, min_size=num_chunks, max_size=num_chunks).map(step)
