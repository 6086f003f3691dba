"""Who takes part in ``benchmarks.kernels``: each operator as model families spell it, compiled, ours, Liger Kernel's.

All take the tensors of a case in their order, and give one tensor or several.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from runtime import kernels

Function = Callable[..., Any]
EPS = 1e-5
EAGER, COMPILED, OURS, LIGER = "eager", "torch.compile", "ours", "Liger"
CONTESTANTS = (EAGER, COMPILED, OURS, LIGER)


@dataclass(frozen=True)
class Contestant:
    """One way to compute an operator.

    Attributes:
        function: None if there is none.
        missing: why there is none.
        splits: whether forward leaves to backward what is its work, so that each may be compared alone.
    """

    name: str
    function: Function | None
    missing: str = ""
    splits: bool = True


def contestants(operator: str, *, backend: str) -> list[Contestant]:
    """All that can compute an operator; ``backend`` is torch.compile's."""
    eager = _EAGER[operator]
    compiled = torch.compile(eager, fullgraph=True, dynamic=False, backend=backend)
    return [
        Contestant(EAGER, eager),
        Contestant(COMPILED, compiled),
        Contestant(OURS, _OURS[operator]),
        _liger(operator),
    ]


# -- as transformers spells them --------------------------------------------------------------------------------------


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """float32, as families compute; float64 stays, since it is the reference."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _rms_norm(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    values = _wide(input)
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * values.to(input.dtype)


def _add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + input
    return total, _rms_norm(total, weight)


def _layer_norm(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(input, input.shape[-1:], weight, bias, EPS)


def _add_layer_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + input
    return total, _layer_norm(total, weight, bias)


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _bias_gelu(input: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(input + bias, approximate="tanh")


def _halves_turned(input: torch.Tensor) -> torch.Tensor:
    half = input.shape[-1] // 2
    return torch.cat((-input[..., half:], input[..., :half]), dim=-1)


def _neighbours_turned(input: torch.Tensor) -> torch.Tensor:
    return torch.stack((-input[..., 1::2], input[..., ::2]), dim=-1).flatten(-2)


def _rotary(
    input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turned: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    return input * cos + turned(input) * sin


def _rotary_halves(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return _rotary(input, cos, sin, _halves_turned)


def _rotary_neighbours(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return _rotary(input, cos, sin, _neighbours_turned)


def _rotary_pair(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotary_halves(query, cos, sin), _rotary_halves(key, cos, sin)


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(_wide(logits).flatten(0, -2), target.flatten())


def _linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _cross_entropy(F.linear(hidden, weight), target)


_EAGER: dict[str, Function] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm,
    "add_layer_norm": _add_layer_norm,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "bias_gelu": _bias_gelu,
    "rotary": _rotary_halves,
    "rotary_interleaved": _rotary_neighbours,
    "rotary_pair": _rotary_pair,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "embedding": F.embedding,
}

# -- ours -------------------------------------------------------------------------------------------------------------


def _our_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return kernels.cross_entropy(logits, target).mean()


def _our_linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return kernels.linear_cross_entropy(hidden, weight, target).mean()


_OURS: dict[str, Function] = {
    "rms_norm": partial(kernels.rms_norm, eps=EPS),
    "add_rms_norm": partial(kernels.add_rms_norm, eps=EPS),
    "layer_norm": partial(kernels.layer_norm, eps=EPS),
    "add_layer_norm": partial(kernels.add_layer_norm, eps=EPS),
    "swiglu": kernels.swiglu,
    "geglu": partial(kernels.geglu, approximate="tanh"),
    "bias_gelu": partial(kernels.bias_gelu, approximate="tanh"),
    "rotary": kernels.rotary,
    "rotary_interleaved": partial(kernels.rotary, interleaved=True),
    "rotary_pair": kernels.rotary_pair,
    "cross_entropy": _our_cross_entropy,
    "linear_cross_entropy": _our_linear_cross_entropy,
    "embedding": kernels.embedding,
}

# -- Liger Kernel (pip install liger-kernel), by its functional interface ---------------------------------------------


def _first(result: Any) -> Any:
    """The loss: some versions give more beside it."""
    return result[0] if isinstance(result, tuple) else result


#: Name in ``liger_kernel.transformers.functional``, how it is called, and whether it leaves to backward what is its
#: work (losses make their gradients in forward). In place, it would overwrite what other runs read.
_LIGER: dict[str, tuple[str, Callable[..., Any], bool]] = {
    "rms_norm": ("liger_rms_norm", lambda f, x, w: f(x, w, EPS, in_place=False), True),
    "add_rms_norm": (
        "liger_fused_add_rms_norm",
        lambda f, x, residual, w: tuple(reversed(f(x, residual, w, EPS, in_place=False))),
        True,
    ),
    "layer_norm": ("liger_layer_norm", lambda f, x, w, b: f(x, w, b, EPS), True),
    "swiglu": ("liger_swiglu", lambda f, gate, up: f(gate, up), True),
    "geglu": ("liger_geglu", lambda f, gate, up: f(gate, up), True),
    "rotary_pair": ("liger_rope", lambda f, q, k, cos, sin: f(q, k, cos[None], sin[None]), True),
    "cross_entropy": (
        "liger_cross_entropy", lambda f, logits, target: _first(f(logits.flatten(0, -2), target.flatten())), False,
    ),
    "linear_cross_entropy": (
        "liger_fused_linear_cross_entropy",
        lambda f, hidden, weight, target: _first(f(hidden.flatten(0, -2), weight, target.flatten())),
        False,
    ),
}  # fmt: skip


def _liger(operator: str) -> Contestant:
    if operator not in _LIGER:
        return Contestant(LIGER, None, missing="has none")
    name, call, splits = _LIGER[operator]
    try:
        module = importlib.import_module("liger_kernel.transformers.functional")
    except Exception as error:  # an installed version may fail on this torch or machine
        missing = "not installed" if isinstance(error, ModuleNotFoundError) else f"import failed: {error}"
        return Contestant(LIGER, None, missing=missing)
    function = getattr(module, name, None)
    if function is None:
        return Contestant(LIGER, None, missing=f"this version has no {name}")
    return Contestant(LIGER, partial(call, function), splits=splits)
