"""The environments that the tests are run in."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_oldest_environment_has_another_torch_and_all_else_alike() -> None:
    latest, oldest = (
        [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        for name in ("constraints.txt", "constraints-oldest.txt")
    )
    assert [line for line in oldest if line not in latest] == ["torch==2.11.0"]
    assert [line for line in latest if line not in oldest] == ["torch==2.13.0"]
    assert '"torch>=2.11,' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
