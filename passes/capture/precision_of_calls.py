"""In which dtype each call is traced, of a model whose parameters were cast to the dtype of computation.

Inputs keep their dtype, as under a GPU's autocast, and every function decides:

* a product (linear, convolution, attention, …) of operands that differ is computed in the dtype of computation;
* a loss is computed in float32, and so is what a loss function makes of the model's outputs;
* a norm of an input wider than its weights, and what torch refuses for operands that differ, is computed in the widest;
* all else follows torch's promotion of types: an output minus a float32 target is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from passes.capture.nested_values import flatten, rebuild
from passes.torch_compat.operators import tree_leaves, tree_map
from passes.torch_compat.tracing import recurrent_inputs_of_any_dtype

_MARK = "_computes_in"
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
_PRODUCTS = """
    linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu grouped_mm
    scaled_dot_product_attention multi_head_attention_forward
    matmul __matmul__ __rmatmul__ mm bmm mv einsum addmm addmv addr addbmm baddbmm chain_matmul multi_dot vecdot
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""
_NORMS = "layer_norm group_norm batch_norm instance_norm rms_norm"
_WIDEST = """
    bilinear tensordot dot vdot inner cross lerp addcmul addcdiv cdist cosine_similarity grid_sample embedding_bag
    index_put index_add index_copy scatter scatter_add scatter_reduce masked_scatter
"""


def _functions(names: str) -> frozenset[Any]:
    """The functions and methods of torch by these names."""
    spaces = (torch, torch.Tensor, torch.linalg, F)
    return frozenset(getattr(space, name) for name in names.split() for space in spaces if hasattr(space, name))


PRODUCTS, NORMS, WIDEST = _functions(_PRODUCTS), _functions(_NORMS), _functions(_WIDEST)


@dataclass(frozen=True)
class CallPrecision:
    """The dtype of computation, and whether losses are in float32 where that is narrower."""

    compute: torch.dtype
    wide_losses: bool


def mark_precision(model: nn.Module, compute: torch.dtype, *, wide_losses: bool) -> None:
    """Let captures of ``model``, whose parameters are in ``compute``, decide on the dtype of each call."""
    setattr(model, _MARK, CallPrecision(compute, wide_losses))


@contextmanager
def precision_of(model: nn.Module) -> Iterator[None]:
    """The context in which ``model``, and what computes a loss of its outputs, is called."""
    precision = getattr(model, _MARK, None)
    if precision is None:
        yield
        return
    with recurrent_inputs_of_any_dtype(), _Autocast(precision):
        yield


def for_loss(model: nn.Module, outputs: Any) -> Any:
    """What a loss function gets of the model's outputs: float32 for what is narrower, where losses are in float32."""
    precision = getattr(model, _MARK, None)
    if precision is None or not precision.wide_losses:
        return outputs
    structure, tensors = flatten(outputs)
    return rebuild(structure, {path: _widened(tensor) for path, tensor in tensors.items()})


class _Autocast(TorchFunctionMode):
    def __init__(self, precision: CallPrecision) -> None:
        super().__init__()
        self.precision = precision

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        arguments: tuple[Any, Any] = (args, dict(kwargs or {}))
        if func in LOSSES and self.precision.wide_losses:
            arguments = tree_map(_widened, arguments)
        if func in PRODUCTS or func in NORMS or func in WIDEST or func in LOSSES:
            dtype = self._common_dtype(func, arguments)
            if dtype is not None:
                arguments = tree_map(lambda leaf: _in_dtype(leaf, dtype), arguments)
        return func(*arguments[0], **arguments[1])

    def _common_dtype(self, func: Any, arguments: Any) -> torch.dtype | None:
        """What all floating-point arguments are cast to; None to leave them as they are."""
        dtypes = [leaf.dtype for leaf in tree_leaves(arguments) if _is_floating(leaf)]
        compute = self.precision.compute
        if len(set(dtypes)) < 2 or (func in PRODUCTS and compute not in dtypes):
            return None
        if func in PRODUCTS:
            return compute
        if func in NORMS and dtypes[0].itemsize <= compute.itemsize:
            return None  # running statistics are wider than the input that they are of
        widest = dtypes[0]
        for dtype in dtypes[1:]:
            widest = torch.promote_types(widest, dtype)
        return widest


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _in_dtype(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if _is_floating(leaf) and leaf.dtype != dtype else leaf


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _NARROW else leaf
