"""Backward passes on a thread of their own, as autograd runs them on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from runtime.torch_compat.autograd_engine import in_backward


@contextmanager
def backward_on_its_own_thread() -> Iterator[None]:
    """Inside, what Python keeps for the thread that called ``backward`` is not there where its nodes run.

    On a processor autograd runs them in the caller's thread, on a GPU in the device's: meshes, modes and whatever else
    is kept by ``threading.local`` must be put back by whoever needs them there.
    """
    original = torch.autograd.graph._engine_run_backward

    def run(*arguments: Any, **options: Any) -> Any:
        if in_backward():
            return original(*arguments, **options)
        with ThreadPoolExecutor(1, thread_name_prefix="device") as thread:
            return thread.submit(original, *arguments, **options).result()

    with (
        mock.patch.object(torch.autograd, "_engine_run_backward", run),
        mock.patch.object(torch.autograd.graph, "_engine_run_backward", run),
    ):
        yield
