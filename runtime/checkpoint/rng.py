"""Random states: what a program draws from is the same on all ranks, what a user's own code draws from is a rank's."""

from __future__ import annotations

import random
from typing import Any

import torch

from runtime.ops import random as program_random


def random_states() -> dict[str, Any]:
    """States of the generators of this rank, of Python, NumPy and PyTorch."""
    import numpy

    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Go back to what ``random_states`` gave; a device's state is left out where there is no such device."""
    import numpy

    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def program_state() -> Any:
    """Where the emitted programs are in their sequence of draws; the same on every rank."""
    return program_random.get_random_state()


def set_program_state(state: Any) -> None:
    """Go back to what ``program_state`` gave."""
    program_random.set_random_state(state)
