"""Vocabulary-parallel cross-entropy and embedding, and attention that drops: exact, stable, and with no gather."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import spmd_types as spmd
import torch
import torch.nn.functional as F
from rules_harness import (
    RANKS,
    Sample,
    assemble,
    check_types,
    distribute,
    fake_mesh,
    legal_choices,
    local_call,
    make_case,
)
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh

from passes.emit.expressions import expression
from passes.plan import CollectivePlan
from passes.rules import rule_for
from runtime import ops
from runtime.mesh.communication_counter import CommunicationCounter
from tests.ranks import run_on_ranks

BOTH = ("a", "b")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as fake:
        yield fake


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def sharded_losses(
    mesh: DeviceMesh, logits: torch.Tensor, target: torch.Tensor, *, smoothing: float = 0.0
) -> tuple[torch.Tensor, tuple[CollectivePlan, ...]]:
    """Losses with the vocabulary cut on both axes, and the collectives that they took."""
    with LocalTensorMode(RANKS), spmd.set_current_mesh(mesh), CommunicationCounter(mesh) as counter:
        local = LocalTensor(distribute(logits, ("S(1)", "S(1)")))
        losses = ops.cross_entropy(local, target, label_smoothing=smoothing, vocabulary=logits.shape[-1], axes=BOTH)
    parts = {rank: losses._local_tensors[rank] for rank in range(RANKS)}
    return assemble(parts, ("I", "I"), exact=True), counter.collectives


def test_huge_logits_do_not_overflow(mesh: DeviceMesh) -> None:
    logits = torch.tensor([[1e4, -1e4, 5e3, 0.0], [-1e4, -1e4, -1e4, -1e4]])
    target = torch.tensor([1, 0])
    actual, _ = sharded_losses(mesh, logits, target)
    torch.testing.assert_close(actual, F.cross_entropy(logits, target, reduction="none"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_summed_in_float32(dtype: torch.dtype, mesh: DeviceMesh) -> None:
    logits = torch.randn(5, 64).to(dtype)
    target = torch.randint(0, 64, (5,))
    actual, _ = sharded_losses(mesh, logits, target, smoothing=0.1)
    assert actual.dtype == dtype
    expected = F.cross_entropy(logits.float(), target, reduction="none", label_smoothing=0.1)
    # one unit in the last place of bfloat16 is 2^-8
    torch.testing.assert_close(actual, expected.to(dtype), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_collectives_are_those_of_the_rule(smoothing: float, mesh: DeviceMesh) -> None:
    """What the operator sends is what its rule says: two all-reduces of token size on each axis, no gather."""
    logits, target = torch.randn(6, 8, dtype=torch.float64), torch.randint(0, 8, (6,))
    case = make_case(Sample("meshwright.cross_entropy", (logits, target), {"label_smoothing": smoothing}))
    rule = rule_for(case.node, case.values)
    assert rule is not None
    _, collectives = sharded_losses(mesh, logits, target, smoothing=smoothing)
    for axis in BOTH:
        counted = [entry for entry in collectives if entry.axis == axis]
        assert {entry.collective for entry in counted} == {"all_reduce"}
        assert sum(entry.count for entry in counted) == len(rule.reductions)
        assert sum(entry.num_bytes for entry in counted) == sum(6 * r.multiple * r.item_size for r in rule.reductions)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_losses(has_bias: bool, smoothing: float, mesh: DeviceMesh) -> None:
    """With both axes cutting the vocabulary: whole losses, and as many collectives for however many chunks."""
    hidden, weight = torch.randn(6, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    bias = torch.randn(8, dtype=torch.float64) if has_bias else None
    target = torch.tensor([0, 7, -100, 3, 4, 5])
    expected = F.cross_entropy(F.linear(hidden, weight, bias), target, reduction="none", label_smoothing=smoothing)
    sums = 3 if smoothing else 2
    for chunk_tokens in (None, 4):
        with LocalTensorMode(RANKS), spmd.set_current_mesh(mesh), CommunicationCounter(mesh) as counter:
            local = LocalTensor(distribute(weight, ("S(0)", "S(0)")))
            parts = None if bias is None else LocalTensor(distribute(bias, ("S(0)", "S(0)")))
            options = {"label_smoothing": smoothing, "chunk_tokens": chunk_tokens, "vocabulary": 8, "axes": BOTH}
            losses = ops.linear_cross_entropy(hidden, local, target, parts, **options)
        actual = assemble({rank: losses._local_tensors[rank] for rank in range(RANKS)}, ("I", "I"), exact=True)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        for axis in BOTH:
            counted = [entry for entry in counter.collectives if entry.axis == axis]
            assert {entry.collective for entry in counted} == {"all_reduce"}
            assert sum(entry.count for entry in counted) == 2
            assert sum(entry.num_bytes for entry in counted) == 6 * 8 * (1 + sums)


@pytest.mark.parametrize("spmd_type", [spmd.R, spmd.I, spmd.P])
def test_linear_losses_take_hidden_states_that_are_whole(spmd_type: Any, mesh: DeviceMesh) -> None:
    """R: its gradient is a partial sum. I has a whole gradient, and a partial sum has no loss of its own."""
    shapes = {"hidden": (6, 4), "weight": (2, 4), "bias": (2,)}
    types = {"hidden": spmd_type, "weight": spmd.V, "bias": spmd.V}
    with spmd.set_current_mesh(mesh), spmd.checker.typecheck(local=True):
        typed = {
            name: spmd.assert_type(
                torch.empty(shape, device="meta", requires_grad=True), dict.fromkeys(BOTH, types[name])
            )
            for name, shape in shapes.items()
        }
        target = spmd.assert_type(torch.empty(6, dtype=torch.int64, device="meta"), dict.fromkeys(BOTH, spmd.R))

        def losses() -> torch.Tensor:
            return ops.linear_cross_entropy(**typed, target=target, vocabulary=8, axes=BOTH)

        if spmd_type is spmd.R:
            assert {spmd.get_axis_local_type(losses(), axis) for axis in BOTH} == {spmd.I}
        else:
            with pytest.raises(spmd.SpmdTypeError):
                losses()


@pytest.mark.parametrize("has_gradient", [False, True])
def test_losses_without_gradients_take_weights_that_are_not_converted(has_gradient: bool, mesh: DeviceMesh) -> None:
    """Samples cut over one axis, the vocabulary over the other; programs without gradients convert no I to R."""
    types = {
        "hidden": ((6, 4), torch.float32, {"a": spmd.V, "b": spmd.I}),
        "weight": ((4, 4), torch.float32, {"a": spmd.I, "b": spmd.V}),
        "target": ((6,), torch.int64, {"a": spmd.V, "b": spmd.R}),
    }
    with spmd.set_current_mesh(mesh), spmd.checker.typecheck(local=True), torch.set_grad_enabled(has_gradient):
        typed = {
            name: spmd.assert_type(
                torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point), letters
            )
            for name, (shape, dtype, letters) in types.items()
        }
        with pytest.raises(spmd.SpmdTypeError) if has_gradient else contextlib.nullcontext():
            losses = ops.linear_cross_entropy(**typed, vocabulary=8, axes=("b",))
            assert [spmd.get_axis_local_type(losses, axis) for axis in BOTH] == [spmd.V, spmd.R]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("enable_gqa", [False, True])
def test_attention_that_drops(enable_gqa: bool, is_causal: bool, mesh: DeviceMesh) -> None:
    """Every choice has the plan's types, copies of a probability are dropped alike, and the mean is unbiased."""
    query, key = torch.randn(2, 4, 4, 2, dtype=torch.float64), torch.randn(2, 2 if enable_gqa else 4, 4, 2).double()
    value = torch.ones_like(key)
    options = {"dropout_p": 0.5, "enable_gqa": enable_gqa, "is_causal": is_causal}
    sample = Sample("aten.scaled_dot_product_attention.default", (query, key, value), options)
    case = make_case(sample)
    rule = rule_for(case.node, case.values)
    assert rule is not None
    choices = legal_choices(case, rule)
    assert {choice.label for choice in choices} >= {"cut b0", "cut l", "cut h" if enable_gqa else "cut b1"}
    for choice in choices:
        call = local_call(case, rule, (choice, choices[0]))
        source = expression(call)
        assert source.startswith("ops.scaled_dot_product_attention(")
        assert ("length_axes" in source) == (is_causal and choice.label == "cut l")
        check_types(mesh, case, call, source)
    ops.seed(0)
    samples = [ops.scaled_dot_product_attention(query, key, value, draw=draw, **options).mean() for draw in range(50)]
    assert 0.9 < torch.stack(samples).mean() < 1.1


def test_attention_without_drops_is_torchs() -> None:
    query, key = torch.randn(2, 4, 3, 2, dtype=torch.float64), torch.randn(2, 2, 3, 2, dtype=torch.float64)
    mask = torch.randn(3, 3, dtype=torch.float64)
    for options in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask.tril() != 0, "scale": 0.3}):
        actual = ops.scaled_dot_product_attention(query, key, key, dropout_p=0.0, enable_gqa=True, **options)
        expected = F.scaled_dot_product_attention(query, key, key, enable_gqa=True, **options)
        torch.testing.assert_close(actual, expected)


def test_on_real_processes() -> None:
    actual = run_on_ranks("ops_worker", 2, None)
    assert set(actual) >= {
        "loss 0.0",
        "loss gradient 0.2",
        "linear hidden gradient",
        "rows",
        "rows gradient",
        "copies",
        "shards",
    }
    assert max(actual.values()) < 1e-12, actual
