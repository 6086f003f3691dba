"""What holds for every test: none leaves a process group behind for the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A model compiled in the tests' own process joins a group of one."""
    yield
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
