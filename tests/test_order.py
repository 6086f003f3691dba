"""Slow files come first in what each process of pytest is dealt."""

from types import SimpleNamespace
from typing import Any

from tests.order import SLOWEST, dealt_out


def items(**counts: int) -> list[Any]:
    return [SimpleNamespace(path=SimpleNamespace(stem=stem), number=n) for stem in counts for n in range(counts[stem])]


def test_each_process_begins_with_slow_files_of_its_own() -> None:
    first, second, third = SLOWEST[:3]
    collected = items(test_quick=10, **{third: 1, second: 2, first: 2}, test_quick_too=10)
    dealt = dealt_out(collected, 2)
    assert sorted(map(id, dealt)) == sorted(map(id, collected))
    shares = [[item.path.stem for item in share] for share in (dealt[:12], dealt[12:])]
    assert shares[0][:3] == [first, first, third] and shares[1][:2] == [second, second]
    assert [item.number for item in dealt if item.path.stem == "test_quick"] == list(range(10))


def test_more_slow_tests_than_a_share_holds_are_all_dealt() -> None:
    collected = items(**{SLOWEST[0]: 9}, test_quick=1)
    assert sorted(map(id, dealt_out(collected, 4))) == sorted(map(id, collected))
