"""The operators that are timed: sizes of each kind of work as tables, and what makes a call of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from runtime.kernels import cross_entropy, layer_norm, rms_norm, swiglu

Shape = tuple[int, ...]

#: (batch, m, n, k): squares, and what layers of models do.
PRODUCTS: tuple[Shape, ...] = (
    *((1, side, side, side) for side in (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)),
    *((1, rows, 4 * width, width) for width in (64, 256, 1024, 4096) for rows in (128, 512, 2048, 8192)),
    *((1, rows, width, 4 * width) for width in (64, 256, 1024, 4096) for rows in (128, 512, 2048, 8192)),
    *((batch, side, side, 64) for batch in (16, 64) for side in (32, 128, 512)),
)
#: (batch, channels, side): 3×3 kernels, as many channels out as in.
CONVOLUTIONS: tuple[Shape, ...] = tuple(
    (batch, channels, side) for batch in (4, 32) for channels, side in ((16, 32), (64, 32), (128, 16), (256, 56))
)
#: (heads of all samples, length, head width), causal.
ATTENTIONS: tuple[Shape, ...] = tuple(
    (heads, length, width) for width in (32, 64, 128) for heads in (8, 32) for length in (32, 128, 512, 2048, 4096)
)
#: (rows, width) of what is bound by memory.
ROWS: tuple[Shape, ...] = tuple(
    (rows, width) for width in (64, 512, 4096) for rows in (4, 16, 64, 256, 1024, 4096, 16384)
)


@dataclass(frozen=True)
class OperatorCase:
    """One call to time: sizes as the cost model counts them, and what makes it in a dtype on a device."""

    kind: str
    shape: Shape
    flops: float
    elements: float
    make: Callable[[torch.dtype, torch.device], Callable[[], Any]]

    @property
    def streamed_elements(self) -> int:
        """Of a tensor, of what is bound by memory: (rows, width, …)."""
        return 0 if self.flops else math.prod(self.shape[:2])


def operator_cases() -> Iterator[OperatorCase]:
    """Every case, kind by kind, the least work first."""
    tables: tuple[Iterator[OperatorCase], ...] = (
        (_product(shape) for shape in PRODUCTS),
        (_convolution(shape) for shape in CONVOLUTIONS),
        (case for shape in ATTENTIONS for case in _attention(shape)),
        (case for shape in ROWS for case in _streams(shape)),
        (case for shape in ROWS for case in _fused(shape)),
        (_optimizer(shape) for shape in ROWS),
    )
    cases = [case for table in tables for case in table]
    yield from sorted(cases, key=lambda case: (case.kind, case.flops, case.elements, case.shape))


def launch(dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    """The shortest operator."""
    values = torch.ones(16, dtype=dtype, device=device)
    return lambda: values + 1


def launched_chain(dtype: torch.dtype, device: torch.device, *, length: int) -> Callable[[], Any]:
    """As many of the shortest operators one behind the other, and their gradients by autograd: twice ``length``.

    Products and not sums, whose gradients launch nothing.
    """
    leaf, factor = (torch.ones(16, dtype=dtype, device=device) for _ in range(2))
    leaf.requires_grad_()

    def call() -> Any:
        result = leaf
        for _ in range(length):
            result = result * factor
        return torch.autograd.grad(result, leaf, factor)

    return call


def _random(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.rand(shape, device=device).to(dtype)


def _product(shape: Shape) -> OperatorCase:
    batch, m, n, k = shape

    def make(dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
        left, right = _random((batch, m, k), dtype, device), _random((batch, k, n), dtype, device)
        if batch == 1:
            return lambda: torch.mm(left[0], right[0])
        return lambda: torch.bmm(left, right)

    return OperatorCase("matmul", shape, 2.0 * batch * m * n * k, float(batch * (m * k + k * n + m * n)), make)


def _convolution(shape: Shape) -> OperatorCase:
    batch, channels, side = shape
    pixels = batch * channels * side * side

    def make(dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
        images = _random((batch, channels, side, side), dtype, device)
        kernel = _random((channels, channels, 3, 3), dtype, device)
        return lambda: F.conv2d(images, kernel, padding=1)

    return OperatorCase("convolution", shape, 18.0 * pixels * channels, float(2 * pixels + 9 * channels**2), make)


def _attention(shape: Shape) -> Iterator[OperatorCase]:
    heads, length, width = shape
    flops, elements = 2.0 * heads * length * length * width, float(4 * heads * length * width)

    def forward(dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
        query, key, value = (_random((1, heads, length, width), dtype, device) for _ in range(3))
        return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def backward(dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
        parts = [_random((1, heads, length, width), dtype, device).requires_grad_() for _ in range(3)]
        query, key, value = parts
        result = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        gradient = torch.ones_like(result)
        return lambda: torch.autograd.grad(result, parts, gradient, retain_graph=True)

    yield OperatorCase("attention", shape, flops, elements, forward)
    yield OperatorCase("attention_backward", shape, 2.5 * flops, 2 * elements, backward)


def _streams(shape: Shape) -> Iterator[OperatorCase]:
    """Kinds that are bound by memory: tensors that a call reads and writes, and the call."""
    rows, width = shape
    size = float(rows * width)

    def case(
        kind: str, tensors: float, call: Callable[[torch.Tensor, torch.Tensor], Callable[[], Any]]
    ) -> OperatorCase:
        def make(dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
            return call(_random(shape, dtype, device), _random(shape, dtype, device))

        return OperatorCase(kind, shape, 0.0, tensors * size, make)

    def gather(table: torch.Tensor, _: torch.Tensor) -> Callable[[], Any]:
        places = torch.arange(rows, device=table.device).flip(0)
        return lambda: F.embedding(places, table)

    yield case("elementwise", 3.0, lambda one, other: lambda: one + other)
    yield case("copy", 2.0, lambda one, _: lambda: one.clone())
    yield case("norm", 2.0, lambda one, _: lambda: F.layer_norm(one, one.shape[-1:]))
    yield case("reduction", 1.0, lambda one, _: lambda: one.sum(-1))
    yield case("gather", 2.0, gather)


def _fused(shape: Shape) -> Iterator[OperatorCase]:
    """Fused operators with their gradients; tensors as the planner's prices count them, forward and backward."""
    rows, width = shape

    def case(
        kind: str, number: int, tensors: float, leaf_shapes: tuple[Shape, ...], call: Callable[..., torch.Tensor]
    ) -> OperatorCase:
        def make(dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
            leaves = [_random(leaf, dtype, device).requires_grad_() for leaf in leaf_shapes]
            gradient = torch.ones_like(call(*leaves))
            return lambda: torch.autograd.grad(call(*leaves), leaves, gradient)

        return OperatorCase(kind, (*shape, number), 0.0, tensors * rows * width, make)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, torch.zeros(rows, dtype=torch.long, device=logits.device))

    yield case("fused_norm", 0, 5.0, (shape, (width,)), lambda one, weight: rms_norm(one, weight, 1e-6))
    yield case(
        "fused_norm", 1, 5.0, (shape, (width,), (width,)), lambda one, weight, bias: layer_norm(one, weight, bias, 1e-6)
    )
    yield case("fused_norm", 2, 3.0, (shape,), loss)
    yield case("fused_elementwise", 0, 8.0, (shape, shape), swiglu)


def _optimizer(shape: Shape) -> OperatorCase:
    """AdamW as a training script makes it; bytes as the planner's prices count them."""

    def make(dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
        weight = torch.nn.Parameter(_random(shape, dtype, device))
        weight.grad = _random(shape, dtype, device)
        return torch.optim.AdamW([weight]).step

    rows, width = shape
    return OperatorCase("optimizer", shape, 0.0, 7.0 * rows * width, make)
