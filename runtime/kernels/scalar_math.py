"""Functions of numbers and of rows that Triton lacks, as the kernels of emitted programs use them."""

from __future__ import annotations

from runtime.kernels.activations import activation_and_slope
from runtime.kernels.language import tl, triton


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    return 1 / (1 + tl.exp(-x))


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """By exponentials; near 0, where they cancel, by the first terms of its series."""
    share = tl.exp(-2 * tl.abs(x))
    far = (1 - share) / (1 + share)
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.03, near, tl.where(x < 0, -far, far))


@triton.jit
def sign(x):  # type: ignore[no-untyped-def]
    return tl.where(x > 0, 1, tl.where(x < 0, -1, 0))


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]
    value, _ = activation_and_slope(x, "silu")
    return value


@triton.jit
def silu_slope(x):  # type: ignore[no-untyped-def]
    _, slope = activation_and_slope(x, "silu")
    return slope


@triton.jit
def gelu(x):  # type: ignore[no-untyped-def]
    value, _ = activation_and_slope(x, "gelu")
    return value


@triton.jit
def gelu_slope(x):  # type: ignore[no-untyped-def]
    _, slope = activation_and_slope(x, "gelu")
    return slope


@triton.jit
def gelu_tanh(x):  # type: ignore[no-untyped-def]
    value, _ = activation_and_slope(x, "gelu_tanh")
    return value


@triton.jit
def gelu_tanh_slope(x):  # type: ignore[no-untyped-def]
    _, slope = activation_and_slope(x, "gelu_tanh")
    return slope


@triton.jit
def larger(x, y):  # type: ignore[no-untyped-def]
    """The larger of two numbers, or what is not a number."""
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def larger_share(grad, x, y):  # type: ignore[no-untyped-def]
    """The gradient of ``x`` from that of the larger of two numbers: half of it if they are equal."""
    return tl.where(x < y, 0.0, tl.where(x == y, grad / 2, grad))


@triton.jit
def row_sum(values, exists):  # type: ignore[no-untyped-def]
    """``[rows, 1]``, the sum of each row."""
    return tl.sum(tl.where(exists, values, 0), 1)[:, None]


@triton.jit
def row_max(values, exists):  # type: ignore[no-untyped-def]
    """``[rows, 1]``, the largest number of each row, or what is not a number."""
    largest = tl.max(tl.where(exists, values, float("-inf")), 1)
    unknown = tl.max(tl.where(exists & (values != values), 1, 0), 1)
    return tl.where(unknown > 0, float("nan"), largest)[:, None]


@triton.jit
def row_max_share(grad, values, exists):  # type: ignore[no-untyped-def]
    """The gradient of a row's numbers from that of the largest, in equal shares if there are several."""
    is_largest = exists & (values == row_max(values, exists))
    count = tl.sum(tl.where(is_largest, 1, 0), 1)[:, None]
    return tl.where(is_largest, grad / count, 0.0)
