"""Derivatives of derivatives: gradient penalties, and whatever else differentiates what autograd made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from runtime import kernels
from tests.kernels_harness import IMPLEMENTATIONS, random_tensor

EPS = 1e-5
TARGET = torch.tensor([[2, 0, -100], [4, 4, 1]])
INDICES = torch.tensor([[2, 0, 2], [1, 2, 3]])
X, W = (2, 3, 6), (6,)
Shapes = Sequence[tuple[int, ...]]

#: Operator → how it is called, and the shapes of the tensors that it is differentiated by.
OPERATORS: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "rms_norm": (lambda x, w: kernels.rms_norm(x, w, EPS, 1.0), (X, W)),
    "rms_norm without a weight": (lambda x: kernels.rms_norm(x, None, EPS), (X,)),
    "add_rms_norm": (lambda x, r, w: kernels.add_rms_norm(x, r, w, EPS), (X, X, W)),
    "layer_norm": (lambda x, w, b: kernels.layer_norm(x, w, b, EPS), (X, W, W)),
    "layer_norm without weight and bias": (lambda x: kernels.layer_norm(x, None, None, EPS), (X,)),
    "add_layer_norm": (lambda x, r, w, b: kernels.add_layer_norm(x, r, w, b, EPS), (X, X, W, W)),
    "swiglu": (kernels.swiglu, (X, X)),
    "geglu": (kernels.geglu, (X, X)),
    "geglu by tanh": (lambda gate, up: kernels.geglu(gate, up, "tanh"), (X, X)),
    "bias_gelu": (kernels.bias_gelu, (X, W)),
    "bias_gelu by tanh": (lambda x, b: kernels.bias_gelu(x, b, "tanh"), (X, W)),
    "rotary": (kernels.rotary, (X, (3, 4), (3, 4))),
    "rotary of neighbours": (lambda x, cos, sin: kernels.rotary(x, cos, sin, True), (X, (3, 6), (1, 6))),
    "rotary_pair": (kernels.rotary_pair, ((2, 3, 4), (1, 3, 4), (3, 4), (3, 4))),
    "embedding": (lambda weight: kernels.embedding(INDICES, weight, padding_idx=1), ((4, 3),)),
    "cross_entropy": (
        lambda logits: kernels.cross_entropy(logits, TARGET, label_smoothing=0.1, z_loss=0.2),
        ((2, 3, 5),),
    ),
    "linear_cross_entropy": (
        lambda hidden, weight, bias: kernels.linear_cross_entropy(
            hidden, weight, TARGET, bias, label_smoothing=0.1, z_loss=0.2, chunk_tokens=2
        ),
        ((2, 3, 4), (5, 4), (5,)),
    ),
}


def leaves_of(shapes: Shapes) -> list[torch.Tensor]:
    return [random_tensor(shape, place).requires_grad_() for place, shape in enumerate(shapes)]


@pytest.mark.parametrize("name", OPERATORS)
def test_second_derivatives(name: str) -> None:
    function, shapes = OPERATORS[name]
    assert torch.autograd.gradgradcheck(function, leaves_of(shapes), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("name", OPERATORS)
def test_second_derivatives_by_one_tensor_alone(name: str) -> None:
    function, shapes = OPERATORS[name]
    leaves = leaves_of(shapes)
    for place in range(len(leaves)):
        inputs = [leaf if each == place else leaf.detach() for each, leaf in enumerate(leaves)]
        assert torch.autograd.gradgradcheck(function, inputs, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradient_penalty_of_a_small_network(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One operator's gradient goes into another's, and both into a sum of squares."""
    monkeypatch.setenv("MESHWRIGHT_KERNELS", implementation)
    shapes = [(2, 3, 6), (6,), (6, 6), (5, 6)]

    def fused(x: torch.Tensor, norm: torch.Tensor, inner: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        total, normal = kernels.add_rms_norm(x, x * x, norm, EPS)
        hidden = total + kernels.swiglu(normal @ inner, normal)
        return kernels.cross_entropy(hidden @ head.t(), TARGET).sum()

    def plain(x: torch.Tensor, norm: torch.Tensor, inner: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        total = x + x * x
        normal = torch.nn.functional.rms_norm(total, (6,), norm, EPS)
        hidden = total + torch.nn.functional.silu(normal @ inner) * normal
        return torch.nn.functional.cross_entropy((hidden @ head.t()).flatten(0, 1), TARGET.flatten(), reduction="sum")

    penalties = [penalty(loss, leaves_of(shapes)) for loss in (fused, plain)]
    torch.testing.assert_close(*penalties, rtol=1e-9, atol=1e-10)


def penalty(loss: Callable[..., torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of the sum of squares of the loss's gradients."""
    grads = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    return list(torch.autograd.grad(torch.stack([grad.square().sum() for grad in grads]).sum(), leaves))


def test_third_derivatives() -> None:
    """The gradient's gradient is made of torch's own operators."""
    x, weight = leaves_of(((3, 4), (4,)))
    results = []
    for function in (kernels.rms_norm, lambda x, w, eps: torch.nn.functional.rms_norm(x, (4,), w, eps)):
        result = function(x, weight, EPS).pow(3).sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(result, x, create_graph=True)
            result = grad.square().sum()
        results.append(grad)
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-8)


def test_the_first_derivative_alone_keeps_nothing() -> None:
    """Only a graph of the gradient holds what the second derivative needs."""
    gate, up = leaves_of((X, X))
    grads = torch.autograd.grad(kernels.swiglu(gate, up).sum(), (gate, up))
    assert all(grad.grad_fn is None for grad in grads)


def test_a_sharded_vocabulary_has_no_second_derivative() -> None:
    logits, grad = leaves_of(((3, 5), (3,)))
    statistic, target, start = torch.ones(2, 3, dtype=torch.float64), torch.tensor([0, 1, 2]), torch.tensor([0])
    result = torch.ops.meshwright.cross_entropy_backward(grad, logits, target, statistic, start, 10, -100, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="sharded vocabulary has no second derivative"):
        result.sum().backward()
