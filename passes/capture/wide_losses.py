"""Losses of a model that computes in a narrower dtype than its parameters': in float32, as under a GPU's autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from passes.torch_compat.operators import tree_map

_MARK = "_losses_in_float32"
_NARROW = (torch.bfloat16, torch.float16)
#: What autocast computes in float32 on a GPU, of that which ends a model.
LOSSES: tuple[Callable[..., Any], ...] = (
    *(F.cross_entropy, F.nll_loss, F.log_softmax, F.kl_div, F.ctc_loss, F.poisson_nll_loss, F.gaussian_nll_loss),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.soft_margin_loss),
    *(F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss),
    *(F.margin_ranking_loss, F.hinge_embedding_loss, F.cosine_embedding_loss, F.triplet_margin_loss),
    *(torch.log_softmax, torch.Tensor.log_softmax),
)


def mark_wide_losses(model: nn.Module) -> None:
    """Let captures of ``model`` compute losses in float32."""
    setattr(model, _MARK, True)


def losses_of(model: nn.Module) -> AbstractContextManager[Any]:
    """The context in which ``model``, and what computes a loss of its outputs, is called."""
    return _WideLosses() if getattr(model, _MARK, False) else nullcontext()


class _WideLosses(TorchFunctionMode):
    """Calls the functions of ``LOSSES`` with float32 in the place of narrower tensors."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LOSSES:
            args, kwargs = tree_map(_widened, (args, dict(kwargs)))
        return func(*args, **kwargs)


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _NARROW else leaf
