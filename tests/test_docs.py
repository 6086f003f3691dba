"""Every code block of README and docs runs: Python and commands of ``planner`` with tiny sizes, TOML in its reader.

Fenced or indented: of the latter, what is neither a command nor TOML nor Python is a drawing or a listing.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt

import planner
from cost_models.presets.preset_files import ENTRY_POINTS as PRESET_ENTRY_POINTS
from planner import extensions
from planner.changing.freeze_schedule import FreezeSchedule
from planner.cli import main
from planner.sweeps.study_format import load_study
from tests.rooms import ROOT
from tests.small_models import Mlp, mlp_batch

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
#: What stands for large models, clusters and batches of the pages.
TINY: Mapping[str, str] = {
    r"\bllama-3[.0-9]*-\d+b\b": "tiny-llama",
    r"\bdgx-h100:\d+\b": "dgx-h100:1x2",
    r"\bdgx-a100-80g:1\+dgx-v100-32g:1\b": "dgx-a100-80g:1x1+dgx-v100-32g:1x1",
    r"(?<=dgx-h100:1x2 )--mesh dp=32,tp=8\b": "--mesh dp=1,tp=2",
    r"--seq-len \d+": "--seq-len 16",
    r"--global-batch \d+": "--global-batch 8",
    r"--fix tp=\d+": "--fix tp=2",
    r"examples/clusters": str(ROOT / "examples" / "clusters"),
}
#: Commands that pages name and other tests run, with where.
ELSEWHERE: Mapping[str, str] = {
    "make": "the suite itself, and test_launch.py",
    "planner run": "test_launch.py",
    "planner verify": "test_verify.py",
    "planner report": "test_inspection.py",
    "planner sweep": "test_sweeps.py",
    "planner robustness": "test_robustness.py",
    "planner profile": "test_profile.py",
}


#: What stands for meshes, sizes and folders of the pages' Python, which runs on one process.
ONE_PROCESS: Mapping[str, str] = {
    r'"(pp=4|pp=2,dp=2|dp=4|dp=2,tp=2)"': '"dp=1"',
    r"\b(64e9|500e9)\b": "1e6",
    r'"/scratch"': '"."',
    r"\.\.\. +# requires_grad.*": "freeze_first_layers(parallel)",
}
#: In blocks that need other processes: they are compiled, test_elastic.py and test_replan.py run the like.
OTHER_PROCESSES = ("planner.join(", "planner.Elastic(", "job.steps(", "ranks=[")
#: What first words of indented lines are no code: what a program says, of which there are no more than these.
LISTINGS = ("nn.Module ─►", "mine/rack.toml", "run/\n", "ValueError: ")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of each code block."""
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "fence":
            yield token.info.strip(), token.content
        elif token.type == "code_block":
            yield language_of(token.content, page), token.content


def language_of(text: str, page: Path) -> str:
    """Of an indented block: shell, TOML, Python or text."""
    if text.startswith(("planner ", "make ")):
        return "sh"
    if text.startswith(LISTINGS):
        return "text"
    try:
        tomllib.loads(text)
        return "toml"
    except tomllib.TOMLDecodeError:
        pass
    try:
        ast.parse(text)
        return "python"
    except SyntaxError as error:
        raise AssertionError(f"{page.name}: neither a command nor TOML nor Python: {text}") from error


def python_of(page: Path, *, leaving_out: tuple[str, ...] = ()) -> str:
    """The page's Python, one script, without blocks that have one of ``leaving_out`` in them."""
    texts = (text for language, text in blocks(page) if language == "python")
    return "\n".join(text for text in texts if not any(words in text for words in leaving_out))


def commands_of(page: Path) -> list[str]:
    """Commands of the page's shell blocks, without comments, continued lines joined."""
    shell = "\n".join(text for language, text in blocks(page) if language in ("sh", "bash", "shell"))
    lines = shell.replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def readme_names() -> dict[str, Any]:
    """What the first block of the README is handed: a model, a mesh, a batch."""
    model, batch = Mlp(layers=2).double(), {"x": mlp_batch(batch=4)[0]}

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = self.inner(x)
            return {"loss": outputs.square().mean(), "logits": outputs}

    samples = [{"x": row} for row in mlp_batch(batch=64)[0]]
    datasets = {f"{kind}_dataset": samples for kind in ("train", "eval", "test")}
    return {"torch": torch, "model": WithLoss(), "mesh": "dp=1", "batch": batch, **datasets}


