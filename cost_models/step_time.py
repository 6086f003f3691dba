"""The closed form of a training step's time and memory; ``cost_models.simulator`` plays the same step event by event.

With m micro-batches, p ranks, K chunks, v = K / p chunks a rank, and for chunk k the sums over its layers

    f_k = Σ max(forward, gather_forward) + receive_forward
    b_k = Σ max(backward, gather_backward + reduce_backward) + receive_backward
    t_k = f_k + b_k        W_k = Σ backward_weight

communication that can hide behind compute bounds a layer from below on its own stream: parameters are gathered one
layer ahead, so that in a row of equal layers each waits for the longer of the two. Where a schedule splits every
backward, layers whose parameters are gathered take

    W = max(backward_weight, reduce_backward)        b = max(backward − backward_weight, gather_backward) + W

since what weight gradients do not hide of their reduction holds up the gathers of the next action. Rank r is busy for
load_r = Σ_{k on r} t_k each micro-batch. In its steady state a micro-batch takes

    L = max_r load_r                                                   of most schedules
    L = max_k f_k + max_k b_k                                          of GPipe, which turns round once
    L = Σ_{j < v} max_{j·p ≤ k < (j+1)·p} t_k                          of interleaved 1F1B

since there all ranks run their j-th chunk at once, for p micro-batches in a row, and each hands its results to the
next: round j goes as fast as its longest chunk, and a rank that is quick in one round waits and cannot make up for
being slow in another. This is never less than max_r load_r. The pipeline takes

    (m − 1) · L + Σ_k t_k                                              GPipe
    m · L + max_j (Σ_{k in round j} t_k − max_{k in round j} t_k)      others that keep the backward whole
    m · L + (p−1)/p · Σ_k max(0, φF·f_k + φB·(b_k − W_k) + φW·W_k)     schedules that split it
    longest path of M micro-batches + (m − M) · L                      if longer, of those that are played

where round j is chunks j·p … (j+1)·p−1, of which there is one but for interleaved 1F1B, and (φF, φB, φW) is the
schedule's fill, the one that gives most where it has several: to fill and to drain, a micro-batch passes the other
ranks of a round, and the longest round is never hidden behind another. With two chunks a rank, down the ranks and back
up, the pipeline takes no less than the longest path through the schedule's order (``cost_models.order_path``), which is
longer where chunks are uneven; of the first M = 3p micro-batches, of V-Half all. On equal chunks these are the
published bubbles: (p−1)·t for GPipe (Huang et al. 2019) and 1F1B (PipeDream-Flush, Narayanan et al. 2021a), (p−1)·t/v
for interleaved 1F1B (Megatron-LM, Narayanan et al. 2021b), and, with I = B − W for the gradients of inputs, (p−1)·(F +
I − W) for ZB-H1 (Qi et al. 2023; where W is longer than F or I it takes (p−1)·max(F, I), which are its other fills),
and (p−1)·(F + I − 2W) for ZB-H2. That is without the wait of all ranks for the norm: rank r starts r forwards late, so
that ZB-H2 takes (p−1)·max(F, F + I − 2W) (exact from 2p − 1 micro-batches on where W ≤ F or I ≤ 2F). So where nothing
is recomputed it gains I − W on ZB-H1, for twice the memory.

ZBV (Qi et al. 2024) has no bubble inside a rank where F = I = W, but rank r starts r forwards late, and the optimizer
waits for all ranks: playing equal chunks of PyTorch's order gives (p−1)·max(I, W, 2F − I, 2(I − W)), F and I those of
one of the two chunks. The fill is I, the largest where F ≤ I ≤ 2W, as for transformer layers with or without
recomputation. DualPipeV (DeepSeek-AI 2024) played the same way gives the largest of (p−1)·F, (p−1)·(F + I − W) and
(p−1)·(2I − W) − F, which are its fills. V-Half (Qi et al. 2024) is made for F = I = W, where its order plays to 2 (p =
2) up to 3.4 forwards of a chunk for each rank but one, 1F1B to 6; ranks wait for each other in its steady state, too,
where four I and one W or F are longer than a rank's load: 12% of it with I = 2F = 2W (full recomputation), which is why
every micro-batch is played.

After the pipeline come the gradient reductions that the last backward passes cannot hide. Rank r has its own last
backward, and the time until the ranks before it are done, to hide C_r = Σ (gather_backward + reduce_backward +
reduce_step), what it gathers and reduces as every other and what is reduced once a step. Where parameters are gathered
for it (hybrid sharding: gathers in each micro-batch, sums over replicas once a step), a layer's gather waits for the
reductions of the layers before it, and the last micro-batch is held up on every rank in turn:

    wait = max(0, gather_backward + reduce_backward + reduce_step − backward), of layers that gather parameters
    window_r = Σ_{k on r} (b_k + wait_k) + Σ_{r' < r} Σ_{k on r'} (b_k + wait_k) / v        wait_k = Σ wait of chunk k
    tail = max(reduce_step of the model's first layer, Σ_k wait_k + max(0, max_r (C_r − window_r), late))

Interleaved 1F1B does a rank's chunk for the P micro-batches of a round before it turns to the one before it in the
model: reductions hide behind all of these, and what waits holds up no other rank. With c_k what chunk k communicates
in its last backward, g_k of it in every one, and d_r the last backward, its wait included, of the chunk that rank r
does last, the model's first on it,

    left_k = Σ_{i on r, i ≤ k} (c_i − b_i − wait_i) − (P − 1) · Σ_{i on r, i < k} (b_i − g_i) − Σ_{r' < r} d_r'
    tail = max(reduce_step of the model's first layer, max_r (Σ_{k on r} wait_k + max(0, max_{k on r} left_k)))

Equal chunks never play quicker, and those that gather nothing at most one layer's backward slower.

A layer's reductions follow its compute, so that those of the model's first layers, the last of a backward, cannot hide
behind the layers before. Where one chunk is the whole model, let layer i communicate c_i (ρ_i of it reductions) and
take d_i = b_i + wait_i (a_i of it computing). In any row u of like layers but the last,

    late ≥ a_1 + ρ_1 − d_1                                                               the model's first layer
    late ≥ Σ_{i in rows ≤ u} (c_i − d_i)                                                 what rows up to u leave
    late ≥ min_{j in row u+1} (a_j + ρ_j − d_j) + Σ_{i in rows ≤ u} (c_i − d_i) − Σ_{i in row u} gather_backward_i

the last with the reductions of the layer next to row u, of whatever layer its row has there, since row u waits for them
but for what it gathers before. An embedding that reduces long behind layers that compute long shows there; several
chunks have other micro-batches or ranks to hide this behind, and nothing is late.

With a split backward there is no wait: no gather follows the weight gradients that are reduced. Where these end each
chunk, they alone hide its reductions ρ_k = Σ (reduce_backward + reduce_step), and what the ranks are done apart:

    tail = max(reduce_step of the model's first layer,
               max_r (ρ_k − W_k − Σ_{r' < r} s_r'),                      k the rank's first chunk, which it does last
               max_r (Σ_{k on r} (ρ_k − W_k) − Σ_{0 < r' < p-1, r' ≠ r} s'_r' − drain_r))       two chunks a rank
    s_r = Σ_{k on r} Σ max(0, σI·(b − W) + σW·W) / v        drain_0 = Σ_{k not on 0} b_k / v, of other ranks 0

σ is (1, −1) for ZB-H1, V-Half and DualPipeV, where ranks are done one after another, the last one first; zero for ZB-H2
and ZBV. s' has the same σ, but ZBV (−1, 2). Rank 0 has the model's last chunk, whose gradients are there a whole drain
before. These are what the orders play to on equal chunks, or less than that: there the step is never more than half a
percent below the simulation, and up to 4% above it, where reductions take several times what a chunk computes.

Then the optimizer, once every gradient is there (their norm is clipped over all ranks): max_r Σ (update_step +
gather_step). All terms are linear, or maxima of linear terms, in the seconds of the layers.

How near this is to the simulation where nothing overlaps: equal on equal chunks, and on all under GPipe; without rounds
within 2% where the slowest chunk is a tenth slower than the quickest and there are 8 micro-batches a rank, or twice as
slow and 48 a rank. Far more uneven chunks with few micro-batches do not agree: 1F1B plays up to 6% quicker at two
micro-batches a rank and chunks twice as slow as others, since the formula lets the slowest rank wait for a whole fill
and drain. Where communication hides, an action waits for its first layer's gather and its last reduction, which the
formula leaves out but at the end of a single chunk: 1% to 2% for chunks of 32 layers whose communication is as long as
their compute, 3% to 7% for chunks of 8, up to 25% for chunks of two. The same of schedules that split every backward is
1% to 5% for chunks of 24 layers, and up to a sixth where gradients are reduced each micro-batch and nothing is
gathered.

Interleaved 1F1B lets ranks run ahead a little within a round: chunks that differ by a tenth play up to 7% quicker, and
twice as slow chunks, one in every round, up to 30% (more where they are slower still). Rounds of which one is a tenth
longer than the others play exactly as the formula says. Where they differ more they play slower, since a rank goes
forward in one round and backward in another: with a round of twice the others' seconds by nothing (2 ranks) to half of
the difference (8 ranks), each micro-batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from cost_models.order_path import Counts, OrderPath, longest_path, played_microbatches
from cost_models.schedule_orders import microbatches_per_round
from cost_models.schedules import in_flight_peaks, rank_of_chunk, schedule_named
from cost_models.step import ChunkCosts, LayerCosts, PipelineStep


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Seconds of one step: the pipeline, exposed gradient reductions, the optimizer."""

    pipeline: float
    tail: float
    update: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.pipeline + self.tail + self.update


