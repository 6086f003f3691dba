"""The row work of cross-entropy: what a row of (a shard of) the logits adds up to, and the gradient of one.

Both read the logits once, and hold nothing of their size but the gradient. The normaliser is gathered online (Milakov
and Gimelshein, "Online normalizer calculation for softmax", 2018). ``start`` [1] is the class of the first column
where the classes are sharded, None where a row has all of them; a target elsewhere adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from runtime.kernels.elementwise import wide_type
from runtime.kernels.language import tl, triton
from runtime.kernels.library import in_dtype, wide
from runtime.kernels.rows import is_one_block, rows_at_once
from runtime.torch_compat.dispatcher import native_nll_loss

_MAX_BLOCK = 4096
#: Logits so few (128 KiB in float64) that what one more copy takes does not matter.
TINY = 2**14
#: torch's number for losses that are neither summed nor averaged.
_EACH: Any = 0
_aten: Any = torch.ops.aten


def rows_of(logits: torch.Tensor) -> torch.Tensor:
    """Logits [..., v] as [outer, inner, v]; a copy only where two strides cannot say where the rows are."""
    leading, width = logits.shape[:-1], logits.shape[-1]
    for split in range(len(leading) + 1):
        try:
            return logits.view(math.prod(leading[:split]), math.prod(leading[split:]), width)
        except RuntimeError:
            continue
    return logits.reshape(1, math.prod(leading), width)


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which a row is summed: at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def place_of(target: torch.Tensor, start: torch.Tensor | None, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each target (clamped), and whether there is one."""
    place = target if start is None else target - start
    return place.clamp(0, width - 1), (place >= 0) & (place < width)


def is_small(logits: torch.Tensor, start: torch.Tensor | None, label_smoothing: float, z_loss: float) -> bool:
    """Whether a plain loss is of so few logits, with all classes, that its gradient needs nothing but these."""
    return start is None and not label_smoothing and not z_loss and is_one_block(logits, logits.numel())


def is_tiny(tokens: int, vocabulary: int) -> bool:
    """Whether logits are so few that calls take longer than arithmetic, and memory for them does not matter."""
    return 0 < tokens * vocabulary <= TINY


