"""RMS and layer normalization as kernels, forward and backward, with a residual folded in or without.

With ``mean`` that of the row (0 for RMS) and ``scale = 1 / sqrt(mean((x - mean)²) + eps)``, both give
``normal · (weight + offset) + bias`` where ``normal = (x - mean) · scale``. The gradient of ``x`` is, with
``g = grad · (weight + offset)``, ``scale · (g - mean(g) - normal · mean(g · normal))``, without ``mean(g)`` for RMS
(Ba et al., "Layer Normalization", 2016; Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019). Backward
computes the statistics again.

Rows that fit are held by one program, several at once where they are narrow; wider ones are read more than once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.kernels import normalization_kernels as kernels
from runtime.kernels.language import tl
from runtime.kernels.library import promoted
from runtime.kernels.rows import Tile, size_of_rows, sum_partials, tile_of, tiles_over, walkers_over

#: The widest row that one program holds, in bytes of the type it computes in. Backward holds four such rows: values,
#: gradient, and the sums for weight and bias; a multiprocessor's registers have room for that many without spilling.
WIDEST_FORWARD = 131072
WIDEST_BACKWARD = 32768
#: The same where there is no bias, and loads of 16 bits need few registers.
_WIDEST_BACKWARD_RMS = 65536
#: Rows whose width is no multiple of this are read element by element, with an address and a mask for each.
_ALIGNMENT = 16
#: The largest tile of one tensor, in bytes, that backward reads ahead: three of them share a multiprocessor's memory.
_WIDEST_AHEAD = 32768
#: Tile of the weight's and bias's gradients where rows are too wide to be held.
_PARAMETERS_TILE = Tile(rows=16, columns=128, num_warps=4, whole=False)

Maybe = torch.Tensor | None


@dataclass(frozen=True)
class Norm:
    """Which normalization: ``centered`` is layer normalization; ``offset`` is added to the weight."""

    eps: float
    offset: float = 0.0
    centered: bool = False


@dataclass(frozen=True)
class RequestedGradients:
    """Which gradients are requested; the others are returned as empty tensors."""

    input: bool
    weight: bool
    bias: bool = False


def check_rows(input: torch.Tensor, *, residual: Maybe = None, **parameters: Maybe) -> None:
    """Refuse a residual of another shape than ``input``, and parameters that are not as long as its last dim.

    Raises:
        ValueError: naming what does not fit.
    """
    if not input.dim():
        raise ValueError("a scalar has no rows to normalize: give a tensor of at least one dim")
    if residual is not None and residual.shape != input.shape:
        raise ValueError(
            f"residual has shape {tuple(residual.shape)}, expected that of the input, {tuple(input.shape)}: expand it"
        )
    width = input.shape[-1]
    for name, parameter in parameters.items():
        if parameter is not None and (parameter.dim() != 1 or parameter.shape[0] != width):
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}, expected {tuple(input.shape[-1:])}, the input's last dim: "
                "flatten what is normalized together into one dim"
            )


def wanted_grads(grads: Sequence[Maybe], wants: Sequence[bool]) -> tuple[Maybe, ...]:
    """The gradients for autograd: None for those not requested."""
    return tuple(grad if is_requested else None for grad, is_requested in zip(grads, wants, strict=True))


def sum_of(first: Maybe, second: Maybe) -> Maybe:
    """The sum of the tensors that are not None, in the dtype of the first."""
    return first if first is None or second is None else first + second.to(first.dtype)


def addends_grads(grad: Maybe, dtypes: Sequence[torch.dtype], wants: Sequence[bool]) -> tuple[Maybe, ...]:
    """The gradients of the two addends of a sum, of these dtypes, from that of the sum."""
    if grad is None:
        return None, None
    (first, second), (wants_first, wants_second) = dtypes, wants
    by_first = grad if grad.dtype is first else grad.to(first)
    return by_first if wants_first else None, (
        grad if grad.dtype is second else grad.to(second)
    ) if wants_second else None


def normalize(norm: Norm, input: torch.Tensor, residual: Maybe, weight: Maybe, bias: Maybe) -> tuple[torch.Tensor, ...]:
    """``(input + residual, its normalization)``, or without a residual ``(normalization,)``."""
    tensors = [None if tensor is None else tensor.contiguous() for tensor in (input, residual, weight, bias)]
    sum_dtype = promoted(input, residual)
    compute = promoted(*tensors, least=torch.float32)
    like = _present(tensors[0])  # contiguous, as the results are
    total = None if residual is None else torch.empty_like(like, dtype=sum_dtype)
    out = torch.empty_like(like, dtype=promoted(*tensors))
    if out.numel():
        num_rows, width = size_of_rows(input)
        widest = WIDEST_FORWARD // (4 if width % _ALIGNMENT else 1)
        tile = tile_of(width, widest=widest // compute.itemsize)
        kernel = kernels.forward_kernel if tile.whole else kernels.wide_forward_kernel
        kernel[(tiles_over(num_rows, tile),)](
            *tensors, total, out, num_rows, width, STORED=_type_of(sum_dtype), **_options(norm, tile, compute)
        )
    return (out,) if total is None else (total, out)


def normalize_backward(
    norm: Norm,
    requested: RequestedGradients,
    grad: torch.Tensor,
    grad_sum: Maybe,
    input: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the input (with ``grad_sum`` added), of the weight and of the bias (which is not read)."""
    tensors = [None if tensor is None else tensor.contiguous() for tensor in (grad, grad_sum, input, weight)]
    compute = promoted(*tensors, least=torch.float32)
    grad_input = torch.empty_like(_present(tensors[2])) if requested.input else None
    if input.numel():
        tile = tile_of(input.shape[-1], widest=_widest_backward(norm, tensors, compute))
        launch = _launch_backward if tile.whole else _launch_wide_backward
        partials = launch(norm, requested, tile, tensors, grad_input, compute)
    else:
        partials = _partials(input, 0, requested, compute)
    grads = [
        input.new_empty(0) if partial is None or like is None else sum_partials(partial, like.dtype)
        for partial, like in zip(partials, (weight, bias), strict=True)
    ]
    return input.new_empty(0) if grad_input is None else grad_input, grads[0], grads[1]


