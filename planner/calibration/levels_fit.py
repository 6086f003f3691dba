"""The levels of a cluster's links, each fitted to collectives over it alone, and to those that cross all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from cost_models.collectives import ALGORITHMS, seconds_over
from cost_models.hardware import LinkLevel, Protocol
from cost_models.routes import route
from planner.calibration.collective_cases import ACROSS, ALONE, HOST, NETWORK
from planner.calibration.link_fit import SHORT, fit_level
from planner.calibration.measured_call import MeasuredCall

#: Algorithms that software may have or not, where levels are joined by switches.
_RINGS_AND_TREES = ("ring", "tree", "hierarchical")
#: One set of algorithms must be closer than another by that much of a logarithm, or it is noise.
_CLOSER = 0.01
#: A call alone says something of its link's bandwidth from so many times the shortest's seconds on.
_LONG = 4.0
_HALVINGS = 40


def fit_levels(calls: Sequence[MeasuredCall], *, world_size: int, per_host: int) -> tuple[LinkLevel, ...]:
    """The levels that were measured, innermost first; none if nothing was.

    Ranks of a host share their links to the network if these carry no more for all of them than for one. Which
    algorithms the software has is what comes closest to collectives over all levels; what these take longer to start
    than the levels say is put on the steps of levels that were measured with a single size of group.
    """
    sizes = {HOST: per_host, NETWORK: world_size}
    named = [name for name in sizes if any(call.place == name and call.ranks > 1 for call in calls)]
    calls = [call for call in calls if call.kind in ALGORITHMS]
    shared_by = {NETWORK: _sharers(calls, per_host)}
    levels = tuple(
        fit_level(
            name,
            sizes[name],
            [call for call in calls if call.place == name],
            shared_by=shared_by.get(name, 1),
        )
        for name in named
    )
    across = [call for call in calls if call.place == ACROSS and call.is_fitted]
    sizes_of = {name: {call.ranks for call in calls if call.place == name and call.is_fitted} for name in named}
    unknown_hops = {name: sizes.pop() for name, sizes in sizes_of.items() if len(sizes) == 1}
    for kind in dict.fromkeys(call.kind for call in across):
        levels = _fitted_across(levels, kind, [call for call in across if call.kind == kind], unknown_hops)
    return levels


def predicted_seconds(levels: Sequence[LinkLevel], call: MeasuredCall) -> float:
    """What the cost model says of a measured collective."""
    stride = levels[0].group_size if call.place == NETWORK and len(levels) > 1 else 1
    spans = route(levels, stride=stride, size=call.ranks)
    return seconds_over(call.kind, num_bytes=call.num_bytes, spans=spans)


def _sharers(calls: Sequence[MeasuredCall], per_host: int) -> int:
    """How many ranks of a host share a link to the network: the divisor of ``per_host`` that is closest to measured.

    Of the collective that fills a link best: seconds of all ranks of a host at once over those of one rank of each.
    """
    together = {(call.kind, call.shape, call.ranks): call.seconds for call in calls if call.place == NETWORK}
    alone = [call for call in calls if call.place == ALONE and (call.kind, call.shape, call.ranks) in together]
    shortest = {call.kind: call.seconds for call in sorted(alone, key=lambda call: -call.seconds)}
    long = [call for call in alone if call.seconds >= _LONG * shortest[call.kind]]
    if not long:
        return 1
    fullest = max(long, key=lambda call: _moved(call) / call.seconds).kind
    ratio = median(together[call.kind, call.shape, call.ranks] / call.seconds for call in long if call.kind == fullest)
    divisors = [count for count in range(1, per_host + 1) if per_host % count == 0]
    return min(divisors, key=lambda count: abs(math.log(ratio / count)))


def _moved(call: MeasuredCall) -> float:
    """Bytes that each rank sends."""
    link = LinkLevel("", call.ranks, latency=0.0, bandwidth=1.0)
    return seconds_over(call.kind, num_bytes=call.num_bytes, spans=route((link,), stride=1, size=call.ranks))


def _fitted_across(
    levels: tuple[LinkLevel, ...], kind: str, calls: Sequence[MeasuredCall], unknown_hops: Mapping[str, int]
) -> tuple[LinkLevel, ...]:
    """The levels with the one algorithm that is closest to the calls, unless all of them together are as close."""
    choices: list[tuple[str, ...]] = [(), *((name,) for name in _RINGS_AND_TREES if name in ALGORITHMS[kind])]
    tried = [_with_hops(_changed(levels, kind, algorithms=each), kind, calls, unknown_hops) for each in choices]
    errors = [fmean(abs(math.log(call.seconds / predicted_seconds(each, call))) for call in calls) for each in tried]
    closest = min(range(len(tried)), key=errors.__getitem__)
    return tried[closest if errors[closest] < errors[0] - _CLOSER else 0]


def _with_hops(
    levels: tuple[LinkLevel, ...], kind: str, calls: Sequence[MeasuredCall], unknown: Mapping[str, int]
) -> tuple[LinkLevel, ...]:
    """The levels whose collectives over all of them start as late as measured.

    A level of which a single size of group was measured (``unknown``: of how many ranks) has α + steps·hop, and any
    hop: of all such levels the same share of the seconds that are latency's is the steps', as large as the calls ask.
    """
    free = _changed(levels, kind, latency=0.0, hop_latency=0.0)
    short = [call for call in calls if predicted_seconds(free, call) < SHORT * call.seconds]
    short = short or [min(calls, key=lambda call: call.num_bytes)]
    target = median(call.seconds for call in short)

    def with_share(share: float) -> tuple[LinkLevel, ...]:
        return tuple(
            replace(
                level,
                protocols=tuple(_shifted(each, kind, share, ranks=unknown[level.name]) for each in level.protocols),
            )
            if level.name in unknown
            else level
            for level in levels
        )

    def starts(share: float) -> float:
        return median(predicted_seconds(with_share(share), call) for call in short)

    low, high = 0.0, 1.0
    if starts(high) <= starts(low) or starts(low) >= target:
        return levels
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if starts(middle) < target else (low, middle)
    return with_share(low)


def _shifted(protocol: Protocol, kind: str, share: float, *, ranks: int) -> Protocol:
    """The protocol with so much of its latency moved to the steps of the only group that was measured."""
    steps = {"all_reduce": 2 * (ranks - 1), "all_gather": ranks - 1, "reduce_scatter": ranks - 1}.get(kind, 0)
    if protocol.collectives != (kind,) or not steps:
        return protocol
    moved = share * protocol.latency
    return replace(protocol, latency=protocol.latency - moved, hop_latency=protocol.hop_latency + moved / steps)


def _changed(levels: tuple[LinkLevel, ...], kind: str, **figures: Any) -> tuple[LinkLevel, ...]:
    """The levels whose protocols for a collective have these figures."""
    return tuple(
        replace(
            level,
            protocols=tuple(
                replace(each, **figures) if each.collectives == (kind,) else each for each in level.protocols
            ),
        )
        for level in levels
    )
