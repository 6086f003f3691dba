"""What is left to wait for of collectives that an operator sends in pieces, beside its own arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from passes.rules.rule import AxisChoice
from planner.sharding_ilp.own_collective import Collective


def exposed(
    collectives: Iterable[Collective], choices: Sequence[AxisChoice], *, beside: tuple[float, float], slowdown: float
) -> tuple[Collective, ...]:
    """``collectives`` of an operator with the seconds that they add to it.

    All are on their way in turn, n pieces of them beside n pieces of the operator's T_m seconds: of T_c seconds

        max(T_c − T_m·(n − 1)/n, T_c/n)

    are waited for (one piece has nothing beside it), and each hidden second costs ``slowdown`` of computing. An
    operator that sends nothing in pieces waits for all.

    Args:
        beside: seconds that the operator computes, forward and backward.
    """
    items = tuple(collectives)
    if all(choice.rows is None for choice in choices):
        return items
    return waited_for(items, beside=beside, slowdown=slowdown)


def waited_for(
    collectives: Sequence[Collective], *, beside: tuple[float, float], slowdown: float
) -> tuple[Collective, ...]:
    """The same of an operator, or of several at once, that sends some of them in pieces."""
    result: list[Collective] = []
    for forward in (True, False):
        of_phase = [item for item in collectives if (item.phase == "forward") == forward]
        num_pieces = max(1, sum(item.in_pieces for item in of_phase))
        total, arithmetic = sum(item.seconds for item in of_phase), beside[not forward]
        waited = max(total - arithmetic * (num_pieces - 1) / num_pieces, total / num_pieces)
        share = (waited + slowdown * (total - waited)) / total if total else 1.0
        result += [dataclasses.replace(item, seconds=item.seconds * share) for item in of_phase]
    return tuple(result)
