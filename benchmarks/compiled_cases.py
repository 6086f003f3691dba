"""Launches of every fused operator's kernels at the sizes and dtypes of real models, on tensors without data."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from runtime.kernels import adamw_kernels, expert_row_kernels, gated
from runtime.kernels.language import tl
from runtime.kernels.rotary_kernels import Rotation

#: A head of attention; GPT-2; Llama 8B and 70B and the widths between their layers; the widest row that one program
#: holds in backward and in forward, and one that is moved along; sizes that no power of two divides.
WIDTHS = (64, 128, 768, 1600, 4096, 4097, 5120, 8192, 14336, 16384, 16385, 32768, 65536)
#: T5 and Llama 2, GPT-2, Llama 3.
VOCABULARIES = (32000, 50257, 128256)
HEAD_DIMS = (64, 80, 128)
DTYPES = (torch.bfloat16, torch.float32)
ROWS, TOKENS = 4096, 1024


class Case(NamedTuple):
    """One launch or a few.

    Attributes:
        operator: and which pass of it.
        sizes: what distinguishes it from the operator's other cases besides the dtype.
        run: launches the kernels.
    """

    operator: str
    sizes: str
    dtype: torch.dtype
    run: Callable[[], object]


def operator_cases(
    *,
    widths: Sequence[int] = WIDTHS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    vocabularies: Sequence[int] = VOCABULARIES,
    head_dims: Sequence[int] = HEAD_DIMS,
) -> Iterator[Case]:
    """Every operator, forward and backward."""
    for dtype in dtypes:
        for width in widths:
            yield from _norms(width, dtype)
            yield from _activations(width, dtype)
            yield _embedding(width, dtype)
            yield from _experts(width, dtype)
            yield from _recurrences(width, dtype)
        for vocabulary in vocabularies:
            yield from _cross_entropy(vocabulary, dtype)
        for head_dim in head_dims:
            yield from _rotary(head_dim, dtype)
        yield from _adamw(dtype)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _module(name: str) -> Any:
    """A module of ``runtime.kernels``, whose operator has the same name."""
    return importlib.import_module(f"runtime.kernels.{name}")


def _norms(width: int, dtype: torch.dtype) -> Iterator[Case]:
    x, weight, eps = _empty(ROWS, width, dtype=dtype), _empty(width, dtype=dtype), 1e-5
    rms, layer = _module("rms_norm"), _module("layer_norm")
    sizes = f"width {width:,}"
    yield Case("rms_norm", sizes, dtype, lambda: rms._triton(x, weight, eps))
    yield Case("add_rms_norm", sizes, dtype, lambda: rms._triton_add(x, x, weight, eps))
    yield Case("layer_norm", sizes, dtype, lambda: layer._triton(x, weight, weight, eps))
    yield Case("add_layer_norm", sizes, dtype, lambda: layer._triton_add(x, x, weight, weight, eps))
    for name, total in (("", None), ("add_", x)):
        yield Case(
            f"{name}rms_norm backward", sizes, dtype,
            lambda total=total: rms._triton_backward(x, total, x, weight, eps, 0.0, True, True),
        )  # fmt: skip
        yield Case(
            f"{name}layer_norm backward", sizes, dtype,
            lambda total=total: layer._triton_backward(x, total, x, weight, weight, eps, True, True, True),
        )  # fmt: skip
    yield Case(
        "layer_norm backward, frozen", sizes, dtype,
        lambda: layer._triton_backward(x, x, x, weight, weight, eps, True, False, False),
    )  # fmt: skip


def _activations(width: int, dtype: torch.dtype) -> Iterator[Case]:
    x, bias = _empty(ROWS, width, dtype=dtype), _empty(width, dtype=dtype)
    gate, up = _empty(ROWS, 2 * width, dtype=dtype).chunk(2, -1)
    bias_gelu = _module("bias_gelu")
    for activation, operator in (("silu", "swiglu"), ("gelu", "geglu"), ("gelu_tanh", "geglu tanh")):
        for sizes, first, second in ((f"width {width:,}", x, x), (f"halves of {2 * width:,}", gate, up)):
            yield Case(
                operator, sizes, dtype,
                lambda a=activation, b=first, c=second: gated.triton_forward(b, c, activation=a),
            )  # fmt: skip
            yield Case(
                f"{operator} backward", sizes, dtype,
                lambda a=activation, b=first, c=second: gated.triton_backward(x, b, c, activation=a),
            )  # fmt: skip
    for approximate in ("none", "tanh"):
        sizes = f"width {width:,}, {approximate}"
        yield Case("bias_gelu", sizes, dtype, lambda a=approximate: bias_gelu._triton(x, bias, a))
        yield Case("bias_gelu backward", sizes, dtype, lambda a=approximate: bias_gelu._triton_backward(x, x, bias, a))


def _embedding(width: int, dtype: torch.dtype) -> Case:
    grad, indices = _empty(ROWS, width, dtype=dtype), _empty(ROWS, dtype=torch.int64)
    embedding = _module("embedding")
    return Case(
        "embedding backward", f"width {width:,}", dtype, lambda: embedding._triton_backward(grad, indices, 32000, None)
    )


def _recurrences(width: int, dtype: torch.dtype) -> Iterator[Case]:
    """States of as many entries as a row has, from some first ones on: the kernels' form with most in it."""
    x, initial = _empty(ROWS // TOKENS, TOKENS, width, dtype=dtype), _empty(ROWS // TOKENS, width, dtype=dtype)
    recurrence, sizes = _module("recurrence"), f"width {width:,}"
    yield Case(
        "linear_recurrence", sizes, dtype, lambda: recurrence.states_by_kernel(x, x, initial, 1)
    )  # fmt: skip
    yield Case(
        "linear_recurrence backward", sizes, dtype,
        lambda: recurrence.gradients_by_kernel(x, x, x, initial, 1, False),
    )  # fmt: skip


def _experts(width: int, dtype: torch.dtype) -> Iterator[Case]:
    """Rows sorted by expert, of inner vectors (their first products twice as wide) or of tokens with two choices."""
    hidden, inner = _empty(ROWS, 2 * width, dtype=dtype), _empty(ROWS, width, dtype=dtype)
    weights, order = _empty(ROWS, dtype=torch.float32), _empty(ROWS, dtype=torch.int64)
    scores, end = _empty(ROWS // 2, 2, dtype=torch.float32), _empty(1, dtype=torch.int32)
    sizes = f"width {width:,}"
    for name, interleaved in (("silu", False), ("clamped", True)):
        options: dict[str, Any] = {"name": name, "interleaved": interleaved, "weights": weights}
        yield Case(
            f"experts, {name}", sizes, dtype,
            lambda o=options: expert_row_kernels.gated_values(hidden, **o, by_value=inner),
        )  # fmt: skip
        yield Case(
            f"experts, {name} backward", sizes, dtype,
            lambda o=options: expert_row_kernels.gated_gradients(inner, hidden, **o),
        )  # fmt: skip
    yield Case(
        "experts, sums of choices", sizes, dtype,
        lambda: expert_row_kernels.sums_of_choices(inner, order, scores, num_tokens=ROWS // 2),
    )  # fmt: skip
    yield Case("experts, rows cleared", sizes, dtype, lambda: expert_row_kernels.clear_rows_behind(inner, end))


def _cross_entropy(vocabulary: int, dtype: torch.dtype) -> Iterator[Case]:
    logits, target = _empty(ROWS, vocabulary, dtype=dtype), _empty(ROWS, dtype=torch.int64)
    grad, statistic = _empty(ROWS, dtype=torch.float32), _empty(2, ROWS, dtype=torch.float32)
    start, out = _empty(1, dtype=torch.int64), torch.empty_like(logits)
    whole, rows = _module("cross_entropy"), _module("logit_rows")
    for smoothing, z_loss in ((0.0, 0.0), (0.1, 1e-4)):
        sizes = f"{vocabulary:,} classes" + (", smoothed, z-loss" if smoothing else "")
        yield Case(
            "cross_entropy", sizes, dtype, lambda s=smoothing, z=z_loss: whole._triton(logits, target, -100, s, z)
        )
        for place in (None, start):
            part = sizes if place is None else f"{sizes}, sharded"
            yield Case(
                "cross_entropy sums", part, dtype,
                lambda p=place, s=smoothing: rows.triton_sums(logits, target, p, s > 0),
            )  # fmt: skip
            yield Case(
                "cross_entropy backward", part, dtype,
                lambda p=place, s=smoothing, z=z_loss: rows.triton_gradient(
                    out, grad, logits, target, statistic, p, vocabulary, -100, s, z
                ),
            )  # fmt: skip


def _rotary(head_dim: int, dtype: torch.dtype) -> Iterator[Case]:
    query, key = (_empty(2, 2048, heads, head_dim, dtype=dtype).transpose(1, 2) for heads in (32, 8))
    rotary, pair = _module("rotary"), _module("rotary_pair")
    for rotated in (head_dim, head_dim // 2):
        table = _empty(1, 1, 2048, rotated, dtype=dtype)
        for interleaved in (False, True):
            part = "" if rotated == head_dim else f", {rotated} of them rotated"
            sizes = f"heads of {head_dim}{part}{', interleaved' if interleaved else ''}"
            back = Rotation(interleaved, transposed=True)
            yield Case("rotary", sizes, dtype, lambda t=table, i=interleaved: rotary._triton(query, t, t, i))
            yield Case("rotary_pair", sizes, dtype, lambda t=table, i=interleaved: pair._triton(query, key, t, t, i))
            yield Case(
                "rotary_pair backward", sizes, dtype,
                lambda t=table, b=back: rotary.triton_rotate([query, key], t, t, b, dtypes=[dtype] * 2),
            )  # fmt: skip


def _adamw(dtype: torch.dtype) -> Iterator[Case]:
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    table, owners = _empty(8, 14, dtype=torch.int64), _empty(64, dtype=torch.int32)
    for aligned in (True, False):
        yield Case(
            "AdamW", "" if aligned else "unaligned", dtype,
            lambda a=aligned: adamw_kernels.launch_table(
                table, owners, HAS_MASTER=dtype != torch.float32, ALIGNED=a, PARAM=types[dtype], GRAD=types[dtype],
                WIDE=tl.float32,
            ),
        )  # fmt: skip
