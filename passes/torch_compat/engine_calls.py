"""Calls of the autograd engine from Python, and random seeds that the operating system draws."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import autograd


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def engine_calls_in(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """On this thread, every ``backward`` and ``torch.autograd.grad`` runs inside of ``context()``.

    torch takes off the modes of functions for the time of such a call, those that a custom backward needs among them.
    """
    original = autograd._engine_run_backward
    calling = threading.get_ident()

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with context() if threading.get_ident() == calling else contextlib.nullcontext():
            return original(*args, **kwargs)

    autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
    try:
        yield
    finally:
        autograd._engine_run_backward = original  # type: ignore[attr-defined]


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
