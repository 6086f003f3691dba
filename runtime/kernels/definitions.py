"""What a compiler for GPUs sees of fused operators: torch's own, which it fuses with what stands beside them.

An operator of ours is opaque to a compiler, and called through torch's dispatcher, which takes the host 0.4 ms.
These compute the same: in at least float32, rounded once. What backward keeps is the compiler's decision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from runtime.kernels.activations import PLAIN, SILU, gelu_name
from runtime.kernels.promotion import promotion_of

Maybe = torch.Tensor | None
Pair = tuple[torch.Tensor, torch.Tensor]


def _result(*tensors: Maybe) -> torch.dtype:
    return promotion_of(*[tensor.dtype for tensor in tensors if tensor is not None])


def _wide(*tensors: Maybe) -> torch.dtype:
    return torch.promote_types(_result(*tensors), torch.float32)


def _layer_norm(input: torch.Tensor, weight: Maybe, bias: Maybe, eps: float) -> torch.Tensor:
    compute = _wide(input, weight, bias)
    factor, shift = (None if one is None else one.to(compute) for one in (weight, bias))
    normal = F.layer_norm(input.contiguous().to(compute), input.shape[-1:], factor, shift, eps)
    return normal.to(_result(input, weight, bias))


def _rms_norm(input: torch.Tensor, weight: Maybe, eps: float, offset: float = 0.0) -> torch.Tensor:
    compute = _wide(input, weight)
    values = input.contiguous().to(compute)
    normal = values * (values.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        normal = normal * (weight.to(compute) + offset)
    return normal.to(_result(input, weight))


def _of_sum(norm: Callable[..., torch.Tensor], input: torch.Tensor, residual: torch.Tensor, *others: Any) -> Pair:
    total = (input + residual).contiguous()
    return total, norm(total, *others)


def _gated(activation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    compute = _wide(gate, up)
    return (PLAIN[activation](gate.to(compute)) * up.to(compute)).to(_result(gate, up)).contiguous()


def _geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return _gated(gelu_name(approximate), gate, up)


def _bias_gelu(input: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    compute = _wide(input, bias)
    return PLAIN[gelu_name(approximate)](input.to(compute) + bias.to(compute)).to(_result(input, bias)).contiguous()


def _rotary(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    compute, result, count = _wide(input, cos, sin), _result(input, cos, sin), cos.shape[-1]
    rotated = input[..., :count].to(compute)
    if interleaved:
        swapped = torch.stack((-rotated[..., 1::2], rotated[..., 0::2]), -1).flatten(-2)
    else:
        first, second = rotated.chunk(2, -1)
        swapped = torch.cat((-second, first), -1)
    turned = (rotated * cos.to(compute) + swapped * sin.to(compute)).to(result)
    return turned if count == input.shape[-1] else torch.cat((turned, input[..., count:].to(result)), -1)


def _rotary_pair(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> Pair:
    return _rotary(query, cos, sin, interleaved), _rotary(key, cos, sin, interleaved)


#: Of operators that a compiler fuses as well as we do; those that it would not (losses, experts) are not here.
DEFINITIONS: dict[str, Callable[..., Any]] = {
    "layer_norm": _layer_norm,
    "add_layer_norm": partial(_of_sum, _layer_norm),
    "rms_norm": _rms_norm,
    "add_rms_norm": partial(_of_sum, _rms_norm),
    "swiglu": partial(_gated, SILU),
    "geglu": _geglu,
    "bias_gelu": _bias_gelu,
    "rotary": _rotary,
    "rotary_pair": _rotary_pair,
}


def definition_for_compiler(name: str, first: torch.Tensor) -> Callable[..., Any] | None:
    """What stands for the operator ``name`` in a compiled graph on the device of ``first``; None for the operator.

    On a processor compilers fuse less, and calls are no longer than what they compute.
    """
    return DEFINITIONS.get(name) if first.is_cuda else None