def small_losses(logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Losses [...] of one block with all classes, in at least float32.

    Raises:
        IndexError: if a target is no class.
    """
    shares, classes = _flat(wide(logits).log_softmax(-1), target)
    losses: torch.Tensor = native_nll_loss(shares, classes, None, _EACH, ignore_index)
    return losses.view(target.shape)


def small_gradient(grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Gradient of one block of logits with all classes from that of the losses, in at least float32."""
    shares, classes = _flat(wide(logits).log_softmax(-1), target)
    total = shares.new_empty(())  # not read: losses are not averaged
    change = _aten.nll_loss_backward(wide(grad).reshape(-1), shares, classes, None, _EACH, ignore_index, total)
    result: torch.Tensor = _aten._log_softmax_backward_data(change, shares, -1, shares.dtype)
    return result.view(logits.shape)


def _flat(shares: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As torch's loss takes them: [tokens, v] and the classes [tokens]."""
    return shares.reshape(-1, shares.shape[-1]), in_dtype(target, torch.int64).reshape(-1)


def aten_sums(
    logits: torch.Tensor, target: torch.Tensor, start: torch.Tensor | None, smoothing: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``runtime.kernels.cross_entropy.row_sums``."""
    largest, sums = shapes_of_sums(logits, target, start, smoothing)
    place, inside = place_of(target, start, logits.shape[-1])
    sums[1] = logits.gather(-1, place.unsqueeze(-1)).squeeze(-1).masked_fill(~inside, 0.0)
    flat_largest, flat_sums = largest.view(-1), sums.view(len(sums), -1)
    for rows, lines, _ in _blocks(rows_of(logits)):
        top = rows.amax(-1, keepdim=True).to(largest.dtype)
        flat_largest[lines] = top.squeeze(-1)
        scores = rows - top.masked_fill_(top == -math.inf, 0.0)
        if smoothing:
            flat_sums[2, lines] = scores.sum(-1)
        flat_sums[0, lines] = scores.exp_().sum(-1)
    return largest, sums


def aten_gradient(
    out: torch.Tensor,
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistic: torch.Tensor,
    start: torch.Tensor | None,
    vocabulary: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Writes the gradient of the logits to ``out``, which may be the logits themselves."""
    if is_small(logits, start, label_smoothing, z_loss):
        out.copy_(small_gradient(grad, logits, target, ignore_index))
        return
    place, inside = place_of(target, start, logits.shape[-1])
    largest, log_sum = statistic.reshape(2, -1)
    weight = wide(grad).masked_fill(target == ignore_index, 0.0).flatten()
    penalty = 2.0 * z_loss * (largest + log_sum)
    one = inside.flatten().to(weight.dtype)
    even = label_smoothing / vocabulary
    columns = [tensor.reshape(-1, 1) for tensor in (largest, log_sum, weight, penalty, one, place)]
    direct = out.dtype == statistic.dtype
    all_rows = rows_of(logits)
    out_rows = all_rows if out is logits else out.view(all_rows.shape)
    for rows, lines, (outer, inner) in _blocks(all_rows):
        top, spread, factor, extra, hit, where = (column[lines] for column in columns)
        out_block = out_rows[outer, inner]
        scores = torch.sub(rows, top, out=out_block) if direct else rows - top
        scores.sub_(spread).exp_()
        # the target's own apart: of a likely one little is left, which must not be rounded away
        chosen = scores.gather(-1, where)
        chosen = (chosen - hit + (label_smoothing * hit - even) + chosen * extra) * factor
        if z_loss:
            scores.mul_(1.0 + extra)
        if even:
            scores.sub_(even)
        scores.mul_(factor).scatter_(-1, where, chosen)
        if not direct:
            out_block.copy_(scores)


def _blocks(rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, slice, tuple[int, slice]]]:
    """A few rows at a time of [outer, inner, v]: themselves, their places among all rows, and in ``rows``."""
    outer_count, inner_count, width = rows.shape
    step = rows_at_once(width)
    for outer in range(outer_count):
        for first in range(0, inner_count, step):
            inner = slice(first, min(first + step, inner_count))
            lines = slice(outer * inner_count + inner.start, outer * inner_count + inner.stop)
            yield rows[outer, inner], lines, (outer, inner)


def shapes_of_sums(
    logits: torch.Tensor, target: torch.Tensor, start: torch.Tensor | None, smoothing: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the largest logit [...], and for the 2 or 3 sums [k, ...] of each row."""
    largest = logits.new_empty(logits.shape[:-1], dtype=wide_dtype(logits))
    return largest, largest.new_empty(3 if smoothing else 2, *largest.shape)


@triton.jit
def add_up_row(row_ptr, WIDTH: tl.constexpr, SMOOTHING: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Largest logit of a row, and the sums of the exponentials of, and of, the differences from it."""
    columns = tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + columns, mask=columns < WIDTH, other=-float("inf")).to(WIDE)
    largest = tl.max(logits, 0)
    # A row of which nothing is above -inf yet is compared with 0 instead.
    level = tl.where(largest == -float("inf"), 0.0, largest)
    spread = tl.exp(logits - level)
    differences = tl.where(columns < WIDTH, logits - level, 0.0)
    for first in range(BLOCK, WIDTH, BLOCK):
        exists = columns < WIDTH - first
        logits = tl.load(row_ptr + first + columns, mask=exists, other=-float("inf")).to(WIDE)
        largest = tl.maximum(largest, tl.max(logits, 0))
        higher = tl.where(largest == -float("inf"), 0.0, largest)
        spread = spread * tl.exp(level - higher) + tl.exp(logits - higher)
        if SMOOTHING:
            # each lane has had one logit of every block before
            differences += tl.where(exists, logits - higher, 0.0) + (first // BLOCK) * (level - higher)
        level = higher
    return largest, tl.sum(spread, 0), tl.sum(differences, 0)


@triton.jit
def row_offset(row, inner, outer_stride, inner_stride):  # type: ignore[no-untyped-def]
    """Where a row of [outer, inner, v] starts, in 64 bits."""
    return (row // inner) * outer_stride + (row % inner) * inner_stride


@triton.jit
def chosen_place(target, start_ptr, HAS_START: tl.constexpr):  # type: ignore[no-untyped-def]
    """The target's column in this shard."""
    if HAS_START:
        target -= tl.load(start_ptr).to(tl.int64)
    return target


@triton.jit
def _sums_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, target_ptr, start_ptr, largest_ptr, sums_ptr,
    num_rows, inner, outer_stride, inner_stride,
    WIDTH: tl.constexpr, HAS_START: tl.constexpr, SMOOTHING: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row_offset(row, inner, outer_stride, inner_stride)
    largest, spread, differences = add_up_row(row_ptr, WIDTH, SMOOTHING, WIDE, BLOCK)
    place = chosen_place(tl.load(target_ptr + row).to(tl.int64), start_ptr, HAS_START)
    chosen = tl.load(row_ptr + place, mask=(place >= 0) & (place < WIDTH), other=0.0).to(WIDE)
    tl.store(largest_ptr + row, largest)
    tl.store(sums_ptr + row, spread)
    tl.store(sums_ptr + num_rows + row, chosen)
    if SMOOTHING:
        tl.store(sums_ptr + 2 * num_rows + row, differences)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    out_ptr, grad_ptr, logits_ptr, target_ptr, start_ptr, statistic_ptr,
    num_rows, inner, outer_stride, inner_stride, out_outer_stride, out_inner_stride, ignore_index,
    WIDTH: tl.constexpr, HAS_START: tl.constexpr, EVEN: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    counts = target != ignore_index
    place = chosen_place(target, start_ptr, HAS_START)
    weight = tl.load(grad_ptr + row, mask=counts, other=0.0).to(WIDE)
    largest = tl.load(statistic_ptr + row, mask=counts, other=0.0)
    log_sum = tl.load(statistic_ptr + num_rows + row, mask=counts, other=0.0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < WIDTH
    # ignored rows are not even read
    row_ptr = logits_ptr + row_offset(row, inner, outer_stride, inner_stride)
    logits = tl.load(row_ptr + columns, mask=exists & counts, other=0.0).to(WIDE)
    likely = tl.exp(logits - largest - log_sum)
    # for the target (p - 1) + (s - s/v): of a likely one little is left, which must not be rounded away
    result = weight * tl.where(columns == place, (likely - 1.0) + (SMOOTHING - EVEN), likely - EVEN)
    if Z_LOSS > 0:
        result += likely * (weight * (2.0 * Z_LOSS) * (largest + log_sum))
    out_row_ptr = out_ptr + row_offset(row, inner, out_outer_stride, out_inner_stride)
    tl.store(out_row_ptr + columns, result, mask=exists)


def triton_sums(
    logits: torch.Tensor, target: torch.Tensor, start: torch.Tensor | None, smoothing: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``runtime.kernels.cross_entropy.row_sums``."""
    largest, sums = shapes_of_sums(logits, target, start, smoothing)
    if largest.numel():
        rows = readable_rows(logits)
        _sums_kernel[(largest.numel(),)](
            rows, target.contiguous(), start, largest, sums,
            largest.numel(), *layout_of(rows),
            HAS_START=start is not None, SMOOTHING=smoothing, **launch_options(rows),
        )  # fmt: skip
    return largest, sums


def triton_gradient(
    out: torch.Tensor,
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistic: torch.Tensor,
    start: torch.Tensor | None,
    vocabulary: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Writes the gradient of the logits to ``out``, which may be the logits themselves."""
    if not logits.numel():
        return
    # Both are seen as the logits' rows: with as many inner ones.
    rows = readable_rows(logits)
    rows_out = rows if out is logits else out.view(rows.shape)
    options = launch_options(rows)
    _gradient_kernel[(target.numel(), triton.cdiv(rows.shape[-1], options["BLOCK"]))](
        rows_out, grad.contiguous(), rows, target.contiguous(), start, statistic.contiguous(),
        target.numel(), *layout_of(rows), rows_out.stride(0), rows_out.stride(1), ignore_index,
        HAS_START=start is not None, EVEN=label_smoothing / vocabulary, SMOOTHING=label_smoothing, Z_LOSS=z_loss,
        **options,
    )  # fmt: skip


def readable_rows(logits: torch.Tensor) -> torch.Tensor:
    """[outer, inner, v] as kernels read them: with neighbouring columns next to each other."""
    rows = rows_of(logits)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def layout_of(rows: torch.Tensor) -> tuple[int, int, int]:
    """The arguments ``inner, outer_stride, inner_stride`` of a kernel."""
    return rows.shape[1], rows.stride(0), rows.stride(1)


def launch_options(rows: torch.Tensor) -> dict[str, Any]:
    """Columns in all, columns at a time, and warps that hold 16 of them in every thread."""
    block = min(triton.next_power_of_2(rows.shape[-1]), _MAX_BLOCK)
    return {"WIDTH": rows.shape[-1], "BLOCK": block, "WIDE": wide_type(rows), "num_warps": max(block // 512, 1)}
