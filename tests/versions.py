"""What is installed: the suite runs with the newest and the oldest that is supported."""

from __future__ import annotations

import torch
import transformers


def transformers_version() -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(int(number) for number in transformers.__version__.split(".")[:2])


def torch_version() -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(int(number) for number in torch.__version__.split(".")[:2])
