"""Shapes of torch's fake quantisation, whose operators have no kernel for tensors without data (torch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _with_mask(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What is quantised, and where it was in range."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _gradients(
    gradient: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(scale), torch.empty_like(zero_point)


_SHAPES: dict[str, Callable[..., Any]] = {
    "fake_quantize_per_tensor_affine_cachemask": _with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _with_mask,
    "fake_quantize_per_channel_affine_cachemask": _with_mask,
    "_fake_quantize_learnable_per_tensor_affine": _like,
    "_fake_quantize_learnable_per_channel_affine": _like,
    "_fake_quantize_learnable_per_tensor_affine_backward": _gradients,
    "_fake_quantize_learnable_per_channel_affine_backward": _gradients,
}


def _register() -> None:
    for name, shapes in _SHAPES.items():
        try:
            torch.library.register_fake(f"aten::{name}")(shapes)
        except RuntimeError:  # this torch has a kernel of its own
            continue


_register()
