"""Samplers of the fused operators, for ``test_rules``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from rules_samples import SAMPLERS, Arguments, Draw, Sampler, sampler

import passes.torch_compat.gated_delta_rule
import passes.torch_compat.host_operators
import passes.torch_compat.linear_recurrence  # noqa: F401  (registers operators)
import runtime.kernels  # noqa: F401  (registers operators)


def fused(*names: str) -> Callable[[Sampler], Sampler]:
    def register(function: Sampler) -> Sampler:
        SAMPLERS.update((f"meshwright.{name}.default", function) for name in names)
        return function

    return register


def _norm(draw: Draw, *, residual: bool, bias: bool) -> Arguments:
    shape = [*draw.shape(0, 2), draw.of(2, 3, 4)]
    vectors = [draw.normal(shape[-1]) if draw.flag() else None for _ in range(1 + bias)]
    inputs = [draw.normal(*shape) for _ in range(1 + residual)]
    return (*inputs, *vectors, 1e-3), {}


@fused("rms_norm")
def rms_norm(draw: Draw) -> Arguments:
    args, _ = _norm(draw, residual=False, bias=False)
    return args, {"offset": draw.of(0.0, 1.0)}


@fused("add_rms_norm")
def add_rms_norm(draw: Draw) -> Arguments:
    args, _ = _norm(draw, residual=True, bias=False)
    return args, {"offset": draw.of(0.0, 1.0)}


@fused("layer_norm")
def layer_norm(draw: Draw) -> Arguments:
    return _norm(draw, residual=False, bias=True)


@fused("add_layer_norm")
def add_layer_norm(draw: Draw) -> Arguments:
    return _norm(draw, residual=True, bias=True)


@fused("swiglu")
def swiglu(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.normal(*shape), draw.normal(*shape)), {}


@fused("geglu")
def geglu(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.normal(*shape), draw.normal(*shape)), {"approximate": draw.of("none", "tanh")}


@fused("bias_gelu")
def bias_gelu(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.normal(*shape), draw.normal(shape[-1])), {"approximate": draw.of("none", "tanh")}


def _angles(draw: Draw, shape: list[int]) -> list[torch.Tensor]:
    """Cosines and sines [length, width] for [..., length, width], with leading dims of size 1 or none."""
    width = draw.of(*(width for width in (2, 4) if width <= shape[-1]))
    leading = [1] * draw.int(0, len(shape) - 2)
    return [draw.normal(*leading, shape[-2], width) for _ in range(2)]


@fused("rotary")
def rotary(draw: Draw) -> Arguments:
    shape = [*draw.shape(1, 3), draw.of(2, 4, 6)]
    return (draw.normal(*shape), *_angles(draw, shape), draw.flag()), {}


@fused("rotary_pair")
def rotary_pair(draw: Draw) -> Arguments:
    batch, groups, members, length, width = draw.size(), draw.size(), draw.of(1, 2), draw.size(), draw.of(2, 4, 6)
    query, key = [batch, groups * members, length, width], [batch, groups, length, width]
    return (draw.normal(*query), draw.normal(*key), *_angles(draw, query), draw.flag()), {}


@fused("embedding")
def embedding(draw: Draw) -> Arguments:
    rows = draw.of(2, 4, 6)
    indices = draw.integers(0, rows, *draw.shape(1, 2))
    return (indices, draw.normal(rows, draw.size())), {"padding_idx": draw.of(None, 0, rows - 1)}


@fused("linear_cross_entropy")
def linear_cross_entropy(draw: Draw) -> Arguments:
    positions, width, classes = draw.shape(1, 2), draw.size(), draw.of(2, 4, 6)
    target = draw.integers(0, classes, *positions)
    target.masked_fill_(draw.bools(*positions) & draw.bools(*positions), -100)
    bias = draw.normal(classes) if draw.flag() else None
    options = {"label_smoothing": draw.of(0.0, 0.1), "z_loss": draw.of(0.0, 1e-2)}
    return (draw.normal(*positions, width), draw.normal(classes, width), bias, target), options


@sampler("meshwright.expert_linear")
def expert_linear(draw: Draw) -> Arguments:
    """Rows of experts, some of none; ids may stand for several rows and rows for several ids."""
    lead, width, experts = draw.shape(1, 2), draw.size(), draw.of(1, 2, 4)
    rows = [1 if draw.int(0, 3) == 0 else size for size in lead]
    ids = draw.integers(0, experts, *lead)
    return (draw.normal(*rows, width), ids, draw.normal(experts, draw.size(), width)), {}


@fused("experts")
def experts(draw: Draw) -> Arguments:
    """Two leading dims, some ids of no expert."""
    lead, hidden, count, inner, k = [4, draw.of(1, 2)], draw.of(1, 3), 4, draw.of(2, 4), draw.of(1, 2)
    activation, halves = draw.of(("swiglu", 2), ("swiglu_clamped", 2), ("gelu", 1))
    biases = draw.flag()
    ids = torch.remainder(torch.arange(4 * lead[1] * k) * 3, 5).view(*lead, k)
    first, second = draw.normal(count, halves * inner, hidden), draw.normal(count, hidden, inner)
    rest = (draw.normal(count, halves * inner), draw.normal(count, hidden)) if biases else (None, None)
    return (draw.normal(*lead, hidden), ids, draw.normal(*lead, k), first, second, *rest, activation), {}


@fused("checked")
def checked(draw: Draw) -> Arguments:
    expected = draw.flag()
    return (draw.normal(*draw.shape(0, 3)), torch.tensor(expected), expected, "here"), {}


@fused("checked_each")
def checked_each(draw: Draw) -> Arguments:
    expected = draw.flag()
    shape = draw.shape(0, 3)
    return (draw.normal(*shape), torch.full(shape, expected), expected, "here"), {}


@fused("linear_sum_assignment")
def linear_sum_assignment(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), draw.size()),), {"maximize": draw.flag()}


@fused("ctc_losses")
def ctc_losses(draw: Draw) -> Arguments:
    samples, letters, classes = draw.size(), draw.int(1, 3), 5
    scores = draw.normal(8, samples, classes).log_softmax(-1)
    targets, lengths = draw.integers(1, classes, samples, letters), draw.integers(1, letters + 1, samples)
    return (scores, targets, draw.integers(7, 9, samples), lengths, 0, draw.flag()), {}


@fused("linear_recurrence")
def linear_recurrence(draw: Draw) -> Arguments:
    shape = draw.shape(1, 4)
    dim = draw.int(0, len(shape) - 1)
    initial = draw.normal(*shape[:dim], *shape[dim + 1 :]) if draw.flag() else None
    return (draw.normal(*shape), draw.normal(*shape), initial, dim - draw.of(0, len(shape)), draw.flag()), {}


@fused("gated_delta_rule")
def gated_delta_rule(draw: Draw) -> Arguments:
    """A decay for a head, or for each entry of a key; with a state before or not."""
    batch, tokens, heads, keys, values = (draw.size() for _ in range(5))
    lead = (batch, tokens, heads)
    query, key, value = draw.normal(*lead, keys), draw.normal(*lead, keys), draw.normal(*lead, values)
    decay = -draw.normal(*lead, *([keys] if draw.flag() else [])).abs()
    initial = draw.normal(batch, heads, keys, values) if draw.flag() else None
    epsilon = draw.of(None, 1e-6)
    return (query, key, value, decay, draw.normal(*lead).sigmoid(), initial, 0.5, epsilon), {}
