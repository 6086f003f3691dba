"""What the suite leaves out of a test's parameters, ``benchmarks.every_cell`` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.every_cell import files_with_slow_cells, main
from tests.cells import EVERY_CELL, cells, named_cells


def test_slow_cells_are_left_out_unless_every_cell_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EVERY_CELL, raising=False)
    assert cells([1], [2]) == [1] and named_cells({"a": 1, "b": 2}, "a") == {"b": 2}
    monkeypatch.setenv(EVERY_CELL, "1")
    assert cells([1], [2]) == [1, 2] and named_cells({"a": 1, "b": 2}, "a") == {"b": 2, "a": 1}
    with pytest.raises(AssertionError, match="no such cells"):
        named_cells({"a": 1}, "c")


def test_the_benchmark_runs_the_files_that_leave_some_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EVERY_CELL, "")  # what it sets is undone behind the test
    calls: list[list[str]] = []
    monkeypatch.setattr(pytest, "main", lambda words: calls.append(words) or 0)
    assert main(["-q"]) == 0 and main([__file__, "-q"]) == 0
    every, one = ([Path(word).name for word in words if word.endswith(".py")] for words in calls)
    assert "test_step_exhaustive.py" in every and one == ["test_cells.py"]
    assert every == [Path(path).name for path in files_with_slow_cells()]
