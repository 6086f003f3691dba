"""Every code block of README and docs runs: Python as it stands, commands of ``planner`` with tiny sizes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt

from planner.cli import main
from tests.rooms import ROOT
from tests.small_models import Mlp, mlp_batch

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
#: What stands for large models, clusters and batches of the pages.
TINY: Mapping[str, str] = {
    r"\bllama-3[.0-9]*-\d+b\b": "tiny-llama",
    r"\bdgx-h100:\d+\b": "dgx-h100:1x2",
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


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of each code block; indented blocks of commands count as shell."""
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "fence":
            yield token.info.strip(), token.content
        elif token.type == "code_block" and token.content.startswith(("planner ", "make ")):
            yield "sh", token.content


def python_of(page: Path) -> str:
    """The page's Python, one script."""
    return "\n".join(text for language, text in blocks(page) if language == "python")


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

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().mean()

    return {"torch": torch, "model": WithLoss(), "mesh": "dp=1", "batch": batch}


NAMES = {"README.md": readme_names}
#: Pages whose Python names what its reader has (``my.op``, a study, other machines); each is compiled.
#: Of the first, test_extension.py runs it.
COMPILED_ONLY = ("extension.md", "rules.md", "slow_links.md", "sweeps.md")


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)], ids=lambda page: page.name)
def test_python_of_the_pages_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = compile(python_of(page), page.name, "exec")
    if page.name not in COMPILED_ONLY:
        exec(code, NAMES.get(page.name, dict)())


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.name)
def test_commands_of_the_pages_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))  # one capture for all
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
