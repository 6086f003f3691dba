"""Computing in a narrower dtype than the model's parameters: what is captured, and inputs to go with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from passes.capture.precision_of_calls import mark_precision
from passes.torch_compat.operators import tree_map
from runtime.calls.skeleton import skeleton


def compute_dtype(name: str | torch.dtype) -> torch.dtype:
    """A floating-point dtype by name (``"bfloat16"``, ``"bf16"``).

    Raises:
        ValueError: if there is no such dtype.
    """
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dtype = name if isinstance(name, torch.dtype) else dtypes.get(name, getattr(torch, name, None))
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"precision {name!r} is not known: expected a floating-point dtype like 'bfloat16'")
    return dtype


def computing_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of ``model`` without data whose floating-point parameters are of ``dtype``; buffers keep theirs.

    Inputs keep their dtype, and each call decides on its own (``passes.capture.precision_of_calls``). What is narrower
    than before computes its losses in float32.
    """
    lean = skeleton(model)
    parameters = [parameter for parameter in lean.parameters() if parameter.is_floating_point()]
    mark_precision(lean, dtype, wide_losses=any(one.dtype.itemsize > dtype.itemsize for one in parameters))
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    return lean


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Nested arguments with their floating-point tensors in ``dtype``."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, tree)
