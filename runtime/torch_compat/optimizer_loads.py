"""Seeing what every optimizer loads: torch has hooks for all optimizers' steps, but only each one's own for loading."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch


def watch_loads(before: Callable[[torch.optim.Optimizer, Mapping[str, Any]], None]) -> None:
    """Call ``before`` with the optimizer and the state dict whenever one is about to load; for good."""
    load = torch.optim.Optimizer.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: Any) -> None:
        before(self, state_dict)
        load(self, state_dict)

    torch.optim.Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]
