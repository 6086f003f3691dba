"""Random operators: copies of a tensor draw alike, its shards draw apart, and a seed brings the numbers back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import spmd_types as spmd
import torch
from rules_harness import RANKS, Sample, check_types, distribute, evaluate, fake_mesh, local_call, make_case
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh

from passes.emit.expressions import expression
from passes.rules import rule_for
from passes.rules.rule import axis_choices
from runtime import ops

#: A dim sharded on mesh axis ``a`` alone: ranks 0, 1 hold the first half, ranks 2, 3 the second.
HALVES = ((0, 1), (2, 3))
CALLS = {
    "aten.dropout.default": (0.5, True),
    "aten.rand_like.default": (),
    "aten.randn_like.default": (),
    "aten.bernoulli.default": (),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as made:
        yield made


def drawn(mesh: DeviceMesh, op: str, *, seed: int) -> dict[int, torch.Tensor]:
    """What each of four ranks draws for a tensor of halves, its first dim cut on mesh axis ``a``."""
    case = make_case(Sample(op, (torch.full((4, 64), 0.5, dtype=torch.float64), *CALLS[op]), {}))
    rule = rule_for(case.node, case.values)
    assert rule is not None
    choices = axis_choices(rule, input_grads=case.grads, output_grads=case.out_grads)
    cut = next(choice for choice in choices if "S(0)" in choice.inputs)
    call = local_call(case, rule, (cut, choices[0]))
    source = expression(call)
    check_types(mesh, case, call, source)
    ops.seed(seed)
    with LocalTensorMode(RANKS), spmd.set_current_mesh(mesh):
        x = LocalTensor(distribute(case.tensors[0].detach(), call.inputs[0].placement))
        (output,) = evaluate(source, {"t0": x})
    return {rank: output._local_tensors[rank].detach() for rank in range(RANKS)}


@pytest.mark.parametrize("op", CALLS)
def test_copies_draw_alike_and_shards_apart(op: str, mesh: DeviceMesh) -> None:
    found = drawn(mesh, op, seed=1)
    for one, other in HALVES:
        assert torch.equal(found[one], found[other])
    assert not torch.equal(found[HALVES[0][0]], found[HALVES[1][0]])


@pytest.mark.parametrize("op", CALLS)
def test_a_seed_brings_the_numbers_back(op: str, mesh: DeviceMesh) -> None:
    first, again, others = (drawn(mesh, op, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], others[0])


def test_dropout_scales_what_it_keeps_and_masks_the_gradient_alike() -> None:
    x = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    y = ops.dropout(x, 0.25)
    y.sum().backward()
    assert set(y.detach().unique().tolist()) == {0.0, 1 / 0.75}
    assert x.grad is not None and torch.equal(x.grad, y.detach())
    assert 0.65 < (y != 0).double().mean() < 0.85