@dataclass(frozen=True, kw_only=True)
class _ChunkSeconds:
    """Seconds of one chunk for one micro-batch: f_k, b_k and W_k above."""

    forward: float
    backward: float
    weight: float


def step_seconds(step: PipelineStep) -> StepSeconds:
    """Seconds of ``step`` by the closed form above.

    Raises:
        ValueError: if the schedule is not known or the number of chunks is not a multiple of the ranks.
    """
    ranks, times = chunks_of_ranks(step), _all_chunk_seconds(step)
    path = _played_path(step, times)
    return _seconds_along(step, times, ranks, [] if path is None else [path.counts])


def least_step_seconds(step: PipelineStep, paths: Iterable[Counts]) -> float:
    """Lower bound of the seconds of ``step`` without searching its longest path: as if there were only ``paths``."""
    return _seconds_along(step, _all_chunk_seconds(step), chunks_of_ranks(step), paths).total


def _seconds_along(
    step: PipelineStep, times: list[_ChunkSeconds], ranks: list[list[int]], paths: Iterable[Counts]
) -> StepSeconds:
    return StepSeconds(
        pipeline=_pipeline_seconds(step, times, ranks, paths),
        tail=_tail_seconds(step, times, ranks),
        update=max(
            sum(layer_sum(step.chunks[k], "update_step", "gather_step") for k in own_chunks) for own_chunks in ranks
        ),
    )


