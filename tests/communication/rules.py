"""Whether ranks that do what was recorded get along under NCCL.

NCCL runs what is issued to one communicator in order, on a stream of its own, and each call ends when all that take
part have come to it. A collective and a batch of sends and receives use the communicator of the whole group; a send or
receive outside of a batch uses one of its own for the two ranks. So

1. all members of a group issue the same collectives in the same order, and get of an all-to-all what others send;
2. sends and receives of two ranks pair up in order within one communicator, tensor by tensor;
3. nothing waits in a circle: a call waits for the call before it on its communicator, for what its rank had waited for
   when it issued it, and for the same of everyone who takes part;
4. no rank issues a collective to itself alone: it would cost a launch, and do nothing.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import networkx

from tests.communication.recorder import Call, Tensors

#: A rank and the number of one of its calls.
Node = tuple[int, int]
#: The group's name, and the two ranks of a communicator of their own (none: that of the group).
Communicator = tuple[str, tuple[int, ...]]


def broken_rules(calls: Sequence[Sequence[Call]]) -> list[str]:
    """What would go wrong, a sentence each; ``calls`` by global rank."""
    partners: list[tuple[Node, Node]] = []
    errors = _collectives(calls, partners) + _pairs(calls, partners)
    return errors or _circles(calls, partners)


def communicator(rank: int, call: Call) -> Communicator:
    """What NCCL runs ``call`` on."""
    alone = call.peer >= 0 and call.batch < 0
    return call.group, (min(rank, call.peer), max(rank, call.peer)) if alone else ()


def _collectives(calls: Sequence[Sequence[Call]], partners: list[tuple[Node, Node]]) -> list[str]:
    """Rules 1 and 4."""
    issued: dict[tuple[str, tuple[int, ...]], dict[int, list[Node]]] = defaultdict(dict)
    for rank, own in enumerate(calls):
        for number, call in enumerate(own):
            if call.peer < 0:
                issued[call.group, call.members].setdefault(rank, []).append((rank, number))
    errors = []
    for (group, members), by_rank in issued.items():
        if len(members) == 1:
            errors.append(f"collective of group {group!r} over one rank {members}")
        for place, nodes in enumerate(itertools.zip_longest(*(by_rank.get(rank, []) for rank in members))):
            kinds = [None if node is None else _meaning(_at(calls, node)) for node in nodes]
            if len(set(kinds)) > 1:
                errors.append(f"collective {place} of group {group!r} {members} differs: {dict(zip(members, kinds))}")
                break
            errors += _unlike_parts([_at(calls, node) for node in nodes if node is not None])
            partners += [(nodes[0], node) for node in nodes[1:]]
    return errors


#: Collectives in which one rank has tensors of all, each as large as what the others have.
_ROOTED = ("gather", "scatter")


def _meaning(call: Call) -> tuple[str, Tensors]:
    """What must be the same on all members."""
    if call.splits:
        return call.kind, tuple((shape[1:], dtype) for shape, dtype in call.tensors)
    return call.kind, tuple(dict.fromkeys(call.tensors)) if call.kind in _ROOTED else call.tensors


def _unlike_parts(calls: Sequence[Call]) -> list[str]:
    """Of one all-to-all: who gets another number of rows than is sent."""
    if not all(call.splits for call in calls):
        return []
    return [
        f"collective of group {one.group!r}: its member {place} sends {sent} rows to {other}, which takes {received}"
        for place, one in enumerate(calls)
        for other, taker in enumerate(calls)
        if (sent := one.splits[1][other]) != (received := taker.splits[0][place])
    ]


def _pairs(calls: Sequence[Sequence[Call]], partners: list[tuple[Node, Node]]) -> list[str]:
    """Rule 2."""
    sent: dict[tuple[Communicator, int, int], list[Node]] = defaultdict(list)
    received: dict[tuple[Communicator, int, int], list[Node]] = defaultdict(list)
    for rank, own in enumerate(calls):
        for number, call in enumerate(own):
            if call.kind == "send":
                sent[communicator(rank, call), rank, call.peer].append((rank, number))
            elif call.kind == "recv":
                received[communicator(rank, call), call.peer, rank].append((rank, number))
    errors = []
    for key in {**sent, **received}:
        (_, pair), source, target = key
        where = "outside of batches" if pair else "in batches"
        if len(sent[key]) != len(received[key]):
            errors.append(
                f"{len(sent[key])} sends from rank {source} to {target} {where}, {len(received[key])} receives"
            )
        for one, other in zip(sent[key], received[key]):
            if _sizes(_at(calls, one)) != _sizes(_at(calls, other)):
                errors.append(
                    f"rank {source} sends {_at(calls, one).tensors}, {target} receives {_at(calls, other).tensors}"
                )
        partners += zip(sent[key], received[key])
    return errors


def _circles(calls: Sequence[Sequence[Call]], partners: list[tuple[Node, Node]]) -> list[str]:
    """Rule 3."""
    together = networkx.utils.UnionFind((rank, number) for rank, own in enumerate(calls) for number in range(len(own)))
    for one, other in partners:
        together.union(one, other)
    batches: dict[tuple[int, int], Node] = {}
    for rank, own in enumerate(calls):
        for number, call in enumerate(own):
            if call.batch >= 0:
                together.union(batches.setdefault((rank, call.batch), (rank, number)), (rank, number))
    waits = networkx.DiGraph()
    for rank, own in enumerate(calls):
        latest: dict[Communicator, int] = {}
        waited: Node | None = None  # a node for all that this rank has waited for so far
        for number, call in enumerate(own):
            if call.after:
                before, waited = waited, (rank, -1 - number)
                waits.add_edges_from((together[rank, earlier], waited) for earlier in call.after)
                if before is not None:
                    waits.add_edge(before, waited)
            if waited is not None:
                waits.add_edge(waited, together[rank, number])
            stream = communicator(rank, call)
            earlier = latest.get(stream, number)
            if earlier != number and not own[earlier].batch == call.batch >= 0:  # a batch's calls start together
                waits.add_edge(together[rank, earlier], together[rank, number])
            latest[stream] = number
    try:
        circle = networkx.find_cycle(waits)
    except networkx.NetworkXNoCycle:
        return []
    return [
        "a circle of waits: "
        + " → ".join(f"rank {r} call {n} ({_at(calls, (r, n)).kind})" for (r, n), _ in circle if n >= 0)
    ]


def _sizes(call: Call) -> list[tuple[int, str]]:
    """Elements and dtype of what a call moves: all that NCCL knows of a tensor."""
    return [(math.prod(shape), dtype) for shape, dtype in call.tensors]


def _at(calls: Sequence[Sequence[Call]], node: Node) -> Call:
    return calls[node[0]][node[1]]
