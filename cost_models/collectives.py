"""α-β time of collectives: latency once, and the bytes that each device sends over its link.

``num_bytes`` is always the size of the tensor that is whole on the group: what an all-reduce reduces, an all-gather
gives, a reduce-scatter takes; an all-to-all holds 1/n of it on each of the n ranks; a send/recv passes all of it.
"""

from __future__ import annotations

from collections.abc import Callable

#: Share of ``num_bytes`` that each of n devices sends.
SENT_SHARE: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,  # a reduce-scatter and an all-gather
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n / n,  # 1/n stays, of the 1/n that each holds
    "send_recv": lambda n: 1.0,
}


def collective_seconds(
    collective: str, *, num_bytes: float, group_size: int, latency: float, bandwidth: float
) -> float:
    """Seconds of one collective in a group whose slowest link has ``latency`` (s) and ``bandwidth`` (bytes/s).

    A group of one device communicates nothing: 0.

    Raises:
        ValueError: if the collective is not known.
    """
    if collective not in SENT_SHARE:
        raise ValueError(f"unknown collective {collective!r}: expected one of {', '.join(SENT_SHARE)}")
    if group_size == 1:
        return 0.0
    return latency + SENT_SHARE[collective](group_size) * num_bytes / bandwidth


def send_recv(*, num_bytes: float, latency: float, bandwidth: float) -> float:
    """Seconds to pass ``num_bytes`` from one device to another."""
    return collective_seconds("send_recv", num_bytes=num_bytes, group_size=2, latency=latency, bandwidth=bandwidth)
