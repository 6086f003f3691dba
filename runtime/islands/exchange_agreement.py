"""What ranks tell each other before islands exchange: after which step, and what is frozen: the same on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.agreement.ranks_together import gathered


@dataclass(frozen=True)
class ExchangeNote:
    """What a rank says.

    Attributes:
        step: inner steps that it has done.
        fragments: what it is about to exchange.
        frozen, trained: bits of the parameters that it holds, by their numbers.
        thawed: a parameter that was frozen when the optimizer was made and trains now, else empty.
    """

    step: int
    fragments: tuple[int, ...]
    frozen: int
    trained: int
    thawed: str = ""


def agreed_frozen(note: ExchangeNote, numbers: Mapping[str, int]) -> frozenset[str]:
    """Names of the parameters that are frozen on all ranks that hold them; all ranks must ask.

    Args:
        numbers: of the parameters, by name.

    Raises:
        ValueError: on all ranks, if they are at different steps, or differ in what is frozen.
    """
    notes: list[ExchangeNote] = gathered(note)
    if len({(one.step, one.fragments) for one in notes}) > 1:
        raise ValueError(
            f"the ranks meet after {[one.step for one in notes]} steps, to exchange fragments "
            f"{[list(one.fragments) for one in notes]}: give all islands as many batches (the same num_samples, or "
            "leave the loop at the shortest island's end), and call outer.step() and outer.synchronise() on all"
        )
    for rank, one in enumerate(notes):
        if one.thawed:
            raise ValueError(
                f"rank {rank}: {one.thawed!r} was frozen when planner.DiLoCo was made, so islands do not exchange it, "
                "and trains now: make DiLoCo again"
            )
    frozen, trained = 0, 0
    for one in notes:
        frozen, trained = frozen | one.frozen, trained | one.trained
    differing = [name for name, number in numbers.items() if frozen & trained & (1 << number)]
    if differing:
        raise ValueError(
            f"{differing[0]!r} is frozen on some ranks and trains on others: freeze the same parameters on all islands "
            "after the same step"
        )
    return frozenset(name for name, number in numbers.items() if frozen & (1 << number))
