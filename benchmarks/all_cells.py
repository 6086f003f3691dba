"""Every cell of the products of which the tests run a part.

    python -m benchmarks.all_cells [ARGUMENT OF PYTEST…]

``tests.cells`` leaves out cells whose values other cells of the suite have in other combinations. Here the same tests
run with all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cells import VARIABLE

ROOT = Path(__file__).resolve().parent.parent


def files() -> list[str]:
    """The tests that leave cells out."""
    tests = sorted((ROOT / "tests").glob("test_*.py"))
    return [str(path) for path in tests if "from tests.cells import" in path.read_text(encoding="utf-8")]


def main() -> None:
    environment = {**os.environ, VARIABLE: "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", *files(), *sys.argv[1:]]
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