def _launch_backward(
    norm: Norm, requested: RequestedGradients, tile: Tile, tensors: list[Maybe], grad_input: Maybe, compute: torch.dtype
) -> list[Maybe]:
    """Fill ``grad_input``; gives the partial sums of the weight's and bias's gradients."""
    input = _present(tensors[2])
    num_rows, width = size_of_rows(input)
    programs, stages = tiles_over(num_rows, tile), 1
    keeps_factor = tile.columns * compute.itemsize <= WIDEST_BACKWARD
    if requested.weight or requested.bias:
        programs = walkers_over(num_rows, tile, input.device)
        tile_bytes = tile.rows * tile.columns * max(tensor.itemsize for tensor in tensors if tensor is not None)
        stages = 2 if keeps_factor and tile_bytes <= _WIDEST_AHEAD else 1
    partials = _partials(input, programs, requested, compute)
    kernels.backward_kernel[(programs,)](
        *tensors, grad_input, *partials, num_rows, width, STAGES=stages,
        KEEPS_FACTOR=keeps_factor, **_options(norm, tile, compute),
    )  # fmt: skip
    return partials


def _widest_backward(norm: Norm, tensors: Sequence[Maybe], compute: torch.dtype) -> int:
    """Elements of the widest row that a program of backward holds without spilling registers."""
    input = _present(tensors[2])
    widest = WIDEST_BACKWARD
    if not norm.centered and all(tensor is None or tensor.itemsize == 2 for tensor in tensors):
        widest = _WIDEST_BACKWARD_RMS
    if input.shape[-1] % _ALIGNMENT:
        widest = WIDEST_BACKWARD // 2
    return widest // compute.itemsize


def _launch_wide_backward(
    norm: Norm, requested: RequestedGradients, tile: Tile, tensors: list[Maybe], grad_input: Maybe, compute: torch.dtype
) -> list[Maybe]:
    """The same in two launches: row by row, which keeps the statistics, and then down the columns."""
    grad, _, input, _ = tensors
    input = _present(input)
    num_rows, width = size_of_rows(input)
    statistics = [input.new_empty(num_rows, dtype=compute) for _ in range(2)]
    kernels.wide_backward_kernel[(num_rows,)](
        *tensors, grad_input, *statistics, num_rows, width, **_options(norm, tile, compute)
    )
    if not (requested.weight or requested.bias):
        return [None, None]
    columns = tiles_over(width, Tile(rows=_PARAMETERS_TILE.columns, columns=1, num_warps=1, whole=True))
    programs = max(1, walkers_over(num_rows, _PARAMETERS_TILE, input.device) // columns)
    partials = _partials(input, programs, requested, compute)
    kernels.wide_parameters_kernel[(columns, programs)](
        grad, input, *statistics, *partials, num_rows, width, **_shape(_PARAMETERS_TILE, compute)
    )
    return partials


def _present(tensor: Maybe) -> torch.Tensor:
    assert tensor is not None
    return tensor


def _partials(like: torch.Tensor, programs: int, requested: RequestedGradients, compute: torch.dtype) -> list[Maybe]:
    shape = (programs, like.shape[-1])
    return [like.new_empty(shape, dtype=compute) if wants else None for wants in (requested.weight, requested.bias)]


def _options(norm: Norm, tile: Tile, compute: torch.dtype) -> dict[str, Any]:
    return {"CENTERED": norm.centered, "EPS": norm.eps, "OFFSET": norm.offset, **_shape(tile, compute)}


def _shape(tile: Tile, compute: torch.dtype) -> dict[str, Any]:
    return {"WIDE": _type_of(compute), "ROWS": tile.rows, "COLUMNS": tile.columns, "num_warps": tile.num_warps}


def _type_of(dtype: torch.dtype) -> Any:
    """The dtype as the kernels call it."""
    return getattr(tl, str(dtype).removeprefix("torch."))
