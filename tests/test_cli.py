"""The command line: what it prints, what it saves, and how it fails."""

from __future__ import annotations

import dataclasses
import gc
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import planner
from passes.plan import Plan, serving
from planner.cli import command, main
from planner.cli.progress import describe, progress_bar
from planner.cli.shared_options import read_choices
from planner.graph_cache.graph_store import FOLDER_VARIABLE
from planner.whole_step.result.search_progress import CAPTURING, SEARCHING, Report
from tests.patience import PATIENCE
from tests.ranks import ROOT

pytestmark = pytest.mark.usefixtures("models_traced_once")

TINY = ["tiny-llama", "--mesh", "dp=2,tp=2", "--seq-len", "16", "--global-batch", "8"]
SERVE = ["tiny-llama", "--cluster", "dgx-h100:1", "--serve", "--prompt-len", "8", "--new-tokens", "4", "--batch", "2"]
ISLANDS = ["tiny-llama", "--cluster", str(ROOT / "examples/islands/three-sites.toml"), "--seq-len", "16"]
STEP = ["tiny-llama", "--cluster", "cpu-local:8", "--seq-len", "32", "--global-batch", "16"]


@pytest.fixture(scope="module")
def kept_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(autouse=True)
def graphs_are_kept(kept_graphs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a user's machine: what one command captures the next one reads."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(kept_graphs))


def test_plan_prints_saves_and_shows_the_same_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    assert main(["plan", *TINY, "--verbose", "-o", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM: a training step on 4 devices of cpu-local:4 (pp=1,dp=2,tp=2)" in printed
    assert main(["show", str(target)]) == 0
    assert capsys.readouterr().out in printed
    assert Plan.load(target).mesh.num_devices == 4
    assert Plan.load(target).config_name == "tiny-llama"
    assert main(["audit", str(target), "--no-bound"]) == 0
    assert "0 NOT ok, 1 not checked" in capsys.readouterr().out


def test_a_pin_is_obeyed(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    assert main(["plan", *TINY, "--pin", "model.layers.*.mlp.up_proj.weight", "tp", "S(0)", "-o", str(target)]) == 0
    states = Plan.load(target).states
    assert {s.placement[1] for path, s in states.items() if path.endswith("up_proj.weight")} == {"S(0)"}


def test_without_a_mesh_the_whole_step_is_planned(tmp_path: Path) -> None:
    """As users run it, into a pipe: the tables on standard output, nothing on standard error."""
    target = tmp_path / "plan.json"
    demands = ["--fix", "pp=2", "--fix", "schedule=1f1b,gpipe", "--forbid", "zero=2,3", "--headroom", "0.1"]
    command = [sys.executable, "-m", "planner", "plan", *STEP, *demands, "--fix", "tp=1,2", "--verbose"]
    command += ["-o", str(target)]
    captures = {**os.environ, FOLDER_VARIABLE: ""}  # with what torch and transformers may warn of
    done = subprocess.run(command, cwd=ROOT, env=captures, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    for title in ("Layout, outermost", "Stages, in model order", "Memory of one device", "Time of one step", "Why"):
        assert title in done.stdout
    saved_plan = Plan.load(target)
    assert saved_plan.step is not None and saved_plan.step.axes["pp"] == 2
    assert saved_plan.step.schedule in ("1f1b", "gpipe") and not {2, 3} & set(saved_plan.step.zero)
    assert saved_plan.summary() in done.stdout


def test_a_mesh_with_what_only_steps_have_is_a_step_on_that_mesh(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    assert main(["plan", *TINY, "--fix", "zero=1", "-o", str(target)]) == 0
    step = Plan.load(target).step
    assert step.axes == {"pp": 1, "dp": 2, "cp": 1, "tp": 2} and step.zero == (1,)


def test_what_is_asked_of_the_search_is_in_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    demands = ["--devices", "4", "--alternatives", "3", "--optimizer", "sgd", "--compiled", "--memory", "2"]
    assert main(["plan", *STEP, *demands, "--gradient-dtype", "bfloat16", "-o", str(target)]) == 0
    assert "next best" in capsys.readouterr().out
    step = Plan.load(target).step
    assert step is not None and step.num_devices == 4 and len(step.alternatives) >= 2
    assert (step.optimizer, step.gradient_dtype, step.compiled) == ("sgd", "bfloat16", True)
    assert step.headroom == 0.06 and step.memory_limit == pytest.approx(0.94 * 2 * 2**30)


def test_values_of_choices_are_numbers_or_words() -> None:
    texts = ["tp=4,8", "schedule=1f1b", "tp=2"]
    assert read_choices(texts, option="--fix") == {"tp": [4, 8, 2], "schedule": ["1f1b"]}
    assert read_choices(["pp=1,dp=1,2"], option="--fix") == {"pp": [1], "dp": [1, 2]}


def test_progress_is_drawn_on_terminals_alone() -> None:
    text = io.StringIO()
    with progress_bar(Console(file=text, force_terminal=True, width=200)) as listen:
        assert listen is not None
        listen(Report(CAPTURING))
        listen(Report(SEARCHING, candidate="dp=8", seconds=2.0, bound=1.5, solved=3, left=1200, num_devices=8))
    assert "best 2 s (dp=8), gap 25.0%, 3 solved, 1,200 left" in text.getvalue()
    with progress_bar(Console(file=io.StringIO())) as listen:
        assert listen is None


def test_progress_before_there_is_a_plan() -> None:
    assert describe(Report(SEARCHING, left=7)) == "nothing yet; 7 left"


def test_verify_exits_with_zero_when_the_numbers_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["verify", "tiny-llama", "--mesh", "tp=2", "--global-batch", "4", "--seq-len", "8", "--steps", "1"]) == 0
    )
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
        (["plan", *STEP, "--fix", "tp"], "NAME=VALUE"),
        (["plan", *STEP, "--fix", "td=8"], "unknown name 'td'"),
        (["plan", *STEP, "--fix", "tp=many"], "'tp' must be an integer"),
        (["plan", *STEP, "--forbid", "recompute=sometimes"], "none, regather, selective, full"),
        (["plan", *STEP, "--forbid", "all_gather"], "--mesh"),
        (["plan", *STEP, "--memory", "none"], "--memory none goes with --mesh"),
        (["plan", *STEP, "--headroom", "1.5"], "headroom"),
        (["plan", *STEP, "--memory", "999999"], "leave --memory out, or give a cluster whose devices have more"),
        (["plan", *TINY, "--memory", "999999"], "--memory none plans without a bound"),
        (["plan", *STEP, "--devices", "9"], "cannot take 9"),
        (["plan", *STEP, "--objective", "speed"], "time, devices, memory"),
        (["plan", *STEP, "--objective", "devices"], "--target-seconds goes with --objective devices"),
        (["plan", *STEP, "--alternatives", "0"], "--alternatives"),
        (["plan", *STEP, "--optimizer", "adamm"], "adamw"),
        (["plan", *TINY, "--forbid", "recompute=full", "--forbid", "all_gather"], "with --mesh alone"),
        (["plan", *TINY, "--compiled", "--memory", "none"], "--memory none goes with --mesh alone"),
        (["plan", *TINY, "--devices", "8"], "--devices is 8, but mesh dp=2,tp=2 has 4"),
        (["plan", *TINY, "--forbid", "all_gathr"], "all_gather"),
        (["plan", *SERVE, "--fix", "tp=2"], "--fix does not go with --serve: drop one of them"),
        (["plan", *SERVE, "--global-batch", "8"], "--global-batch does not go with --serve"),
        (["plan", *SERVE, "--objective", "memory"], "--objective does not go with --serve"),
        (["plan", *STEP, "--prompt-len", "8"], "--prompt-len is of generating text: add --serve"),
        (["plan", *STEP, "--pin", "lm_head", "tp", "R", "--pin", "lm_head", "tp", "S(0)"], "has R and S(0) on tp"),
        (["plan", *ISLANDS], "--global-batch must be at least 1"),
        (["plan", *ISLANDS, "--freeze", "freeze.toml"], "--freeze does not go with a cluster of islands"),
        (["plan", *ISLANDS, "--verbose"], "--verbose does not go with a cluster of islands"),
        (["plan", *STEP, "--freeze", "freeze.toml", "--for", "megatron"], "--for does not go with --freeze"),
        (["plan", *STEP, "--freeze", "freeze.toml", "--objective", "memory"], "--objective does not go with --freeze"),
        (["cluster", "show", ISLANDS[2]], "it is of islands with slow links between them"),
        (["plan", "model.py:build", *TINY[1:]], "planned from Python"),
        (["show", "no-such-plan.json"], "no-such-plan.json"),
        (["run", "--nproc", "2", "no-such-script.py"], "no-such-script.py"),
        (
            ["run", "--nproc", "none", "script.py"],
            "--nproc: expected a whole number from 1 to 10^18 - 1, got 'none'",
        ),
        (["plan", "nonsense"], "unknown model 'nonsense'"),
        (
            ["plan", "tiny-llama", "--seq-len", "-3"],
            "--seq-len: expected a whole number from 1 to 10^18 - 1, got '-3'",
        ),
        (["plan", "tiny-llama", "--seq-len", "9" * 17, "--global-batch", "8"], "from 1 to 100,000,000, got 99,999"),
        (["plan", "tiny-llama", "--seq-len", "8", "--global-batch", "9" * 17], "from 1 to 100,000,000, got 99,999"),
        (["show", "plan.json", "--tokens", "1" + "0" * 26], "--tokens: expected a whole number from 1 to 10^18 - 1"),
        (["plan", "tiny-llama", "--global-batch", "9" * 30], "--global-batch: expected a whole number"),
        (["plan", *STEP, "--alternatives", "9" * 12], "--alternatives must be at most 1,000, got 999999999999"),
        (["plan", *STEP, "--alternatives", "many"], "--alternatives: expected a whole number from 1"),
        (
            ["plan", *STEP, "--cluster", "dgx-h100:999999999"],
            "join 7,999,999,992 devices: a cluster has at most 1,000,000",
        ),
        (["plan", *STEP[:-2]], "error: --global-batch is missing"),
        (["plan", "tiny-vit", *STEP[1:]], "--seq-len is of models whose samples are tokens, tiny-vit takes images"),
        (["plan", "folder/config.json"], "there is no file of this name"),
        (["plan", str(ROOT / "tests")], "there is a folder without a config.json of this name"),
        (["plan", *STEP, "--memory", "0.0001"], "each by itself: --memory 0.1GiB"),
        (["plan", *STEP, "--time-limit", "nan"], "--time-limit: expected a positive number, got 'nan'"),
        (["plan", *TINY, "--dtype", "nn"], "--dtype: expected one of float64"),
        (["plan", *TINY, "-o", "no-such-folder/plan.json"], "there is no directory"),
        (["plan", *TINY, "-o", "."], "it is a directory"),
        (["show", "\x1b[31mplan.json"], r"'\x1b[31mplan.json'"),
        (["verify", "tiny-llama", "--mesh", "no-such-plan.json"], "cannot read plan file 'no-such-plan.json'"),
        (
            ["show", str(ROOT / "planner/library/configs/tiny-llama.json")],
            "expected what planner plan -o saves, got the config of a",
        ),
        (["verify", "tiny-llama"], "verify needs to know on what"),
        (["verify", "tiny-llama", "--mesh", "tp=2", "--fix", "tpp=2"], "unknown name 'tpp'"),
        (["verify", "tiny-llama", "--cluster", "dgx-h10"], "unknown cluster 'dgx-h10'"),
        (
            ["verify", "tiny-llama", "--mesh", "tp=2", "--steps", "0"],
            "--steps: expected a whole number from 1 to 10^18 - 1",
        ),
        ([], "COMMAND"),
    ],
)
def test_errors_are_one_line_and_exit_with_two(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error and error[:-1].isprintable()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny-llama", "--global-batch", "8"], "--seq-len is missing"),
        (["tiny-t5", "--seq-len", "16"], "--global-batch is missing"),
        (["tiny-vit", "--seq-len", "16", "--global-batch", "8"], "takes images"),
        ([*STEP, "--pin", "lm_head", "xp", "R"], "no axis 'xp' in a step, whose tensors lie on dp, ep, cp, tp"),
        ([*STEP, "--pin", "lm_head", "pp", "R"], "no axis 'pp' in a step"),
        ([*TINY, "--pin", "lm_head", "ep", "R"], "no axis 'ep' in mesh dp=2,tp=2"),
        ([*STEP, "--pin", "lm_head", "tp", "Q(0)"], "unknown type 'Q(0)'"),
        ([*STEP, "--freeze", "no-such-schedule.toml"], "no-such-schedule.toml"),
    ],
)
def test_what_is_missing_or_wrong_is_said_before_anything_slow_is_imported(arguments: list[str], words: str) -> None:
    code = (
        "import sys\nfrom planner.cli import main\ncode = main(sys.argv[1:])\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\nsys.exit(code)"
    )
    command = [sys.executable, "-c", code, "plan", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, FOLDER_VARIABLE: ""}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and words in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["why-not", "{plan}", "--memory", "none"], "--memory takes a positive number of GiB, got 'none'"),
        (["why-not", "{plan}", "--fix", "tp=1", "-o", "{plan}"], "is the plan that is read"),
        (["trace", "{plan}", "-o", "{plan}"], "is the plan that is read"),
        (["report", "{plan}", "-o", "{plan}"], "is the plan that is read"),
        (["export", "{plan}", "--to", "deepspeed", "-o", "{plan}"], "is the plan that is read"),
        (["audit", "{plan}", "--model", "json:loads"], "json:loads raised TypeError"),
        (["audit", "{plan}", "--model", "os:getcwd"], "os:getcwd returned a str; expected a function"),
    ],
)
def test_errors_about_a_saved_plan_are_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "plan.json"
    planner.plan("tiny-llama", mesh="tp=2", batch_size=4, seq_len=8).save(target)
    assert main([argument.format(plan=target) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error
    assert Plan.load(target).config_name == "tiny-llama"


def test_a_plan_of_a_config_by_path_is_asked_about_in_its_own_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, target = str(ROOT / "planner/library/configs/tiny-llama.json"), str(tmp_path / "plan.json")
    assert main(["plan", config, *STEP[1:], "--dtype", "float32", "-o", target]) == 0
    assert main(["explain", target, "lm_head", "--model", config]) == 0
    assert main(["why-not", target, "--fix", "pp=1", "--model", config]) == 0
    assert capsys.readouterr().err == ""


def test_an_error_of_our_own_is_one_line_that_says_how_to_see_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: str) -> Plan:
        raise KeyError("tp\x1b[31m\n")

    monkeypatch.setattr(serving, "read_any_plan", broken)
    assert main(["show", "plan.json"]) == 2
    error = capsys.readouterr().err
    assert "KeyError" in error and "MESHWRIGHT_TRACEBACK=1" in error and error[:-1].isprintable()
    monkeypatch.setenv("MESHWRIGHT_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main(["show", "plan.json"])


def test_a_plan_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    planner.plan("tiny-llama", mesh="tp=2", batch_size=4, seq_len=8, dtype="float64").save(target)
    assert main(["verify", "tiny-gpt2", "--mesh", str(target)]) == 2
    *_, error = capsys.readouterr().err.splitlines()  # transformers may have warned before
    assert "a plan made for another model" in error


def test_names_from_a_file_reach_the_terminal_without_control_characters(tmp_path: Path) -> None:
    plan = planner.plan("tiny-llama", mesh="tp=2", batch_size=4, seq_len=8)
    plan = dataclasses.replace(plan, model="\x1b]0;owned\x07Model", notes=("one\ntwo\x1b[2J",))
    assert plan.summary().replace("\n", "").isprintable()
    text = plan.to_json()
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"plan\.model: expected a line of printable characters"):
        Plan.load(tmp_path / "plan.json")


def test_a_terminal_that_lacks_characters_shows_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["planner", "cluster", "show", "dgx-h100:1", "--mesh", "dp=8"])
    monkeypatch.setattr(gc, "freeze", lambda: None)
    assert command() == 0
    assert b"8 ? NVIDIA H100" in screen.getvalue()


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--help"])
    assert stopped.value.code == 0
    assert "planner plan llama-3-8b" in capsys.readouterr().out


@pytest.mark.parametrize("when", ["planner.cli", "planner.cli.sweep_command"])
def test_an_interrupt_while_modules_are_loaded_ends_as_any_other(when: str) -> None:
    """In a process of its own, whose import of a module is interrupted."""
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {when!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from planner.__main__ import command\n"
        "sys.exit(command())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 130 and done.stderr.splitlines()[-1] == "planner: interrupted"
    assert "Traceback" not in done.stderr
