"""The actions of a schedule's order by wave: each waits for actions of earlier waves alone, so that those of a wave are
added up at once.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from cost_models.schedules import actions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

#: Kinds of actions, by whose places here they are numbered.
KINDS = "FIWB"


class RankOrders(NamedTuple):
    """The orders of all ranks, one behind the other.

    Attributes:
        starts: where each rank's order starts, and behind them all the number of actions.
        kinds, chunks: of each action, its place in ``KINDS`` and its chunk.
        waits_for, done_as: of each action, places in one list of all forwards and all input gradients: what it needs
            of another chunk, and what it gives; the last place if nothing. The last but one is of what never comes.
        num_places: of that list.
    """

    starts: Ints
    kinds: Ints
    chunks: Ints
    waits_for: Ints
    done_as: Ints
    num_places: int


class Waves(NamedTuple):
    """The actions by wave.

    Attributes:
        orders: what they come from.
        wave_ends: behind each wave, how many actions are in it and before it.
        order: by place among the waves, the action's place in ``orders``.
        ranks, steps: by place among the waves, the action's rank, and 4 × its chunk + its kind.
        before, source: by place among the waves, the places of the actions it waits for, on its own rank and on
            another; of none, the place behind all.
    """

    orders: RankOrders
    wave_ends: list[int]
    order: Ints
    ranks: Ints
    steps: Ints
    before: Ints
    source: Ints

    def turns(self) -> Ints:
        """By place among the waves, in which round the action comes if the ranks take turns, each as far as it can."""
        import numpy as np

        rounds = np.zeros(len(self.order) + 1, dtype=np.int64)
        ranks = np.append(self.ranks, -1)
        first = 0
        for last in self.wave_ends:
            source = self.source[first:last]
            comes = rounds[source] + (ranks[source] > ranks[first:last])
            rounds[first:last] = np.maximum(rounds[self.before[first:last]], comes)
            first = last
        return rounds[:-1]


@functools.lru_cache(maxsize=16)
def order_waves(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Waves:
    """The waves of all actions of all ranks.

    Raises:
        ValueError: if the schedule cannot run this combination.
        RuntimeError: if ranks wait for each other.
    """
    import numpy as np

    orders = rank_orders(schedule, num_ranks, num_microbatches, num_chunks)
    starts, total = orders.starts, int(orders.starts[-1])
    never, nothing = orders.num_places - 2, orders.num_places - 1
    # behind each rank's order an action that waits for what never comes
    waits_for = np.insert(orders.waits_for, starts[1:], never)
    given_as = np.insert(orders.done_as, starts[1:], never)
    is_done = np.zeros(orders.num_places, dtype=bool)
    is_done[nothing] = True
    following = starts[:-1] + np.arange(num_ranks)
    waves, ranks = [], []
    while True:
        acting = is_done[waits_for[following]].nonzero()[0]
        if not len(acting):
            break
        places = following[acting]
        is_done[given_as[places]] = True
        following[acting] = places + 1
        waves.append(places)
        ranks.append(acting)
    order = np.concatenate(waves) if waves else np.zeros(0, dtype=np.int64)
    ranks_of = np.concatenate(ranks) if ranks else order
    if len(order) < total:
        stuck = [rank for rank in range(num_ranks) if following[rank] < starts[rank + 1] + rank]
        raise RuntimeError(f"the schedule's orders wait for each other on ranks {stuck}")
    order -= ranks_of  # without the actions behind each rank's order
    places_of = np.empty(total + 1, dtype=np.int64)
    places_of[order], places_of[-1] = np.arange(total), total
    before = np.arange(-1, total - 1)
    before[starts[:-1]] = -1
    given_by = np.full(orders.num_places, -1, dtype=np.int64)
    given_by[orders.done_as] = np.arange(total)
    given_by[nothing] = -1
    return Waves(
        orders=orders,
        wave_ends=np.cumsum([len(wave) for wave in waves]).tolist(),
        order=order,
        ranks=ranks_of,
        steps=(len(KINDS) * orders.chunks + orders.kinds)[order],
        before=places_of[before[order]],
        source=places_of[given_by[orders.waits_for][order]],
    )


def rank_orders(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> RankOrders:
    """The orders as arrays."""
    import numpy as np

    orders = actions(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    names, chunks, microbatches = zip(*(action for order in orders for action in order))
    kind_of = {name: place for place, name in enumerate(KINDS)}
    kinds, chunk = np.array([kind_of[name] for name in names]), np.array(chunks)
    forwards = num_chunks * num_microbatches
    nothing = 2 * forwards + 1
    place = chunk * num_microbatches + np.array(microbatches)
    is_forward, is_weight = kinds == KINDS.index("F"), kinds == KINDS.index("W")
    waits_for = np.where(is_forward, place - num_microbatches, forwards + place + num_microbatches)
    waits_for[is_weight | (is_forward & (chunk == 0)) | (~is_forward & (chunk == num_chunks - 1))] = nothing
    done_as = np.where(is_forward, place, forwards + place)
    done_as[is_weight] = nothing
    starts = np.cumsum([0, *map(len, orders)])
    return RankOrders(starts, kinds, chunk, waits_for, done_as, nothing + 1)
