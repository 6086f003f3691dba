"""Cross-entropy against its definition, in each implementation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import kernels
from runtime.kernels.dispatch import VARIABLE
from runtime.kernels.logit_rows import rows_of
from tests.kernels_behaviour import check_autocast, check_compiles, check_layouts, check_meta
from tests.kernels_harness import (
    DTYPES,
    IMPLEMENTATIONS,
    Function,
    check_accuracy,
    leading_shapes,
    random_tensor,
    widths,
)

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def random_target(shape: tuple[int, ...], classes: int, seed: int) -> torch.Tensor:
    """Class indices, about a quarter of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, classes, shape, generator=generator)
    return target.masked_fill(torch.rand(shape, generator=generator) < 0.25, -100)


def definition(*, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Function:
    """In torch's operators."""

    def losses(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        plain = F.cross_entropy(flat, target.reshape(-1), reduction="none", label_smoothing=label_smoothing)
        if not z_loss:
            return plain.reshape(target.shape)
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        penalty = z_loss * wide.logsumexp(-1).square() * (target.reshape(-1) != -100)
        return (plain + penalty).reshape(target.shape).to(logits.dtype)

    return losses


def check_typical_errors(
    ours: Function, theirs: Function, tensors: Sequence[torch.Tensor], *, implementation: str
) -> None:
    """Both round the same things: errors compare over many numbers, not in one."""
    dtype = tensors[0].dtype
    exact = results(theirs, [tensor.double() for tensor in tensors])
    # Triton's interpreter cuts bfloat16 off where a GPU rounds it
    slack = 2.5 if implementation == "triton" and dtype == torch.bfloat16 else 1.2
    for one, other, truth in zip(results(ours, tensors), results(theirs, tensors), exact, strict=True):
        assert one.dtype == other.dtype
        assert (one.double() - truth).square().mean().sqrt() <= slack * (other.double() - truth).square().mean().sqrt()


def results(function: Function, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Losses and all gradients, for losses of various weights."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    losses = function(*leaves)
    grad = random_tensor(losses.shape, 9).to(losses.dtype)
    return [losses.detach(), *torch.autograd.grad(losses, leaves, grad)]


def peak_bytes(run: Callable[[], None]) -> int:
    """The most that is held at once on the CPU of what ``run`` allocates."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert sizes
    return max(itertools.accumulate(sizes))


@each_implementation
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32])
@settings(max_examples=15, deadline=None)
@given(
    shape=leading_shapes | st.just(()),
    width=widths,
    seed=st.integers(0, 9),
    label_smoothing=st.sampled_from((0.0, 0.1, 1.0)),
    z_loss=st.sampled_from((0.0, 1e-2)),
)
def test_cross_entropy(
    implementation: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    width: int,
    seed: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    check_accuracy(
        lambda logits, target: kernels.cross_entropy(logits, target, **options),
        definition(**options),
        [random_tensor((*shape, width), seed, scale=3.0), random_target(shape, width, seed)],
        dtype=dtype,
        implementation=implementation,
    )


@each_implementation
def test_rows_of_several_blocks(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.kernels.logit_rows._MAX_BLOCK", 16)
    monkeypatch.setattr("runtime.kernels.rows.ATEN_BLOCK", 80)
    check_accuracy(
        lambda logits, target: kernels.cross_entropy(logits, target, label_smoothing=0.1),
        definition(label_smoothing=0.1),
        [random_tensor((5, 37), 0, scale=30.0) + torch.arange(37), random_target((5,), 37, 1)],
        dtype=torch.float64,
        implementation=implementation,
    )


@each_implementation
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_float32_is_as_close_as_torch(
    implementation: str, label_smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, implementation)
    target, plain = random_target((50,), 500, 1), definition(label_smoothing=label_smoothing)
    check_typical_errors(
        lambda logits: kernels.cross_entropy(logits, target, label_smoothing=label_smoothing),
        lambda logits: plain(logits, target),
        [random_tensor((50, 500), 0, scale=4.0).float()],
        implementation=implementation,
    )


def test_behaviour() -> None:
    logits, target = random_tensor((3, 5, 7), 0).requires_grad_(), random_target((3, 5), 7, 1)

    def losses(logits: torch.Tensor) -> torch.Tensor:
        # what is reused must be nobody's leaf
        return kernels.cross_entropy(logits * 1, target.to(logits.device), z_loss=0.01, reuse_logits=True)

    check_compiles(losses, (logits,))
    check_meta(losses, (logits,))
    operators = torch.ops.meshwright
    torch.library.opcheck(operators.cross_entropy.default, (logits, target, -100, 0.1, 0.01))
    start, detached = torch.tensor([3]), logits.detach()
    torch.library.opcheck(operators.cross_entropy_sums.default, (detached, target, start, True))
    statistic, grad = torch.stack([detached.amax(-1)] * 2), random_tensor((3, 5), 2)
    options = (target, statistic, start, 14, -100, 0.1, 0.0)
    torch.library.opcheck(operators.cross_entropy_backward.default, (grad, detached, *options))
    torch.library.opcheck(operators.cross_entropy_backward_.default, (detached, grad, *options))


def test_autocast() -> None:
    target = random_target((5,), 7, 1)
    for dtype in (torch.float32, torch.bfloat16):
        check_autocast(
            lambda logits: kernels.cross_entropy(logits, target),
            lambda logits: F.cross_entropy(logits, target, reduction="none"),
            [random_tensor((5, 7), 0).to(dtype)],
        )


def test_layouts() -> None:
    """Rows apart, as of padded vocabularies and shifted positions, are read where they lie; others are copied."""
    whole = random_tensor((3, 6, 20), 0)
    logits, target = whole[:, :-1, :17], random_target((3, 5), 17, 1)
    for other in (logits, logits.mT.contiguous().mT, logits.transpose(0, 1).contiguous().transpose(0, 1)):
        check_layouts(
            lambda logits: kernels.cross_entropy(logits, target), (logits.contiguous(),), (other,), IMPLEMENTATIONS
        )
    assert rows_of(logits).data_ptr() == whole.data_ptr()


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_logits_become_their_own_gradient(
    implementation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, implementation)
    tokens = 60 if implementation == "aten" else 8  # ATen spares memory where there is some to spare
    values, target = random_tensor((3, tokens, 97), 0).to(dtype), random_target((3, tokens), 97, 1)
    (expected,) = torch.autograd.grad(kernels.cross_entropy(values.requires_grad_(), target).sum(), values)
    logits = values.detach().clone().requires_grad_()
    total = kernels.cross_entropy(logits, target, reuse_logits=True).sum()
    (gradient,) = torch.autograd.grad(total, logits, retain_graph=True)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
    assert gradient.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, logits)


@each_implementation
def test_no_logits_are_reused_that_share_memory(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, implementation)
    row, target = random_tensor((7,), 0).requires_grad_(), torch.tensor([0, 3, -100])
    kernels.cross_entropy(row.expand(3, 7), target, reuse_logits=True).sum().backward()
    again = row.detach().clone().requires_grad_()
    F.cross_entropy(again.expand(3, 7), target, reduction="sum").backward()
    torch.testing.assert_close(row.grad, again.grad)


@each_implementation
def test_ignored_targets_only(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, implementation)
    logits = random_tensor((5, 7), 0).requires_grad_()
    losses = kernels.cross_entropy(logits, torch.full((5,), 3), ignore_index=3, label_smoothing=0.1, z_loss=0.1)
    losses.sum().backward()
    assert logits.grad is not None and not losses.any() and not logits.grad.any()


@each_implementation
def test_masked_and_huge_logits(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes that are ruled out by -inf, at first for more than a block, and logits beyond what exp can take."""
    monkeypatch.setenv(VARIABLE, implementation)
    monkeypatch.setattr("runtime.kernels.logit_rows._MAX_BLOCK", 4)
    logits = 1e4 * random_tensor((3, 18), 0)
    logits[:, :9] = -torch.inf
    target = torch.tensor([9, 12, 17])
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    losses = kernels.cross_entropy(ours, target)
    reference = F.cross_entropy(theirs, target, reduction="none")
    torch.testing.assert_close(losses, reference)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), y)[0] for x, y in ((losses, ours), (reference, theirs))))


