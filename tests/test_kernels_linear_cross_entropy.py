"""Chunked linear + cross-entropy against its definition, and what it holds in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import kernels
from runtime.kernels.chunked_logits import LEAST_CHUNK, tokens_at_a_time
from runtime.kernels.dispatch import VARIABLE
from tests.kernels_behaviour import check_autocast, check_compiles, check_layouts, check_meta
from tests.kernels_harness import IMPLEMENTATIONS, leading_shapes, random_tensor, widths
from tests.test_kernels_cross_entropy import check_typical_errors, definition, peak_bytes, random_target, results

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=25, deadline=None)
@given(
    shape=leading_shapes | st.just(()),
    width=widths,
    hidden=st.sampled_from((1, 3, 16)),
    has_bias=st.booleans(),
    chunk_tokens=st.sampled_from((None, 1, 4)),
    seed=st.integers(0, 9),
    label_smoothing=st.sampled_from((0.0, 0.1)),
    z_loss=st.sampled_from((0.0, 1e-2)),
)
def test_linear_cross_entropy(
    implementation: str,
    shape: tuple[int, ...],
    width: int,
    hidden: int,
    has_bias: bool,
    chunk_tokens: int | None,
    seed: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    losses = definition(**options)
    tensors = [random_tensor((*shape, hidden), seed), random_tensor((width, hidden), seed + 1)]
    tensors += [random_tensor((width,), seed + 2)] if has_bias else []
    target = random_target(shape, width, seed)

    def whole(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        return losses(F.linear(x, weight, *bias), target)

    def chunked(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        return kernels.linear_cross_entropy(x, weight, target, *bias, chunk_tokens=chunk_tokens, **options)

    trained = results(whole, tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, implementation)
        torch.testing.assert_close(results(chunked, tensors), trained, rtol=1e-10, atol=1e-12)


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_dtypes_are_as_close_as_torch(
    implementation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both round logits and their gradients, so only errors over many numbers can be compared."""
    monkeypatch.setenv(VARIABLE, implementation)
    tensors = [random_tensor(shape, seed).to(dtype) for seed, shape in enumerate([(48, 16), (130, 16), (130,)])]
    target = random_target((48,), 130, 3)
    plain = definition()

    def whole(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return plain(F.linear(x, weight, bias), target)

    def chunked(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return kernels.linear_cross_entropy(x, weight, target, bias, chunk_tokens=7)

    check_typical_errors(chunked, whole, tensors, implementation=implementation)


def test_behaviour() -> None:
    tensors = [
        random_tensor((3, 5, 4), 0),
        random_tensor((7, 4), 1),
        random_target((3, 5), 7, 2),
        random_tensor((7,), 3),
    ]
    x, weight, target, bias = (t.requires_grad_() if t.is_floating_point() else t for t in tensors)

    def losses(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return kernels.linear_cross_entropy(x, weight, target.to(x.device), bias, label_smoothing=0.1, chunk_tokens=4)

    check_compiles(losses, (x, weight, bias))
    check_meta(losses, (x, weight, bias))
    operator = torch.ops.meshwright.linear_cross_entropy.default
    torch.library.opcheck(operator, (x, weight, bias, target, -100, 0.1, 0.01, 4))
    torch.library.opcheck(operator, (x.detach(), weight, None, target))


def test_autocast() -> None:
    tensors = [random_tensor(shape, seed).float() for seed, shape in enumerate([(6, 4), (7, 4), (7,)])]
    target = random_target((6,), 7, 2)
    plain = definition()
    check_autocast(
        lambda x, weight, bias: kernels.linear_cross_entropy(x, weight, target, bias),
        lambda x, weight, bias: plain(F.linear(x, weight, bias), target),
        tensors,
    )


def test_layouts() -> None:
    x, weight, target = random_tensor((3, 5, 4), 0), random_tensor((7, 4), 1), random_target((3, 5), 7, 2)
    other = torch.stack([x, x], -1)[..., 0], weight.t().contiguous().t()
    for losses in (
        lambda x, weight: kernels.linear_cross_entropy(x, weight, target, chunk_tokens=4),
        lambda x, weight: kernels.linear_cross_entropy(x, weight, target.t().contiguous().t(), chunk_tokens=4),
    ):
        check_layouts(losses, (x, weight), other, IMPLEMENTATIONS)


@each_implementation
def test_ignored_targets_only(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, implementation)
    x, weight = random_tensor((5, 4), 0).requires_grad_(), random_tensor((7, 4), 1).requires_grad_()
    losses = kernels.linear_cross_entropy(x, weight, torch.full((5,), -100), chunk_tokens=2)
    losses.sum().backward()
    for zero in (losses, x.grad, weight.grad):
        assert zero is not None and not zero.any()


@each_implementation
def test_gradients_are_made_only_where_wanted(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, implementation)
    x, weight, bias = random_tensor((5, 4), 0), random_tensor((7, 4), 1), random_tensor((7,), 2)
    target = random_target((5,), 7, 3)
    for place in range(3):
        leaves = [t.clone().requires_grad_(place == number) for number, t in enumerate((x, weight, bias))]
        kernels.linear_cross_entropy(*leaves[:2], target, leaves[2]).sum().backward()
        trained = [t.clone().requires_grad_(place == number) for number, t in enumerate((x, weight, bias))]
        F.cross_entropy(F.linear(*trained), target, reduction="sum").backward()
        torch.testing.assert_close(leaves[place].grad, trained[place].grad)
        assert sum(leaf.grad is not None for leaf in leaves) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_never_all_held(dtype: torch.dtype) -> None:
    """Forward and backward hold a few chunks of 16 tokens: far less than the logits of 512."""
    tokens, classes, chunk = 512, 2000, 16
    x, weight = random_tensor((tokens, 8), 0).to(dtype), random_tensor((classes, 8), 1).to(dtype)
    target = random_target((tokens,), classes, 2)
    leaves = x.requires_grad_(), weight.requires_grad_()

    def step() -> None:
        losses = kernels.linear_cross_entropy(*leaves, target, label_smoothing=0.1, chunk_tokens=chunk)
        torch.autograd.grad(losses.sum(), leaves)

    others = 4 * (2 * tokens * 8 + 3 * classes * 8 + 20 * tokens)
    assert peak_bytes(step) < 4 * (4 * chunk * classes) + others < 4 * tokens * classes / 4


def test_chunks_are_as_large_as_the_hidden_states_or_large_enough() -> None:
    assert tokens_at_a_time(65536, 4096, 128256) == 2093
    assert tokens_at_a_time(4096, 4096, 128256) == LEAST_CHUNK
    assert tokens_at_a_time(300, 768, 50257) == 300
    assert tokens_at_a_time(5000, 768, 10) == 5000


def test_wrong_input_is_refused() -> None:
    x, weight, target = torch.zeros(5, 4), torch.zeros(7, 4), torch.zeros(5, dtype=torch.int64)
    for arguments, message in (
        ((x, torch.zeros(7, 3), target), "weight is"),
        ((x, weight, target[:4]), "target is"),
        ((x, weight, target, torch.zeros(4)), "bias is"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.linear_cross_entropy(*arguments)
    with pytest.raises(ValueError, match="chunk_tokens"):
        kernels.linear_cross_entropy(x, weight, target, chunk_tokens=0)
    with pytest.raises(IndexError, match="target 7"):
        kernels.linear_cross_entropy(x, weight, target + 7)
