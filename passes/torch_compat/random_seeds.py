"""``torch.seed`` and ``torch.manual_seed`` for traces and trials: alike in every run, or without effect."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def seeds_in_order() -> Iterator[None]:
    """On this thread, ``torch.seed`` seeds with 1, 2, 3, …, the same in every run; the caller's numbers go on after."""
    original = torch.seed
    seeding = threading.get_ident()
    seeds = itertools.count(1)

    def seed() -> int:
        if threading.get_ident() != seeding:
            return original()
        number = next(seeds)
        torch.manual_seed(number)
        return number

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        torch.seed = torch.random.seed = seed
        try:
            yield
        finally:
            torch.seed = torch.random.seed = original


@contextlib.contextmanager
def seeds_without_effect() -> Iterator[None]:
    """On this thread, ``torch.seed`` and ``torch.manual_seed`` leave generators alone: what moves them is a draw."""
    originals = torch.seed, torch.manual_seed
    seeding = threading.get_ident()

    def any_seed() -> int:
        return torch.initial_seed() if threading.get_ident() == seeding else originals[0]()

    def manual_seed(seed: Any) -> torch.Generator:
        return torch.default_generator if threading.get_ident() == seeding else originals[1](seed)

    torch.seed = torch.random.seed = any_seed
    torch.manual_seed = torch.random.manual_seed = manual_seed
    try:
        yield
    finally:
        torch.seed = torch.random.seed = originals[0]
        torch.manual_seed = torch.random.manual_seed = originals[1]
