"""What the server of ``benchmarks.gpu.running`` imports before it forks; nothing here touches a GPU."""

from __future__ import annotations

import contextlib

import torch  # noqa: F401

import benchmarks.kill_worker  # noqa: F401
import planner.compilation  # noqa: F401

with contextlib.suppress(ImportError):
    import transformers  # noqa: F401
