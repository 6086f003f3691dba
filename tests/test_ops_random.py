"""Random operators: what shards draw is what the whole draws, and seed, step and number of the operator choose it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from random_oracle import keeps, words
from rules_harness import (
    Case,
    Sample,
    check_numbers,
    check_types,
    divides,
    evaluate,
    fake_mesh,
    legal_choices,
    local_call,
    make_case,
)
from torch.distributed.device_mesh import DeviceMesh

from passes.emit.expressions import LocalCall, expression
from passes.rules import rule_for
from runtime import ops
from runtime.kernels.philox import keep_mask, random_words

HALVES = torch.full((4, 6, 20), 0.5, dtype=torch.float64)
QUERY, KEY = torch.randn(4, 4, 4, 2, dtype=torch.float64), torch.randn(4, 2, 4, 2, dtype=torch.float64)
ATTENTION = "aten.scaled_dot_product_attention.default"
SAMPLES = {
    "dropout": Sample("aten.dropout.default", (HALVES, 0.5, True), {}),
    "rand_like": Sample("aten.rand_like.default", (HALVES,), {}),
    "randn_like": Sample("aten.randn_like.default", (HALVES,), {}),
    "bernoulli": Sample("aten.bernoulli.default", (HALVES,), {}),
    "attention": Sample(ATTENTION, (QUERY, KEY, KEY), {"dropout_p": 0.5, "enable_gqa": True, "is_causal": True}),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as fake:
        yield fake


def on_one_device(case: Case, call: LocalCall) -> Case:
    """``case`` with what the operator gives on one device, gradients included."""
    names = {operand.name: tensor for operand, tensor in zip(call.inputs, case.tensors)}
    outputs = evaluate(expression(call), names)
    inputs = [tensor for tensor, grad in zip(case.tensors, case.grads) if grad]
    pairs = [pair for pair, has in zip(zip(outputs, case.upstream), case.out_grads) if has]
    computed = iter(torch.autograd.grad([o for o, _ in pairs], inputs, [g for _, g in pairs]) if pairs else ())
    gradients = [next(computed) if grad else torch.zeros(()) for grad in case.grads]
    return dataclasses.replace(case, outputs=[output.detach() for output in outputs], input_gradients=gradients)


@pytest.mark.parametrize("name", SAMPLES)
def test_shards_draw_what_the_whole_draws(name: str, mesh: DeviceMesh) -> None:
    case = make_case(SAMPLES[name])
    rule = rule_for(case.node, case.values)
    assert rule is not None
    choices = legal_choices(case, rule)
    ops.seed(3)
    case = on_one_device(case, local_call(case, rule, (choices[0], choices[0])))
    cuts = 0
    for pair in itertools.product(choices, repeat=2):
        if divides(case, rule, pair):
            call = local_call(case, rule, pair)
            check_types(mesh, case, call, expression(call))
            check_numbers(mesh, case, call, expression(call))
            cuts += all(choice.factor is not None for choice in pair)
    assert cuts >= 4


def test_seed_step_and_number_choose_the_numbers() -> None:
    def drawn(*, seed: int, steps: int, draw: int, training: bool = True) -> list[float]:
        ops.seed(seed)
        for _ in range(steps):
            ops.begin_step(training=training)
        numbers: list[float] = ops.rand_like(HALVES, draw=draw).flatten().tolist()
        return numbers

    first = drawn(seed=1, steps=1, draw=0)
    assert drawn(seed=1, steps=1, draw=0) == first
    others = [drawn(seed=2, steps=1, draw=0), drawn(seed=1, steps=2, draw=0), drawn(seed=1, steps=1, draw=1)]
    others.append(drawn(seed=1, steps=1, draw=0, training=False))
    assert all(other != first for other in others) and len({tuple(other) for other in others}) == 4


def test_calls_between_training_steps_leave_them_as_they_are() -> None:
    ops.seed(1)
    ops.begin_step(training=False)
    ops.begin_step(training=True)
    pairs = ops.rand_like(HALVES)
    ops.seed(1)
    ops.begin_step(training=True)
    assert torch.equal(ops.rand_like(HALVES), pairs)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 17), (3, 0, 4)])
def test_words_are_as_specified(shape: tuple[int, ...]) -> None:
    seed, draw, step, p = 0x9ABCDEF012345678, 12, (1 << 31) + 3, 0.3
    signed = seed - (1 << 64)
    like, starts = torch.empty(shape), [0] * len(shape)
    drawn_words = random_words(like, starts, shape, 1, signed, draw, step)
    assert drawn_words.tolist() == words(shape, lane=1, draw=draw, step=step, seed=seed).tolist()
    ops.set_random_state((seed, 0, 0, step))
    dropped = ops.dropout(torch.ones(shape), p, draw=draw)
    assert (dropped != 0).tolist() == keeps(shape, p, draw=draw, step=step, seed=seed).tolist()


def test_a_position_may_be_far_out() -> None:
    """Blocks of more than 32 bits."""
    whole, starts = (1 << 20, 1 << 18), [(1 << 20) - 2, (1 << 18) - 9]
    part = random_words(torch.empty(2, 9), starts, whole, 0, 5, 0, 1)
    far = random_words(torch.empty(1, 9), [(1 << 20) - 1, starts[1]], whole, 0, 5, 0, 1)
    assert torch.equal(part[1:], far) and not torch.equal(part[:1], far)
    mask = keep_mask(torch.empty(2, 9), starts, whole, 1 << 15, 5, 0, 1)
    assert mask.any() and not mask.all()


def test_the_generator_is_philox() -> None:
    """The known answers of Random123."""
    from runtime.kernels.philox import philox

    ones = (0xFFFFFFFF,) * 4
    digits = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox(ones, ones[:2]) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox(digits, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_dropout_scales_what_it_keeps_and_masks_the_gradient_alike() -> None:
    x = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    y = ops.dropout(x, 0.25)
    y.sum().backward()
    assert set(y.detach().unique().tolist()) == {0.0, 1 / 0.75}
    assert x.grad is not None and torch.equal(x.grad, y.detach())
    assert 0.65 < (y != 0).double().mean() < 0.85


def test_the_probability_is_exact_on_average() -> None:
    """Half of a 2^-16 drops in half of the steps at most one in 65,536."""
    ops.seed(0)
    dropped = []
    for draw in range(64):
        dropped.append(int((ops.dropout(torch.ones(1 << 16), 2.0**-17, draw=draw) == 0).sum()))
    assert 0 < sum(dropped) < 64 and dropped.count(0) >= 20


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_distributions_are_what_they_are_called(dtype: torch.dtype) -> None:
    like = torch.full((200, 200), 0.3, dtype=dtype)
    uniform, normal, chances = (function(like).double() for function in (ops.rand_like, ops.randn_like, ops.bernoulli))
    assert uniform.min() >= 0.0 and uniform.max() < 1.0
    assert abs(uniform.mean() - 0.5) < 0.01 and abs(uniform.var() - 1 / 12) < 0.01
    assert abs(normal.mean()) < 0.03 and abs(normal.var() - 1.0) < 0.03
    assert abs(chances.mean() - 0.3) < 0.01
