"""Containers that models of tests return."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch


class Named(NamedTuple):
    loss: Any
    logits: Any


@dataclasses.dataclass
class Plain:
    loss: Any
    logits: Any

    def doubled(self) -> torch.Tensor:
        return self.logits * 2  # type: ignore[no-any-return]
