"""What the command prints: ten lines that matter first, and nothing wider than the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from passes.plan import Plan
from planner.cli import _parser, main
from planner.cli.terminal import fold

pytestmark = pytest.mark.usefixtures("models_traced_once")

STEP = ["plan", "tiny-llama", "--cluster", "dgx-h100:1x4", "--seq-len", "16", "--global-batch", "16"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(list(arguments)) == 0, arguments
    return capsys.readouterr().out.splitlines()


def test_no_command_prints_lines_that_wrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    first, second = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    brief = printed(capsys, *STEP, "--fix", "pp=2", "--fix", "schedule=interleaved_1f1b", "-o", first)
    assert len(brief) <= 20 and "a step as simulated" in brief[1] and any("next best" in line for line in brief)
    reasons = Plan.load(first).explain("*self_attn*")
    assert sum(reasons.prices.values()) == pytest.approx(Plan.load(first).certificate.objective, rel=1e-9)
    assert main(["explain", first, "model.layers.1.mlp.down_pro"]) == 2
    assert "did you mean" in capsys.readouterr().err
    commands = [
        [*STEP, "--fix", "tp=2", "--verbose", "--compare", "fsdp,hsdp", "--layout", "dp=3", "-o", second],
        ["show", first, "--operators"],
        ["diff", first, second, "--all"],
        ["explain", first, "model.layers.1.mlp.down_proj"],
        ["trace", first, "-o", str(tmp_path / "trace.json")],
        ["audit", first, "--no-bound"],
        ["cluster", "show", "dgx-h100:4", "--mesh", "dp=4,tp=8"],
    ]
    for command in commands:
        wide = [line for line in printed(capsys, *command) if len(line) > 80]
        assert not wide, (command, wide)


def test_no_help_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = _parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in {"": parser, **commands.choices}.items():
        assert max(map(len, command.format_help().splitlines())) <= 80, name


def test_a_line_is_folded_between_words_and_indented() -> None:
    assert fold("  * one two three", 12) == "  * one two\n      three"
    assert fold("short", 12) == "short"
