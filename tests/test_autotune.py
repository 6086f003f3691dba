"""The cache of measured launch options, and the tiles that are measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.kernels import autotune
from runtime.kernels.tiling import ranked_tiles

CANDIDATES = ((1, 64), (2, 32), (4, 16))
TIMES = {(1, 64): 3.0, (2, 32): 1.0, (4, 16): 2.0}
KEY = {"kernel": "abc", "device": "a GPU", "triton": "3.6.0", "rows": 1024, "dtypes": ["torch.float32"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(autotune.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(autotune, "_known", {})
    yield tmp_path / "cache"


class Clock:
    """Times candidates by a table, and counts."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, candidate: tuple[int, ...]) -> float:
        self.asked.append(candidate)
        return TIMES[candidate]


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process."""
    monkeypatch.setattr(autotune, "_known", {})


def the_file(folder: Path) -> Path:
    (path,) = folder.rglob("*.json")
    return path


def test_the_fastest_is_measured_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    assert autotune.best(KEY, CANDIDATES, clock) == (2, 32)
    assert autotune.best(KEY, CANDIDATES, clock) == (2, 32)
    forget(monkeypatch)
    assert autotune.best(KEY, CANDIDATES, clock) == (2, 32)
    assert clock.asked == list(CANDIDATES)
    assert json.loads(the_file(folder).read_text())["key"] == KEY


def test_one_candidate_is_not_measured(folder: Path) -> None:
    clock = Clock()
    assert autotune.best(KEY, CANDIDATES[:1], clock) == (1, 64)
    assert clock.asked == [] and not folder.exists()


@pytest.mark.parametrize("change", [{"device": "another"}, {"triton": "3.7.0"}, {"rows": 2048}, {"kernel": "abd"}])
def test_another_call_is_measured_anew(change: dict[str, object]) -> None:
    clock = Clock()
    autotune.best(KEY, CANDIDATES, clock)
    autotune.best({**KEY, **change}, CANDIDATES, clock)
    assert len(clock.asked) == 2 * len(CANDIDATES)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", '{"key": 1}', json.dumps({"key": {**KEY, "rows": 1}, "choice": [4, 16]}),
     json.dumps({"key": KEY, "choice": [8, 8]}), json.dumps({"key": KEY, "choice": 3}), "\x00\xff"],
)  # fmt: skip
def test_a_file_that_is_no_answer_is_replaced(content: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    autotune.best(KEY, CANDIDATES, Clock())
    the_file(folder).write_bytes(content.encode("latin-1"))
    forget(monkeypatch)
    clock = Clock()
    assert autotune.best(KEY, CANDIDATES, clock) == (2, 32) and len(clock.asked) == 3
    assert json.loads(the_file(folder).read_text())["choice"] == [2, 32]


def test_nothing_but_answers_is_left_behind(folder: Path) -> None:
    autotune.best(KEY, CANDIDATES, Clock())
    assert [path.suffix for path in folder.rglob("*") if path.is_file()] == [".json"]


def test_a_folder_that_cannot_be_written_costs_no_more_than_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(autotune.VARIABLE, str(tmp_path / "file"))
    assert autotune.best(KEY, CANDIDATES, Clock()) == (2, 32)


def test_the_cache_is_in_the_home_folder_if_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(autotune.VARIABLE)
    assert autotune.cache_folder() == Path.home() / ".cache" / "meshwright"


@given(
    num_rows=st.integers(1, 10**7),
    width=st.integers(1, 16384),
    tensors=st.integers(1, 12),
    whole_rows=st.booleans(),
)
def test_tiles_are_powers_of_two_that_fit(num_rows: int, width: int, tensors: int, whole_rows: bool) -> None:
    tiles = ranked_tiles(
        num_rows, width, item_bytes=4 * tensors, tensors=tensors, processors=132, whole_rows=whole_rows
    )
    assert tiles and len(set(tiles)) == len(tiles)
    for tile in tiles:
        assert all(size & (size - 1) == 0 for size in tile)
        assert not whole_rows or tile.columns >= width
        assert tile.rows * tile.columns <= max(4096, 2 * width)


def test_tiles_waste_little() -> None:
    """Rows of a power of two are cut evenly; of narrow ones many are held at once."""
    (best, *_) = ranked_tiles(8192, 4096, item_bytes=6, tensors=3, processors=132, whole_rows=False)
    assert 4096 % best.columns == 0 and best.rows * best.columns >= 1024
    (narrow, *_) = ranked_tiles(10**6, 8, item_bytes=6, tensors=3, processors=132, whole_rows=False)
    assert narrow.columns == 8 and narrow.rows >= 64
