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
        gradients: bits of those that have one, where gradients are about to be exchanged.
    """

    step: int
    fragments: tuple[int, ...]
    frozen: int
    trained: int
    thawed: str = ""
    gradients: int = 0


@dataclass(frozen=True)
class Agreement:
    """Names of the parameters that are frozen on all ranks that hold them, and that have a gradient on any."""

    frozen: frozenset[str]
    with_gradients: frozenset[str]


def agreed(note: ExchangeNote, numbers: Mapping[str, int]) -> Agreement:
    """What all ranks say together; all must ask.

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
    frozen, trained, gradients = 0, 0, 0
    for one in notes:
        frozen, trained, gradients = frozen | one.frozen, trained | one.trained, gradients | one.gradients
    differing = _named(frozen & trained, numbers)
    if differing:
        raise ValueError(
            f"{differing[0]!r} is frozen on some ranks and trains on others: freeze the same parameters on all islands "
            "after the same step"
        )
    return Agreement(frozenset(_named(frozen, numbers)), frozenset(_named(gradients, numbers)))


def _named(bits: int, numbers: Mapping[str, int]) -> list[str]:
    return [name for name, number in numbers.items() if bits & (1 << number)]