def least_simulated(step: PipelineStep) -> float:
    """Seconds that the simulator (``cost_models.simulator``) does not beat, of compute alone: of the busiest rank, and
    along the longest path through an order that is played to its end."""
    seconds = [
        (layer_sum(chunk, "forward"), layer_sum(chunk, "backward"), layer_sum(chunk, "backward_weight"))
        for chunk in step.chunks
    ]
    busiest = max(sum(seconds[k][0] + seconds[k][1] for k in own_chunks) for own_chunks in chunks_of_ranks(step))
    if not math.isinf(schedule_named(step.schedule).played) or step.num_ranks == 1:
        return step.num_microbatches * busiest
    return longest_path(
        step.schedule,
        num_ranks=step.num_ranks,
        num_microbatches=step.num_microbatches,
        seconds=[(forward, backward - weight, weight) for forward, backward, weight in seconds],
    ).seconds


def step_memory(step: PipelineStep) -> tuple[float, ...]:
    """Bytes that each rank holds at its peak.

    State, the saved activations at the moment when they are the most bytes, and the largest peak of any of its layers.

    Raises:
        ValueError: if the schedule cannot run this many chunks and micro-batches.
    """
    held = peak_in_flight(step)
    return tuple(
        sum(
            layer_sum(step.chunks[k], "state_bytes") + held[k] * layer_sum(step.chunks[k], "saved_bytes")
            for k in own_chunks
        )
        + max(peak_bytes(step.chunks[k]) for k in own_chunks)
        for own_chunks in chunks_of_ranks(step)
    )


def peak_in_flight(
    step: PipelineStep, field: Literal["saved_bytes", "host_bytes"] = "saved_bytes"
) -> tuple[float, ...]:
    """By chunk, the micro-batches in flight when what its rank saves, on the device or the host, is the most bytes.

    Where a rank's chunks save unequal bytes that may be another moment than when most micro-batches are in flight.

    Raises:
        ValueError: if the schedule cannot run this many chunks and micro-batches.
    """
    moments_of_ranks = in_flight_peaks(
        step.schedule, num_ranks=step.num_ranks, num_microbatches=step.num_microbatches, num_chunks=len(step.chunks)
    )
    saved = [layer_sum(chunk, field) for chunk in step.chunks]
    held = [0.0] * len(step.chunks)
    for moments in moments_of_ranks:
        for chunk, count in max(moments, key=lambda moment: sum(count * saved[chunk] for chunk, count in moment)):
            held[chunk] = float(count)
    return tuple(held)