class MeanSquare(Mlp):
    """A model that returns its loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def names_of_a_training() -> dict[str, Any]:
    """What a training has that changes while it runs."""
    weights = torch.nn.Parameter(torch.zeros(1))
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([weights]), 1)

    def freeze_first_layers(parallel: Any) -> None:
        for part in (parallel.first, *(parallel.get_submodule(f"layers.{index}") for index in range(4))):
            part.requires_grad_(False).eval()

    return {
        "torch": torch, "planner": planner, "schedule": schedule, "epoch": 1, "frozen": 0, "norms": [1.0] * 12,
        "model": MeanSquare(layers=12).double(), "batch": {"x": mlp_batch(batch=4)[0]},
        "freeze_first_layers": freeze_first_layers,
    }  # fmt: skip


NAMES = {"README.md": readme_names, "changing_training.md": names_of_a_training}
#: Pages whose Python names what its reader has (``my.op``, a study, other machines); each is compiled.
#: Of the first, test_extension.py runs it.
COMPILED_ONLY = ("extension.md", "rules.md", "slow_links.md", "sweeps.md")


@pytest.mark.usefixtures("models_traced_once")
@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)], ids=lambda page: page.name)
def test_python_of_the_pages_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compile(python_of(page), page.name, "exec")
    if page.name not in COMPILED_ONLY:
        script = python_of(page, leaving_out=OTHER_PROCESSES)
        for pattern, tiny in ONE_PROCESS.items():
            script = re.sub(pattern, tiny, script)
        exec(compile(script, page.name, "exec"), NAMES.get(page.name, dict)())


def entry_points(path: Path) -> None:
    """A package's own, in the groups that are looked at."""
    groups = tomllib.loads(path.read_text())["project"]["entry-points"]
    assert set(groups) == {extensions.ENTRY_POINTS, PRESET_ENTRY_POINTS}


#: Page → who reads its TOML.
TOML_READERS: Mapping[str, Callable[[Path], object]] = {
    "changing_training.md": FreezeSchedule.from_toml,
    "extension.md": entry_points,
    "sweeps.md": load_study,
}
#: Between two ways to say the same in one block.
OR = "# or in their place\n"


def tomls_of(page: Path) -> Iterator[str]:
    """The page's TOML files; of a block with two ways to say the same, one each."""
    for text in (text for language, text in blocks(page) if language == "toml"):
        first, *others = text.split(OR)
        common = first[: first.index("[[")] if others else ""
        yield from (first, *(common + other for other in others))


@pytest.mark.parametrize("page", [page for page in PAGES if any(tomls_of(page))], ids=lambda page: page.name)
def test_toml_of_the_pages_is_read(page: Path, tmp_path: Path) -> None:
    (tmp_path / "my-cluster.toml").write_text((ROOT / "examples" / "clusters" / "fat-tree.toml").read_text())
    for text in tomls_of(page):
        (tmp_path / "page.toml").write_text(text)
        TOML_READERS[page.name](tmp_path / "page.toml")


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.name)
def test_commands_of_the_pages_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # One capture for all pages.
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(Path(os.environ["MESHWRIGHT_TEST_RUN"]) / "pages"))
    for command in commands_of(page):
        if any(command.startswith(name) for name in ELSEWHERE):
            continue
        for pattern, tiny in TINY.items():
            command = re.sub(pattern, tiny, command)
        program, *words = shlex.split(command)
        assert program == "planner", f"{page.name}: {command} is run by no test"
        assert main(words) == 0, f"{page.name}: {command}: {capsys.readouterr().err}"
        plan = Path("plan.json")
        if plan.exists() and not Path("other.json").exists():
            Path("other.json").write_text(plan.read_text())


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
