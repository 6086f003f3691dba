"""Names that do not depend on the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from runtime.state.owned import Owned


def named_alike(owned: Sequence[Owned], names: Sequence[str]) -> list[Owned]:
    """``owned`` with that name of a tied tensor first which comes first in ``names``: a plan may know it by another."""
    places = {name: place for place, name in enumerate(names)}

    def renamed(piece: Owned) -> Owned:
        ordered = sorted((piece.name, *piece.aliases), key=lambda name: places.get(name, len(places)))
        return dataclasses.replace(piece, name=ordered[0], aliases=tuple(ordered[1:]))

    return [renamed(piece) if piece.aliases else piece for piece in owned]