def chunks_of_ranks(step: PipelineStep) -> list[list[int]]:
    """Per rank: the places of its chunks in the model, in model order.

    Raises:
        ValueError: if the number of chunks is not a positive multiple of the ranks.
    """
    num_chunks = len(step.chunks)
    if num_chunks == 0 or step.num_ranks < 1 or num_chunks % step.num_ranks:
        raise ValueError(
            f"a step of {num_chunks} chunks on {step.num_ranks} ranks: expected a positive multiple of the ranks"
        )
    ranks: list[list[int]] = [[] for _ in range(step.num_ranks)]
    for k in range(num_chunks):
        ranks[rank_of_chunk(step.schedule, k, num_ranks=step.num_ranks, num_chunks=num_chunks)].append(k)
    return ranks


def layer_sum(chunk: ChunkCosts, *fields: str) -> float:
    """Sum of the named ``LayerCosts`` fields over all layers of ``chunk``."""
    return sum(count * sum(getattr(layer, field) for field in fields) for layer, count in chunk.layers)


def peak_bytes(chunk: ChunkCosts) -> float:
    """The largest peak of any layer of ``chunk``."""
    return max((layer.peak_bytes for layer, _ in chunk.layers), default=0.0)


def _all_chunk_seconds(step: PipelineStep) -> list[_ChunkSeconds]:
    split = schedule_named(step.schedule).splits_all
    return [_chunk_seconds(chunk, split=split) for chunk in step.chunks]


def _chunk_seconds(chunk: ChunkCosts, *, split: bool) -> _ChunkSeconds:
    backward, weight = layer_sum(chunk, "backward_seconds"), layer_sum(chunk, "backward_weight")
    if split:
        backward, weight = (sum(count * layer.split_seconds[part] for layer, count in chunk.layers) for part in (0, 1))
    return _ChunkSeconds(
        forward=layer_sum(chunk, "forward_seconds") + chunk.receive_forward,
        backward=backward + chunk.receive_backward,
        weight=weight,
    )


def _pipeline_seconds(
    step: PipelineStep, times: list[_ChunkSeconds], ranks: list[list[int]], paths: Iterable[Counts]
) -> float:
    """Seconds of the pipeline, of all paths through a played order only ``paths``."""
    schedule = schedule_named(step.schedule)
    loads = [[times[k].forward + times[k].backward for k in chunks] for chunks in ranks]
    if schedule.splits_backward:
        longest = max(sum(load) for load in loads)
        seconds = step.num_microbatches * longest + _filling_seconds(step, times)
        rest = step.num_microbatches - played_microbatches(step.schedule, step.num_ranks, step.num_microbatches)
        played = (_along(counts, times) + rest * longest for counts in paths)
        return max([seconds, *played])
    if schedule.by_direction:
        slowest = max(t.forward for t in times) + max(t.backward for t in times)
        return (step.num_microbatches - 1) * slowest + sum(map(sum, loads))
    rounds = list(zip(*loads))
    longest = sum(max(together) for together in rounds)
    return step.num_microbatches * longest + max(sum(together) - max(together) for together in rounds)


def _filling_seconds(step: PipelineStep, times: list[_ChunkSeconds]) -> float:
    rows = schedule_named(step.schedule).fills_on(step.num_ranks)
    fills = (
        max(0.0, *(on_f * t.forward + on_i * (t.backward - t.weight) + on_w * t.weight for on_f, on_i, on_w in rows))
        for t in times
    )
    return (step.num_ranks - 1) / step.num_ranks * sum(fills)


def played_path(step: PipelineStep) -> OrderPath | None:
    """The longest path through the order of ``step``, of the micro-batches that are played; None for schedules whose
    closed form needs none."""
    return _played_path(step, _all_chunk_seconds(step))


def _played_path(step: PipelineStep, times: list[_ChunkSeconds]) -> OrderPath | None:
    if not schedule_named(step.schedule).played or step.num_ranks == 1:
        return None
    return longest_path(
        step.schedule,
        num_ranks=step.num_ranks,
        num_microbatches=played_microbatches(step.schedule, step.num_ranks, step.num_microbatches),
        seconds=[(t.forward, t.backward - t.weight, t.weight) for t in times],
    )


def _along(path: Counts, times: list[_ChunkSeconds]) -> float:
    """The path's length, as a sum of the chunks' seconds."""
    return sum(
        forwards * t.forward + inputs * (t.backward - t.weight) + weights * t.weight
        for (forwards, inputs, weights), t in zip(path, times)
    )


