"""The launch of AdamW over many tensors: they come as a table of addresses, sizes and factors.

Every program steps one block of one tensor. Which one is in a list of the blocks' tensors, kept as long as the sizes
are the same; the table is sent to the device at every step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from runtime.kernels.device import on_device
from runtime.kernels.language import tl, triton

#: Elements that one program steps.
BLOCK = 2048
#: Columns of the table: addresses of parameter, gradient, moments and float32 copy; elements, first block; factors.
_ADDRESSES, _FIRST_FACTOR = 5, 7
_TYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


@triton.jit
def _step_block(  # type: ignore[no-untyped-def]
    param_ptr, grad_ptr, average_ptr, square_ptr, master_ptr, places, exists,
    keep, new_average, old_square, new_square, step_size, root, eps,
    HAS_MASTER: tl.constexpr, PARAM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    grad = tl.load(grad_ptr + places, mask=exists).to(WIDE)
    average = tl.load(average_ptr + places, mask=exists)
    square = tl.load(square_ptr + places, mask=exists)
    if HAS_MASTER:
        param = tl.load(master_ptr + places, mask=exists)
    else:
        param = tl.load(param_ptr + places, mask=exists).to(WIDE)
    average += new_average * (grad - average)
    square = square * old_square + new_square * grad * grad
    param = param * keep - step_size * (average / (tl.sqrt(square) / root + eps))
    tl.store(average_ptr + places, average, mask=exists)
    tl.store(square_ptr + places, square, mask=exists)
    if HAS_MASTER:
        tl.store(master_ptr + places, param, mask=exists)
    tl.store(param_ptr + places, param.to(PARAM), mask=exists)


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    table_ptr, factors_ptr, owners_ptr,
    COLUMNS: tl.constexpr, FIRST_FACTOR: tl.constexpr, HAS_MASTER: tl.constexpr, ALIGNED: tl.constexpr,
    PARAM: tl.constexpr, GRAD: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    first = tl.load(owners_ptr + block).to(tl.int64) * COLUMNS
    param_ptr = tl.load(table_ptr + first).to(tl.pointer_type(PARAM))
    grad_ptr = tl.load(table_ptr + first + 1).to(tl.pointer_type(GRAD))
    average_ptr = tl.load(table_ptr + first + 2).to(tl.pointer_type(WIDE))
    square_ptr = tl.load(table_ptr + first + 3).to(tl.pointer_type(WIDE))
    master_ptr = tl.load(table_ptr + first + 4).to(tl.pointer_type(WIDE))
    if ALIGNED:
        # addresses from memory are not known to be: without this nothing would be read 16 bytes at a time
        param_ptr, grad_ptr = tl.multiple_of(param_ptr, 16), tl.multiple_of(grad_ptr, 16)
        average_ptr, square_ptr = tl.multiple_of(average_ptr, 16), tl.multiple_of(square_ptr, 16)
        master_ptr = tl.multiple_of(master_ptr, 16)
    num_elements = tl.load(table_ptr + first + 5)
    places_before = (block - tl.load(table_ptr + first + 6)) * BLOCK
    places = places_before + tl.arange(0, BLOCK)
    factor_ptr = factors_ptr + first + FIRST_FACTOR
    keep, new_average, old_square, new_square = (
        tl.load(factor_ptr).to(WIDE), tl.load(factor_ptr + 1).to(WIDE),
        tl.load(factor_ptr + 2).to(WIDE), tl.load(factor_ptr + 3).to(WIDE),
    )  # fmt: skip
    step_size, root, eps = (
        tl.load(factor_ptr + 4).to(WIDE), tl.load(factor_ptr + 5).to(WIDE), tl.load(factor_ptr + 6).to(WIDE),
    )  # fmt: skip
    # most blocks are whole: where none of a block is masked, 16 bytes are read and written at a time
    if places_before + BLOCK <= num_elements:
        _step_block(
            param_ptr, grad_ptr, average_ptr, square_ptr, master_ptr, places, None,
            keep, new_average, old_square, new_square, step_size, root, eps, HAS_MASTER, PARAM, WIDE,
        )  # fmt: skip
    else:
        _step_block(
            param_ptr, grad_ptr, average_ptr, square_ptr, master_ptr, places, places < num_elements,
            keep, new_average, old_square, new_square, step_size, root, eps, HAS_MASTER, PARAM, WIDE,
        )  # fmt: skip


def is_walkable(moments: Any) -> bool:
    """Whether the tensors fill memory without gaps and all in one order, as the kernel walks through them."""
    param, grad, *rest = moments.param, moments.grad, moments.exp_avg, moments.exp_avg_sq
    dense = param.is_contiguous() or torch.empty_like(param, device="meta").stride() == param.stride()
    rest = rest if moments.master is None else [*rest, moments.master]
    wide = torch.promote_types(param.dtype, torch.float32)
    has_supported_types = param.dtype in _TYPES and grad.dtype in _TYPES
    return dense and has_supported_types and all(one.stride() == param.stride() and one.dtype == wide for one in rest)


def adamw_launch(
    moments: Sequence[Any], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    """Step tensors of one device and dtype, which are ``is_walkable``, in one launch."""
    # kept until the launch: a gradient in another order than its parameter is copied to the parameter's
    grads = [in_order_of(entry.param, entry.grad) for entry in moments]
    param, wide = moments[0].param, torch.promote_types(moments[0].param.dtype, torch.float32)
    sizes = tuple(entry.param.numel() for entry in moments)
    owners, first_blocks = _blocks(sizes, param.device)
    rows, factors = [], []
    for entry, grad, size, first in zip(moments, grads, sizes, first_blocks):
        entry.step.add_(1)
        tensors = (entry.param, grad, entry.exp_avg, entry.exp_avg_sq, entry.master)
        rows.append([*(0 if tensor is None else tensor.data_ptr() for tensor in tensors), size, first])
        factors.append(_factors(float(entry.step), lr, betas, eps, weight_decay))
    aligned = all(address % 16 == 0 for row in rows for address in row[:_ADDRESSES])
    columns = torch.tensor(rows, dtype=torch.int64, device="cpu")
    table = torch.cat([columns, torch.tensor(factors, dtype=torch.float64, device="cpu").view(torch.int64)], 1)
    launch_table(
        table,
        owners,
        HAS_MASTER=moments[0].master is not None,
        ALIGNED=aligned,
        PARAM=_type(param.dtype),
        GRAD=_type(grads[0].dtype),
        WIDE=_type(wide),
    )


def launch_table(table: torch.Tensor, owners: torch.Tensor, **constants: Any) -> None:
    """Send the table [tensors, columns] to the device of the list of blocks, and step every block."""
    if owners.is_cuda:
        table = table.pin_memory().to(owners.device, non_blocking=True)
    with on_device(owners.device):
        _kernel[(len(owners),)](
            table, table.view(torch.float64), owners,
            COLUMNS=table.shape[1], FIRST_FACTOR=_FIRST_FACTOR, **constants, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


def _factors(step: float, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> list[float]:
    """In the order in which the kernel reads them, in float64."""
    root = math.sqrt(1.0 - betas[1] ** step)
    return [1.0 - lr * weight_decay, 1.0 - betas[0], betas[1], 1.0 - betas[1], lr / (1.0 - betas[0] ** step), root, eps]


def in_order_of(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """``grad`` laid out as ``param``: copied if it is not."""
    return grad if grad.stride() == param.stride() else torch.empty_like(param, dtype=grad.dtype).copy_(grad)


@functools.lru_cache(maxsize=64)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """Which tensor each block is of (int32, on the device), and the first block of each tensor."""
    counts = torch.tensor([-(-size // BLOCK) for size in sizes], device="cpu")
    owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32, device="cpu"), counts)
    return owners.to(device), (counts.cumsum(0) - counts).tolist()


def _type(dtype: torch.dtype) -> Any:
    return getattr(tl, _TYPES[dtype])
