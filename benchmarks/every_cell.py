"""The tests with every combination of their parameters; the suite runs some, in which every value occurs.

python -m benchmarks.every_cell                                # all files that leave cells out: minutes
python -m benchmarks.every_cell tests/test_step_exhaustive.py -k llama        # pytest's own options
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cells import EVERY_CELL

TESTS = Path(__file__).parent.parent / "tests"


def files_with_slow_cells() -> list[str]:
    """The test files that leave some of their parameters out of the suite."""
    return [str(path) for path in sorted(TESTS.glob("test_*.py")) if "from tests.cells import" in path.read_text()]


def main(arguments: Sequence[str]) -> int:
    os.environ[EVERY_CELL] = "1"
    files = [] if any(Path(word.partition("::")[0]).exists() for word in arguments) else files_with_slow_cells()
    return pytest.main(["-p", "no:cacheprovider", *arguments, *files])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
