"""The environments that the tests are run in."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.library.installed_transformers import OLDEST, check_version

ROOT = Path(__file__).parents[1]


def test_the_oldest_environment_has_older_torch_and_transformers_and_all_else_alike() -> None:
    latest, oldest = (
        [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        for name in ("constraints.txt", "constraints-oldest.txt")
    )
    assert [line for line in oldest if line not in latest] == ["torch==2.11.0", "transformers==5.17.0"]
    assert [line for line in latest if line not in oldest] == ["torch==2.13.0", "transformers==5.23.0"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"torch>=2.11,' in project and '"transformers>=5.17,' in project and OLDEST == (5, 17)


@pytest.mark.parametrize("version", ["5.0.0", "5.16.1", "4.57.6"])
def test_an_older_transformers_is_refused(version: str) -> None:
    check_version("5.17.0")
    check_version("6.0.0.dev0")
    with pytest.raises(ValueError, match=rf"transformers {version} is installed.* needs 5.17 or newer: pip install"):
        check_version(version)
