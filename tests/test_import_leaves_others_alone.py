"""Importing Meshwright changes nothing of the libraries that others in the process use, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = """
import importlib, os, pkgutil
os.environ["TRITON_INTERPRET"] = "1"
import torch, spmd_types
from spmd_types import _collectives, _dist
from torch.utils import _foreach_utils
from torch.distributed.tensor import DTensor
try:
    from triton.runtime import interpreter
except ImportError:
    interpreter = None

def state():
    return (
        list(_foreach_utils._foreach_supported_types),
        _collectives._AllReduce.forward,
        _dist.dist,
        interpreter and interpreter._patch_lang_tensor,
    )

before = state()
import planner
for package in ("runtime", "passes", "planner"):
    module = importlib.import_module(package)
    for info in pkgutil.walk_packages(module.__path__, package + "."):
        if not info.name.endswith("__main__"):
            importlib.import_module(info.name)
assert state() == before, (state(), before)
"""


def test_import_patches_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
