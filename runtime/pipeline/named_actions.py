"""Names of a pipeline's actions in profilers: those of the simulated step."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch.profiler import record_function

from runtime.torch_compat.dispatcher import does_profiler_run

_UNNAMED = contextlib.nullcontext()


def action(kind: str, chunk: int, microbatch: int) -> AbstractContextManager[Any]:
    """A ``with`` block that profilers show under the name that the simulator has for it."""
    return record_function(f"{kind}{chunk}.{microbatch}") if does_profiler_run() else _UNNAMED
