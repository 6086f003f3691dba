"""The command line: what it prints, what it saves, and how it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from passes.plan import Plan
from planner.cli import main

TINY = ["tiny-llama", "--mesh", "dp=2,tp=2", "--seq-len", "16", "--global-batch", "8"]


def test_plan_prints_saves_and_shows_the_same_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    assert main(["plan", *TINY, "-o", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM: training on mesh dp=2,tp=2 (4 devices" in printed
    assert main(["show", str(target)]) == 0
    assert capsys.readouterr().out in printed
    assert Plan.load(target).mesh.num_devices == 4


def test_a_pin_is_obeyed(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    assert main(["plan", *TINY, "--pin", "model.layers.*.mlp.up_proj.weight", "tp", "S(0)", "-o", str(target)]) == 0
    states = Plan.load(target).states
    assert {s.placement[1] for path, s in states.items() if path.endswith("up_proj.weight")} == {"S(0)"}


def test_verify_exits_with_zero_when_the_numbers_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "tiny-llama", "--mesh", "tp=2", "--global-batch", "4", "--seq-len", "8"]) == 0
    assert "loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "tiny-lama", "--mesh", "dp=2", "--global-batch", "4", "--seq-len", "8"], "tiny-llama"),
        (["plan", "tiny-llama", "--mesh", "dp2", "--global-batch", "4", "--seq-len", "8"], "name=size"),
        (["plan", *TINY, "--cluster", "dgx-h1000:1"], "dgx-h100"),
        (["plan", *TINY, "--cluster", "dgx-h100:1"], "has 4 devices but cluster"),
        (["plan", *TINY, "--memory", "lots"], "--memory"),
        (["plan", *TINY, "--pin", "model.layer.*", "tp", "S(0)"], "model.layer.*"),
        (["show", "no-such-plan.json"], "no-such-plan.json"),
        (["run", "--nproc", "2", "no-such-script.py"], "no-such-script.py"),
    ],
)
def test_errors_are_one_line_and_exit_with_two(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--help"])
    assert stopped.value.code == 0
    assert "planner plan llama-3-8b" in capsys.readouterr().out
