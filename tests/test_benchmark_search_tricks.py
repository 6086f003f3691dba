"""The benchmark of the search's tricks names what stands in the code today."""

from __future__ import annotations

import pkgutil

import pytest

from benchmarks.search_tricks import TRICKS


@pytest.mark.parametrize("trick", TRICKS)
def test_what_is_switched_off_is_there(trick: str) -> None:
    for place, _ in TRICKS[trick]:
        pkgutil.resolve_name(place)
