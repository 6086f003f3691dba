"""Names of a pipeline's actions in profilers: those of the simulated step."""

from __future__ import annotations

from torch.profiler import record_function


def action(kind: str, chunk: int, microbatch: int) -> record_function:
    """A ``with`` block that profilers show under the name that the simulator has for it."""
    return record_function(f"{kind}{chunk}.{microbatch}")