def _tail_seconds(step: PipelineStep, times: list[_ChunkSeconds], ranks: list[list[int]]) -> float:
    schedule = schedule_named(step.schedule)
    if schedule.ends_in_weights:
        return _tail_of_weights(step, times, ranks)
    chunks_per_rank = len(step.chunks) // step.num_ranks
    waits = [0.0 if schedule.splits_backward else layer_sum(chunk, "last_wait") for chunk in step.chunks]
    last = [t.backward + wait for t, wait in zip(times, waits, strict=True)]
    first = step.chunks[0].layers[0][0].reduce_step if step.chunks[0].layers else 0.0
    if schedule.divided and chunks_per_rank > 1 and step.num_ranks > 1:
        return max(first, *_tails_by_rounds(step, times, ranks, waits, last))
    exposed, finished_before = 0.0, 0.0
    for own_chunks in ranks:
        backward = sum(last[k] for k in own_chunks)
        communication = sum(layer_sum(step.chunks[k], "last_communication") for k in own_chunks)
        exposed = max(exposed, communication - backward - finished_before)
        finished_before += backward / chunks_per_rank
    if len(step.chunks) == 1 and not schedule.splits_backward:
        exposed = max([exposed, *_late(step.chunks[0])])
    return max(first, sum(waits) + exposed)


def _tails_by_rounds(
    step: PipelineStep, times: list[_ChunkSeconds], ranks: list[list[int]], waits: list[float], last: list[float]
) -> Iterator[float]:
    """The tail of each rank whose chunks are done in rounds, the model's first one last."""
    others = microbatches_per_round(step.num_ranks, step.num_microbatches) - 1
    finished_before = 0.0
    for own_chunks in ranks:
        left, hidden, exposed = 0.0, finished_before, 0.0
        for k in own_chunks:
            left += layer_sum(step.chunks[k], "last_communication") - last[k]
            exposed = max(exposed, left - hidden)
            hidden += others * (times[k].backward - layer_sum(step.chunks[k], "gather_backward", "reduce_backward"))
        yield sum(waits[k] for k in own_chunks) + exposed
        finished_before += last[own_chunks[0]]


def _late(chunk: ChunkCosts) -> Iterator[float]:
    """What ``late`` is at least, by the first layer and by each row of a chunk but its last."""
    excess = 0.0
    for layer, _ in chunk.layers[:1]:
        yield layer.last_reductions
    for row, following in itertools.pairwise(chunk.layers_by_row):
        excess = excess + sum(count * layer.last_excess for layer, count in row)
        gathers = sum(count * layer.gather_backward for layer, count in row)
        yield excess
        yield min(layer.last_reductions for layer, _ in following) + excess - gathers


def _tail_of_weights(step: PipelineStep, times: list[_ChunkSeconds], ranks: list[list[int]]) -> float:
    """The tail where each chunk's last action makes gradients of weights."""
    exposed = [layer_sum(chunk, "reductions") - t.weight for chunk, t in zip(step.chunks, times)]
    slacks, of_all = (_slacks(step, ranks, of_all=of_all) for of_all in (False, True))
    tail = step.chunks[0].layers[0][0].reduce_step if step.chunks[0].layers else 0.0
    for rank, own_chunks in enumerate(ranks):
        tail = max(tail, exposed[own_chunks[0]] - sum(slacks[:rank]))
        if len(own_chunks) > 1:
            hidden = sum(of_all[other] for other in range(1, step.num_ranks - 1) if other != rank)
            if own_chunks[-1] == len(step.chunks) - 1:
                hidden += sum(times[k].backward for other in ranks[1:] for k in other) / len(own_chunks)
            tail = max(tail, sum(exposed[k] for k in own_chunks) - hidden)
    return tail


def _slacks(step: PipelineStep, ranks: list[list[int]], *, of_all: bool) -> list[float]:
    """By rank, the slack of its chunks in the mean."""
    schedule = schedule_named(step.schedule)
    return [
        sum(
            count * schedule.slack_seconds(*_backward_seconds(layer, split=schedule.splits_all), of_all=of_all)
            for k in own_chunks
            for layer, count in step.chunks[k].layers
        )
        / len(own_chunks)
        for own_chunks in ranks
    ]


def _backward_seconds(layer: LayerCosts, *, split: bool) -> tuple[float, float]:
    """Of a backward pass, and of its gradients of weights."""
    return layer.split_seconds if split else (layer.backward_seconds, layer.backward_weight)
