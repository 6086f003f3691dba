"""What the ranks of one pipeline sent in a step, added up in the form of ``Plan.collectives``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from passes.plan import CollectivePlan
from tests.communication.recorder import Call

#: (collective, axis) → times issued, bytes in all.
Counts = dict[tuple[str, str], tuple[int, int]]
#: What torch calls a collective → its name in plans, whether a rank passes its own part alone.
NAMES = {
    "all_reduce": ("all_reduce", False),
    "allreduce": ("all_reduce", False),
    "all_gather_into_tensor": ("all_gather", True),
    "_allgather_base": ("all_gather", True),
    "allgather": ("all_gather", True),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "_reduce_scatter_base": ("reduce_scatter", False),
    "all_to_all_single": ("all_to_all", True),
    "alltoall": ("all_to_all", True),
    "alltoall_base": ("all_to_all", True),
    "broadcast": ("broadcast", False),
    "send": ("send", False),
}
#: Calls whose first tensors are results; the rest, as many or fewer, are what is passed.
RESULTS_FIRST = ("_allgather_base", "allgather", "_reduce_scatter_base", "alltoall", "alltoall_base")


def planned_counts(collectives: Iterable[CollectivePlan]) -> Counts:
    """What a plan says, phases together."""
    return _summed(((item.collective, item.axis), item.count, item.num_bytes) for item in collectives)


def recorded_counts(calls: Iterable[Call], axes: Mapping[str, int], zero_ranks: int = 0) -> Counts:
    """What the ranks of one pipeline issued on a mesh of ``axes`` (outermost first) over all ranks.

    ``zero_ranks``: over how many neighbours of the data ranks ZeRO divides, 0 for all.
    """
    names = dict(_groups(axes, zero_ranks))
    counts = []
    for call in calls:
        if call.kind == "recv":
            continue
        collective, is_part = NAMES[call.kind]
        num_bytes = _passed(call) * (len(call.members) if is_part else 1)
        axis = names.get(call.members) or next(name for group, name in names.items() if {*call.members} <= {*group})
        counts.append(((collective, axis), 1, num_bytes))
    return _summed(counts)


def first_pipeline(axes: Mapping[str, int]) -> list[int]:
    """The ranks of the first pipeline."""
    return _mesh(axes).movedim(list(axes).index("pp"), 0).flatten(1)[:, 0].tolist() if "pp" in axes else [0]


def _mesh(axes: Mapping[str, int]) -> torch.Tensor:
    return torch.arange(math.prod(axes.values())).reshape(list(axes.values()))


def _groups(axes: Mapping[str, int], zero_ranks: int) -> Iterable[tuple[tuple[int, ...], str]]:
    """The ranks of every group, with what plans call its axes."""
    several = [axis for axis, size in axes.items() if size > 1]
    data = [axis for axis in ("dp", "cp") if axis in several]
    for group in (*([axis] for axis in several), *([data] if len(data) > 1 else [])):
        places = [list(axes).index(axis) for axis in group]
        ranks = _mesh(axes).movedim(places, list(range(-len(places), 0)))
        for members in ranks.reshape(-1, math.prod(axes[axis] for axis in group)).tolist():
            yield tuple(members), "_".join(group)
            if zero_ranks and group == data:
                together = [tuple(members[place : place + zero_ranks]) for place in range(0, len(members), zero_ranks)]
                yield from ((each, f"{'_'.join(group)}_shard") for each in together)
                yield from ((each, f"{'_'.join(group)}_replicate") for each in zip(*together))


def _passed(call: Call) -> int:
    """Bytes of what a rank passes."""
    tensors: Sequence[tuple[tuple[int, ...], str]] = call.tensors
    if call.kind in RESULTS_FIRST:
        tensors = tensors[len(tensors) // 2 :] if call.kind.startswith("alltoall") else tensors[-1:]
    return sum(math.prod(shape) * getattr(torch, dtype.removeprefix("torch.")).itemsize for shape, dtype in tensors)


def _summed(items: Iterable[tuple[tuple[str, str], int, int]]) -> Counts:
    counts: Counts = {}
    for key, count, num_bytes in items:
        before = counts.get(key, (0, 0))
        counts[key] = (before[0] + count, before[1] + num_bytes)
    return counts


def differences(planned: Counts, recorded: Counts) -> list[str]:
    """A line for each collective that was issued more or less than planned."""
    return [
        f"{collective} on {axis}: {recorded.get((collective, axis), (0, 0))} (times, bytes) issued, "
        f"{planned.get((collective, axis), (0, 0))} planned"
        for collective, axis in sorted({*planned, *recorded})
        if planned.get((collective, axis)) != recorded.get((collective, axis))
    ]


def unlike_plan(
    calls: Sequence[Sequence[Call]],
    collectives: Iterable[CollectivePlan],
    axes: Mapping[str, int],
    zero_ranks: int = 0,
) -> list[str]:
    """Where what all ranks issued (by rank) is not what the plan lists."""
    own = itertools.chain.from_iterable(calls[rank] for rank in first_pipeline(axes))
    return differences(planned_counts(collectives), recorded_counts(own, axes, zero_ranks))
