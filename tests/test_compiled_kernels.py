"""Every kernel compiles to machine code for real GPUs, spills no registers, and fits into their shared memory."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.kernels.language import has_triton

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not has_triton(), reason="Triton is not installed here")


def compile_kernels(*options: str) -> subprocess.CompletedProcess[str]:
    """``benchmarks.compiled_kernels`` in a process in which Triton compiles, as it does on a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.compiled_kernels", *options]
    return subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True)


def launched_kernels() -> set[str]:
    """Kernels of ``runtime.kernels`` as ``module.name``: what is launched is called so, what they call is not."""
    kernels = set()
    for path in (ROOT / "runtime" / "kernels").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list and node.name.endswith("kernel"):
                kernels.add(f"{path.stem}.{node.name}")
    return kernels


def test_every_kernel_compiles_without_spills(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = compile_kernels("--quick", "--markdown", str(page))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    text = page.read_text(encoding="utf-8")
    assert [kernel for kernel in sorted(launched_kernels()) if f"| {kernel} |" not in text] == []
    for device in ("sm_80", "sm_90", "sm_100"):
        assert device in text
    assert text.count("golden_chained") >= 4, "forward and backward, in both dtypes"