@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.05)])
def test_second_derivatives(label_smoothing: float, z_loss: float) -> None:
    logits, target = random_tensor((2, 3, 5), 0).requires_grad_(), random_target((2, 3), 5, 1)

    def losses(logits: torch.Tensor) -> torch.Tensor:
        return kernels.cross_entropy(logits, target, label_smoothing=label_smoothing, z_loss=z_loss, reuse_logits=True)

    assert torch.autograd.gradgradcheck(losses, (logits,))


def test_forward_holds_no_second_copy_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.kernels.rows.ATEN_BLOCK", 2**16)
    logits = random_tensor((2048, 1000), 0).bfloat16().requires_grad_()
    target = random_target((2048,), 1000, 1)
    assert peak_bytes(lambda: kernels.cross_entropy(logits, target, label_smoothing=0.1).sum()) < logits.nbytes
    reused = logits.detach().clone().requires_grad_()

    def step() -> None:
        kernels.cross_entropy(reused, target, reuse_logits=True).sum().backward()

    assert peak_bytes(step) < logits.nbytes


def test_wrong_input_is_refused() -> None:
    logits, target = torch.zeros(5, 7), torch.zeros(5, dtype=torch.int64)
    for arguments, message in (
        ((logits, target[:4]), "target is"),
        ((logits, torch.zeros(5)), "class indices"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.cross_entropy(*arguments)
    with pytest.raises(ValueError, match="label_smoothing"):
        kernels.cross_entropy(logits, target, label_smoothing=1.5)
    with pytest.raises(IndexError, match="target 7"):
        kernels.cross_entropy(logits, target + 7)


def test_no_class_gives_nan_where_nothing_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    if "triton" not in IMPLEMENTATIONS:
        pytest.skip("kernels run in Triton's interpreter")
    monkeypatch.setenv(VARIABLE, "triton")
    losses = kernels.cross_entropy(torch.zeros(3, 7), torch.tensor([1, 7, -100]))
    assert losses.isnan().tolist() == [False, True, False]
