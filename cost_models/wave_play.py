"""The pipeline's actions played a wave at a time, all ranks at once: what ``pipeline_play`` plays, to the last bit.

An action is a (max, +) map (``cost_models.streams``), which one of its chunk depends on what the action before has left
to reduce, not on the clock. So all maps are known beforehand, and the actions of a wave (``cost_models.order_waves``)
are a few operations on arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cost_models.order_waves import KINDS, RankOrders, order_waves
from cost_models.pipeline_play import Operation, PlayedRank, operation
from cost_models.step_time import layer_sum, peak_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cost_models.order_waves import Ints
    from cost_models.step import PipelineStep

    Floats = NDArray[np.float64]

#: Ranks from which on waves are longer than what it takes to play one.
MANY_RANKS = 12


class _Maps(NamedTuple):
    """The maps of all actions.

    Attributes:
        operations: distinct operations.
        operation_of: by place in the ranks' orders, the place of its operation.
        rows: by place in the ranks' orders, coefficients of when compute and communication are free and the next gather
            may start, over what ``cost_models.streams.Streams`` lists.
    """

    operations: list[Operation]
    operation_of: Ints
    rows: Floats


def play_in_waves(step: PipelineStep) -> list[PlayedRank]:
    """Play the step; what comes of each rank."""
    import numpy as np

    waves = order_waves(step.schedule, step.num_ranks, step.num_microbatches, len(step.chunks))
    orders, order = waves.orders, waves.order
    maps = _maps(step, orders)
    receives = np.array([each.receive for each in maps.operations])[maps.operation_of[order]]
    rows, waits_for, done_as = maps.rows[:, :, order], orders.waits_for[order], orders.done_as[order]
    streams, occupied = np.zeros((3, step.num_ranks)), np.zeros(step.num_ranks)
    starts, ends = np.empty(len(order)), np.zeros(orders.num_places)
    before = np.empty((4, step.num_ranks))
    first = 0
    for last in waves.wave_ends:
        ranks = waves.ranks[first:last]
        free, now = streams[:, ranks], before[:, : last - first]
        start = np.maximum(free[0], ends[waits_for[first:last]], out=starts[first:last])
        np.add(start, receives[first:last], out=now[0])
        now[1:] = free
        after = (rows[:, :, first:last] + now).max(axis=1)
        streams[:, ranks] = after
        occupied[ranks] += after[0] - start
        ends[done_as[first:last]] = after[0]
        ends[-1] = 0.0  # of what nothing is waited for
        first = last
    by_order = np.empty(len(order))
    by_order[order] = starts
    return [
        _played_rank(step, maps, orders, rank, streams[:, rank], occupied[rank], by_order[orders.starts[rank]])
        for rank in range(step.num_ranks)
    ]


def _maps(step: PipelineStep, orders: RankOrders) -> _Maps:
    import numpy as np

    kinds = len(KINDS)
    is_last = np.zeros(len(orders.kinds), dtype=bool)
    gives_gradients = (orders.kinds >= KINDS.index("W")).nonzero()[0]
    last_of_chunk = np.zeros(len(step.chunks), dtype=np.int64)
    np.maximum.at(last_of_chunk, orders.chunks[gives_gradients], gives_gradients)
    is_last[last_of_chunk] = True
    numbers, operation_of = np.unique((kinds * orders.chunks + orders.kinds) * 2 + is_last, return_inverse=True)
    operations = [
        operation(step.chunks[number // 2 // kinds], KINDS[number // 2 % kinds], bool(number % 2))
        for number in numbers.tolist()
    ]
    before = np.append(-1, operation_of[:-1])
    before[orders.starts[:-1]] = -1
    pairs, map_of = np.unique((len(operations) + 1) * operation_of + before + 1, return_inverse=True)
    rows = np.empty((3, 4, len(pairs)))
    for place, pair in enumerate(pairs.tolist()):
        this, previous = divmod(pair, len(operations) + 1)
        rows[:, :, place] = operations[this].rows_after(operations[previous - 1].pending if previous else 0.0)
    return _Maps(operations, operation_of, rows[:, :, map_of])


def _played_rank(
    step: PipelineStep, maps: _Maps, orders: RankOrders, rank: int, streams: Floats, occupied: float, first: float
) -> PlayedRank:
    import numpy as np

    own = slice(int(orders.starts[rank]), int(orders.starts[rank + 1]))
    compute, communication, _ = streams.tolist()
    seconds = np.array([each.compute for each in maps.operations])[maps.operation_of[own]]
    return PlayedRank(
        compute=compute,
        reduced=max(communication, compute) + maps.operations[maps.operation_of[own][-1]].pending,
        computing=float(seconds.cumsum()[-1]),  # one after the other, as ``sum`` adds them
        occupied=float(occupied),
        stalled=compute - float(first) - float(occupied),
        peak_bytes=_peak_bytes(step, orders, own),
    )


def _peak_bytes(step: PipelineStep, orders: RankOrders, own: slice) -> float:
    """The most bytes that the actions of ``own``, one rank's, hold."""
    import numpy as np

    kinds, chunks = orders.kinds[own], orders.chunks[own]
    own_chunks = np.unique(chunks).tolist()
    saved, peaks = np.zeros(len(step.chunks)), np.zeros(len(step.chunks))
    saved[own_chunks] = [layer_sum(step.chunks[chunk], "saved_bytes") for chunk in own_chunks]
    peaks[own_chunks] = [peak_bytes(step.chunks[chunk]) for chunk in own_chunks]
    held = sum(layer_sum(step.chunks[chunk], "state_bytes") for chunk in own_chunks)
    changes = np.zeros((len(kinds), 2))  # before each action runs, and after it
    changes[:, 0] = np.where(kinds == KINDS.index("F"), saved[chunks], 0.0)
    changes[:, 1] = np.where(kinds >= KINDS.index("W"), -saved[chunks], 0.0)
    running = np.append(held, changes).cumsum()[1::2]
    return max(held, float((running + peaks[chunks]).max()))
