"""Time of collectives by algorithm, over the levels of links that a group crosses.

``num_bytes`` is always the size of the tensor that is whole on the group: what an all-reduce reduces, an all-gather
gives, a reduce-scatter takes; an all-to-all holds 1/n of it on each of the n ranks; a send/recv passes all of it.

Every algorithm costs α, a latency for each of its steps, and the bytes that pass its tightest link (Thakur,
Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005). The fastest of the
algorithms and protocols is taken, as NCCL does (its tuning model: src/graph/tuning.cc), of the algorithms that a
protocol names if it names any: gloo has rings alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from cost_models.hardware import Protocol
from cost_models.routes import Span, group_size

#: Share of ``num_bytes`` that each of n devices sends.
SENT_SHARE: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,  # a reduce-scatter and an all-gather
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n / n,  # 1/n stays, of the 1/n that each holds
    "send_recv": lambda n: 1.0,
}

#: Share of ``num_bytes`` that each of n devices deals with and sends to nobody, see ``Protocol.own_bandwidth``.
OWN_SHARE: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 1.0,
    "all_gather": lambda n: 1 / n,
    "reduce_scatter": lambda n: 1 / n,
    "all_to_all": lambda n: 1 / n / n,
    "send_recv": lambda n: 0.0,
}

#: Number of times that an algorithm passes around the group.
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def ring_seconds(collective: str, num_bytes: float, spans: Sequence[Span]) -> float:
    """Rings through all ranks: each rank passes a piece on to the next, n−1 times (all-reduce: twice).

    T = α + Σ_levels steps·hop + x + ramp·√x, x = max_levels sent·bytes / (inside·bandwidth), the innermost's with
    own·bytes / own bandwidth; sent = (n−1)/n (all-reduce: 2(n−1)/n), own = 1/n (all-reduce: 1).
    Of the n−1 steps those between the P parts of the outermost level are P−1, and so on inwards. Rings run side by
    side, one over each link that the members of a part have between them, so that a part's links add up (NCCL's
    channels). Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009; NCCL's tuning model.
    """
    rounds, size = _ROUNDS[collective], group_size(spans)
    steps = _ring_steps(spans)
    return min(
        _alpha(protocols)
        + rounds * sum(step * protocol.hop_latency for step, protocol in zip(steps, protocols))
        + _moving("ring", collective, num_bytes, spans, protocols, sent=SENT_SHARE[collective](size))
        for protocols in _protocols(spans, collective)
    )


def tree_seconds(collective: str, num_bytes: float, spans: Sequence[Span]) -> float:
    """Two binary trees, each reducing half of the tensor up to its root and sending it back down (all-reduce only).

    T = α + 2·Σ_levels ⌈log₂ parts⌉·hop + 2·bytes / min_levels (inside·bandwidth), where devices pass messages on the
    links up to the root in the place of the logarithm. Every rank is a leaf of one tree and inside the other, so that
    it sends two tensors in all. Source: Sanders, Speck and Träff, "Two-tree algorithms for
    full bandwidth broadcast, reduction and scan", 2009; NCCL 2.4's double binary trees.
    """
    rounds = _ROUNDS[collective]
    return min(
        _alpha(protocols)
        + rounds * sum(span.tree_hops * item.hop_latency for span, item in zip(spans, protocols))
        + _moving("tree", collective, num_bytes, spans, protocols, sent=rounds)
        for protocols in _protocols(spans, collective)
    )


def in_network_seconds(collective: str, num_bytes: float, spans: Sequence[Span]) -> float:
    """Switches add up (all-reduce inside a level whose switches can): each rank sends all bytes once, and gets the sum.

    T = α + 2·hop + x + ramp·√x, x = bytes / bandwidth + bytes / own bandwidth. Source: Klenk et al., "An in-network
    architecture for accelerating shared-memory multiprocessor collectives", 2020; NCCL's NVLS. Infinite where no
    switch can.
    """
    (span,) = spans if len(spans) == 1 else (None,)
    if span is None:
        return math.inf
    return min(
        (
            item.latency + 2 * item.hop_latency + _moving("ring", collective, num_bytes, spans, (item,), sent=1.0)
            for item in span.protocols
            if item.in_network and item.serves(collective, span.parts)
        ),
        default=math.inf,
    )


def hierarchical_seconds(collective: str, num_bytes: float, spans: Sequence[Span]) -> float:
    """Level after level: reduce-scatter inside, the collective on 1/inside of the bytes between, all-gather inside.

    An all-gather gathers between first, then inside; a reduce-scatter the other way round. Every member takes part
    between the parts, each with its own piece and its share of the links. T = Σ_phases T(ring in that level alone),
    the middle of an all-reduce by whatever is fastest there. Source: Horovod's hierarchical all-reduce (Sergeev and
    Del Balso, 2018); Thakur et al., 2005, section on SMP clusters.
    """
    if len(spans) == 1:
        return ring_seconds(collective, num_bytes, spans)
    inner, outer = spans[0], [_alone(span, spans[0].parts) for span in spans[1:]]
    between = num_bytes / inner.parts
    if collective != "all_reduce":
        return ring_seconds(collective, num_bytes, [inner]) + hierarchical_seconds(collective, between, outer)
    within = ring_seconds("reduce_scatter", num_bytes, [inner]) + ring_seconds("all_gather", num_bytes, [inner])
    return within + seconds_over(collective, num_bytes=between, spans=outer)


def bucket_seconds(collective: str, num_bytes: float, spans: Sequence[Span]) -> float:
    """On a torus: a share of the tensor for each dimension, which it begins with and then takes the others in turn.

    So the links of all dimensions are busy at once. T = Σ_phases max_shares T(ring of the share in its dimension); on D
    equal dimensions a D-th of ``hierarchical``, latencies aside. Source: Jain and Sabharwal, "Optimal bucket algorithms
    for large MPI collectives on torus interconnects", 2010.
    """
    dimensions = [replace(span, inside=1) for span in spans]
    seconds = 0.0
    for phase in range(len(dimensions)):
        slowest = 0.0
        for first in range(len(dimensions)):
            order = dimensions[first:] + dimensions[:first]
            gathered = num_bytes / len(dimensions) / group_size(order[:phase])
            slowest = max(slowest, ring_seconds("all_gather", gathered, [order[phase]]))
        seconds += slowest
    return seconds * _ROUNDS[collective]


def pairwise_seconds(collective: str, num_bytes: float, spans: Sequence[Span]) -> float:
    """Every rank sends each other rank its piece of 1/n² (all-to-all), on all levels at once.

    T = α + x + ramp·√x, x = max_levels (pieces for other parts)·bytes/n² / bandwidth, the innermost's with bytes/n² /
    own bandwidth. Source: Thakur et al., 2005, pairwise exchange.
    """
    size = group_size(spans)
    piece = num_bytes / size / size
    return min(
        _alpha(protocols)
        + _slowest(
            protocols,
            piece,
            [
                span.inside
                * (span.parts - 1)
                * piece
                / (span.bandwidth.exchange * item.bandwidth_efficiency(num_bytes))
                for span, item in zip(spans, protocols)
            ],
        )
        for protocols in _protocols(spans, collective)
    )


def message_seconds(collective: str, num_bytes: float, spans: Sequence[Span]) -> float:
    """Every rank sends to the next of its group, all groups at once: the slowest link that is crossed decides.

    T = max_levels (α + bytes / bandwidth), the bandwidth shared by those that cross the same link.
    """
    return max(
        span.latency
        + min(
            num_bytes / (span.bandwidth.message * item.bandwidth_efficiency(num_bytes))
            for item in span.protocols
            if item.serves(collective, span.parts)
        )
        for span in spans
    )


Algorithm = Callable[[str, float, Sequence[Span]], float]

#: By collective, the algorithms that can do it.
ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "ring": ring_seconds,
        "tree": tree_seconds,
        "in_network": in_network_seconds,
        "hierarchical": hierarchical_seconds,
        "bucket": bucket_seconds,
    },
    "all_gather": {"ring": ring_seconds, "hierarchical": hierarchical_seconds, "bucket": bucket_seconds},
    "reduce_scatter": {"ring": ring_seconds, "hierarchical": hierarchical_seconds, "bucket": bucket_seconds},
    "all_to_all": {"pairwise": pairwise_seconds},
    "send_recv": {"message": message_seconds},
}


def seconds_over(collective: str, *, num_bytes: float, spans: Sequence[Span], algorithm: str | None = None) -> float:
    """Seconds of one collective over ``spans`` by the fastest algorithm, or by the one named.

    A group of one device communicates nothing: 0.

    Raises:
        ValueError: if the collective is not known, or the algorithm cannot do it, at all or over these links.
    """
    if collective not in ALGORITHMS:
        raise ValueError(f"unknown collective {collective!r}: expected one of {', '.join(ALGORITHMS)}")
    algorithms = ALGORITHMS[collective]
    if algorithm is not None and algorithm not in algorithms:
        raise ValueError(f"no algorithm {algorithm!r} for {collective}: expected one of {', '.join(algorithms)}")
    if not spans:
        return 0.0
    if algorithm == "bucket" and not all(span.is_direct for span in spans):
        raise ValueError("algorithm 'bucket' needs links between the devices themselves, as a torus has: take another")
    if algorithm is not None:
        return algorithms[algorithm](collective, num_bytes, spans)
    possible = {
        name: seconds
        for name, seconds in algorithms.items()
        if _is_of_software(name, collective, spans) and (seconds is not bucket_seconds or _is_torus(spans))
    }
    if len(spans) == 1 and "ring" in possible:
        possible.pop("hierarchical", None)  # on one level it is a ring
    return min(seconds(collective, num_bytes, spans) for seconds in possible.values())


def _is_of_software(algorithm: str, collective: str, spans: Sequence[Span]) -> bool:
    """Whether a protocol of the innermost level may run the collective by this algorithm."""
    size = group_size(spans)
    return any(
        not item.algorithms or algorithm in item.algorithms
        for item in spans[0].protocols
        if item.serves(collective, size)
    )


def _is_torus(spans: Sequence[Span]) -> bool:
    return len(spans) > 1 and all(span.is_direct for span in spans)


def collective_seconds(
    collective: str, *, num_bytes: float, group_size: int, latency: float, bandwidth: float
) -> float:
    """Seconds of one collective among ``group_size`` ranks on equal links, ``latency`` in s, ``bandwidth`` in bytes/s.

    The α-β model: the latency counts once, whatever the number of ranks.

    Raises:
        ValueError: if the collective is not known.
    """
    spans = (Span.of_link(group_size, latency=latency, bandwidth=bandwidth),) if group_size > 1 else ()
    return seconds_over(collective, num_bytes=num_bytes, spans=spans)


def _protocols(spans: Sequence[Span], collective: str) -> list[tuple[Protocol, ...]]:
    """For each protocol of the innermost level, what it is on every level (the level's first where it has none)."""
    size = group_size(spans)
    levels = [
        [item for item in span.protocols if item.serves(collective, size) and not item.in_network] for span in spans
    ]
    return [
        tuple(next((item for item in level if item.name == first.name), level[0]) for level in levels)
        for first in levels[0]
    ]


def _alpha(protocols: Sequence[Protocol]) -> float:
    return max(protocol.latency for protocol in protocols)


def _moving(
    pattern: str,
    collective: str,
    num_bytes: float,
    spans: Sequence[Span],
    protocols: Sequence[Protocol],
    *,
    sent: float,
) -> float:
    """Seconds in which bytes move in a ``"ring"`` or ``"tree"``: over the slowest level, own bytes in the innermost."""
    own = OWN_SHARE[collective](group_size(spans)) * num_bytes
    return _slowest(
        protocols,
        own,
        [
            sent * num_bytes / (span.inside * getattr(span.bandwidth, pattern) * item.bandwidth_efficiency(num_bytes))
            for span, item in zip(spans, protocols)
        ],
    )


def _slowest(protocols: Sequence[Protocol], own_bytes: float, seconds: list[float]) -> float:
    """Seconds of the slowest level with its ramp; ``seconds`` are of the bytes that each level's links carry."""
    seconds[0] += own_bytes / protocols[0].own_bandwidth
    slowest = max(seconds)
    return slowest + protocols[seconds.index(slowest)].ramp * math.sqrt(slowest)


def _ring_steps(spans: Sequence[Span]) -> list[int]:
    """By level, how many of a ring's n−1 steps wait for it: between P parts P−1, inside them the rest.

    A step counts for each link that it passes.
    """
    steps, outer = [], 1
    for span in reversed(spans):
        steps.append((span.parts - 1) * outer * span.ring_hops)
        outer *= span.parts
    return steps[::-1]


def _alone(span: Span, inner: int) -> Span:
    """A level as a group sees it that has one member in each part of the level inside, of ``inner`` members."""
    return replace(span, inside=span.inside // inner)
