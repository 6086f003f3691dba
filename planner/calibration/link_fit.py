"""A level of links fitted to collectives measured over it: what ``cost_models.collectives`` prices them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from cost_models.collectives import seconds_over
from cost_models.efficiency import FULL, Curve
from cost_models.hardware import LinkLevel, Protocol
from cost_models.routes import Span
from planner.calibration.collective_cases import COLLECTIVES
from planner.calibration.curve_fit import fit_curve
from planner.calibration.measured_call import MeasuredCall

#: Calls whose bytes take less than that share of their time at the full bandwidth are latency's.
SHORT = 0.05
#: Calls say something of the bandwidth whose bytes take more than that share of the latency at the full bandwidth.
SEEN = 0.3
_PROTOCOL = "measured"


def fit_level(name: str, group_size: int, calls: Sequence[MeasuredCall], *, shared_by: int = 1) -> LinkLevel:
    """The level of links that ``calls`` were measured over.

    A collective takes α + steps·hop + x / e(bytes), where x is what its bytes take at the full bandwidth, the largest
    that any call reached. α and the latency of a hop are the least squares through groups of several sizes, of each the
    median of the calls that are latency's (``SHORT``), neither below zero; e is a curve through the rest. Where ranks
    share a link the bandwidth is the link's, which carries the bytes of ``shared_by`` of them.

    Raises:
        ValueError: if nothing was measured over it.
    """
    fitted = [call for call in calls if call.is_fitted]
    if not fitted:
        raise ValueError(f"no collective was measured over the level {name!r}")
    bandwidth = max(_bytes_sent(call) / call.seconds for call in fitted)  # of a rank
    latencies = {each: _latencies([call for call in fitted if call.kind == each], bandwidth) for each in COLLECTIVES}
    level = LinkLevel(
        name, group_size, latency=latencies["send_recv"][0], bandwidth=shared_by * bandwidth, shared_by=shared_by
    )
    protocols = {
        each: _protocol(each, latencies[each], bandwidth, [call for call in fitted if call.kind == each])
        for each in COLLECTIVES
        if any(call.kind == each for call in fitted)
    }
    stand_in = protocols.get("all_gather") or next(iter(protocols.values()))
    served = [protocols.get(each, replace(stand_in, collectives=(each,))) for each in COLLECTIVES]
    return replace(level, protocols=tuple(served))


def _priced(call: MeasuredCall, *, num_bytes: float, bandwidth: float = 1.0, hop: float = 0.0) -> float:
    """What the cost model's formulas give with these figures and no latency."""
    protocol = Protocol(_PROTOCOL, 0.0, hop)
    span = replace(Span.of_link(call.ranks, latency=0.0, bandwidth=bandwidth), protocols=(protocol,))
    return seconds_over(call.kind, num_bytes=num_bytes, spans=(span,))


def _bytes_sent(call: MeasuredCall) -> float:
    return _priced(call, num_bytes=call.num_bytes)


def _steps(call: MeasuredCall) -> float:
    return 0.0 if call.kind == "send_recv" else _priced(call, num_bytes=0.0, hop=1.0)


def _is_short(call: MeasuredCall, bandwidth: float) -> bool:
    return _bytes_sent(call) / bandwidth < SHORT * call.seconds


def _latencies(calls: Sequence[MeasuredCall], bandwidth: float) -> tuple[float, float]:
    """(α, seconds of a hop) through the median of the short calls of each size of group, both at least zero.

    Where no call is that short the shortest stands in.
    """
    by_size: dict[int, list[MeasuredCall]] = {}
    for call in calls:
        by_size.setdefault(call.ranks, []).append(call)
    points = []
    for alike in by_size.values():
        short = [call.seconds for call in alike if _is_short(call, bandwidth)]
        points.append((_steps(alike[0]), median(short or [min(call.seconds for call in alike)])))
    if not points:
        return 0.0, 0.0
    mean_steps, mean = (sum(column) / len(points) for column in zip(*points))
    spread = sum((steps - mean_steps) ** 2 for steps, _ in points)
    covariance = sum((steps - mean_steps) * (seconds - mean) for steps, seconds in points)
    hop = max(0.0, covariance / spread) if spread else 0.0
    alpha = mean - hop * mean_steps
    if alpha >= 0:
        return alpha, hop
    return 0.0, sum(steps * seconds for steps, seconds in points) / sum(steps**2 for steps, _ in points)


def _protocol(
    collective: str, latencies: tuple[float, float], bandwidth: float, calls: Sequence[MeasuredCall]
) -> Protocol:
    alpha, hop = latencies
    points = []
    for call in calls:
        started, whole = alpha + hop * _steps(call), _bytes_sent(call) / bandwidth
        if whole > SEEN * started:
            points.append((call.num_bytes, min(1.0, whole / max(call.seconds - started, whole))))
    curve: Curve = fit_curve(points) if points else FULL
    return Protocol(_PROTOCOL, alpha, hop, curve, collectives=(collective,))
