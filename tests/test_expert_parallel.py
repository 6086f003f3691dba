"""Experts of a mixture: the operator against one token at a time, and its plans on real processes."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from runtime import kernels
from runtime.kernels.expert_activations import ACTIVATIONS
from tests.ranks import run_on_ranks

EXPERTS = "*:meshwright.experts*"
#: Meshes of axes that are given, what each axis cuts, and the model.
CASES: list[dict[str, Any]] = [
    {"mesh": "e=4", "options": {"constraints": {EXPERTS: {"e": "cut p0"}}}, "model": {"biases": True}},
    {"mesh": "e=4", "options": {"constraints": {EXPERTS: {"e": "cut p0"}}}, "model": {"k": 1}, "nobody": True},
]
#: With a second axis.
BESIDE: list[dict[str, Any]] = [
    {"mesh": "e=2,tp=2", "options": {"constraints": {EXPERTS: {"e": "cut p0", "tp": cut}}}, "model": model}
    for cut, model in (
        ("cut e", {"biases": True}),
        ("cut f", {"biases": True}),
        ("cut f", {"biases": True, "activation": "swiglu_clamped"}),
    )
]

#: Two chunks, of which one has the first layer, whose experts are balanced by a bias and by a loss.
BALANCED: dict[str, Any] = {
    "mesh": "ep=2,pp=2",
    "options": {"fix": {"num_microbatches": 2}},
    "model": {"balanced": True, "balance_loss": 0.1},
}
FOUR_RANKS: dict[str, Any] = {"mesh": "ep=4", "options": {"fix": {"zero": 0, "num_microbatches": 2}}, "model": {}}
#: Whole steps with an axis of experts: ZeRO over dp and ep, that of experts over dp alone.
STEPS: list[dict[str, Any]] = [
    {
        "mesh": mesh,
        "options": {"fix": fix},
        "model": {"balance_loss": 0.1} if "recompute" in fix else {},
        "evaluated": mesh == "ep=2,tp=2",
    }
    for mesh, fix in (
        ("dp=2,ep=2", {"zero": 1}),
        ("dp=2,ep=2", {"zero": 3, "num_microbatches": 2, "recompute": "full"}),
        ("ep=2,tp=2", {"zero": 2}),
        # On the ranks the axis of experts is the inner one, in programs that of the context.
        ("ep=2,cp=2", {"zero": 3}),
    )
]
#: Loops over modules, all of whose tokens are alike in some batches.
LOOPED: list[dict[str, Any]] = [
    {"mesh": mesh, "options": {"fix": fix}, "family": family, "by_calls": by_calls, "batches": batches}
    for mesh, family, fix, by_calls, batches in (
        ("dp=2,ep=2", "steady loop", {"zero": 1}, False, [[False], [True], [True, False]]),
        ("dp=4", "dropping loops", {"zero": 3}, True, [[False], [True], [True, False]]),
        ("dp=2,pp=2", "loops", {"num_microbatches": 2}, True, [[False], [True], [True]]),
    )
]
EVERY = [*CASES, *BESIDE, *STEPS, BALANCED, FOUR_RANKS]


@functools.cache
def trained() -> list[dict[str, Any]]:
    return run_on_ranks("experts_worker", 4, [*EVERY, *LOOPED])


NAMES = [f"{case['mesh']} {case['options']} {case['model']}" for case in EVERY]


@pytest.mark.parametrize("index", range(len(EVERY)), ids=NAMES)
def test_experts_on_several_ranks_train_as_one_device_does(index: int) -> None:
    """Loss, gradients, weights, and how many tokens each expert gets."""
    result = trained()[index]
    assert result["error"] < 1e-9, result["worst"]


@pytest.mark.parametrize("index", range(len(LOOPED)), ids=[f"{case['mesh']} {case['family']}" for case in LOOPED])
def test_experts_without_tokens_have_no_gradient_as_on_one_device(index: int) -> None:
    """Weight decay and momentum leave them alone; those that any batch since ``zero_grad`` chose have one."""
    result = trained()[len(EVERY) + index]
    assert result["without"] and not result["differing"]
    assert result["error"] < 1e-9, result["worst"]


def test_a_layer_with_experts_cut_sends_its_tokens_four_times_and_reduces_its_gradients_once() -> None:
    """Two layers, two micro-batches; 48 tokens with 2 experts each, 16 entries of 8 bytes; four experts."""
    result = trained()[EVERY.index(FOUR_RANKS)]
    tokens, counts = 48 * 2 * 16 * 8, 4 * 4 * 8  # every rank tells every expert's count
    layer, ends = (16 + 16 + 4 * 16) * 8, 32 * 16 * 8  # norm and router; embedding, output
    expected = {
        ("all_to_all", "forward"): [2 * 2 * 2, 2 * 2 * tokens],
        ("all_to_all", "backward"): [2 * 2 * 2, 2 * 2 * tokens],
        ("all_gather", "forward"): [2 * 2, 2 * 2 * counts],
        ("all_reduce", "backward"): [2 + 2, 2 * layer + 2 * ends],
        ("all_reduce", "forward"): [2 * 2, 2 * 2 * 8],  # numbers of labels, losses
    }
    assert {(kind, phase): [*figures] for kind, _, phase, *figures in result["planned"]} == expected
    sent = {key: [0.0, 0.0] for key in expected}
    for kind, _, phase, count, num_bytes in itertools.chain(*result["counted"]):
        sent[kind, phase][0] += count / 4
        sent[kind, phase][1] += num_bytes / 4  # as if all ranks sent as much as this one
    assert sent == expected


def test_tokens_are_counted_before_the_step_by_a_pass_that_the_plan_knows() -> None:
    """A load-balancing loss in two micro-batches, in a pipeline (what stages send each other is not counted here)."""
    result = trained()[EVERY.index(BALANCED)]
    sent: dict[tuple[str, ...], list[float]] = {}
    for kind, axis, phase, *figures in itertools.chain(*result["counted"]):
        sums = sent.setdefault((kind, axis, phase), [0.0, 0.0])
        sums[:] = (total + figure / 2 for total, figure in zip(sums, figures))  # two ranks have each stage
    assert {(kind, axis, phase): figures for kind, axis, phase, *figures in result["planned"] if axis != "pp"} == sent


def test_groups_of_one_unit_are_gathered_once_for_what_runs_again() -> None:
    """ZeRO 3 gathers experts over dp, the rest of a layer over dp and ep: forward, for the tokens' count, and again."""
    planned, counted = sent_by(STEPS[1])
    assert planned == counted


def test_ranks_that_hold_other_experts_send_the_tokens_of_their_own() -> None:
    """Experts cut by both axes, tokens by one: half of the rows for each group of that axis."""
    planned, counted = sent_by(BESIDE[0], "all_to_all")
    assert planned == counted


def sent_by(case: dict[str, Any], kind: str = "all_gather") -> list[dict[tuple[str, ...], list[float]]]:
    """Number and bytes of what a case sends of one kind: as planned, and on the mean of its ranks."""
    result = trained()[EVERY.index(case)]
    sums: list[dict[tuple[str, ...], list[float]]] = []
    for entries, weight in ((result["planned"], 1.0), (itertools.chain(*result["counted"]), 0.25)):
        sums.append({})
        for name, axis, phase, *figures in entries:
            if name == kind:
                before = sums[-1].get((axis, phase), [0.0, 0.0])
                sums[-1][axis, phase] = [total + weight * figure for total, figure in zip(before, figures)]
    return sums


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_experts_are_a_sum_over_experts_of_every_token(activation: str) -> None:
    """Some ids are no expert's; values and gradients, with biases."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul_(2.0).requires_grad_()

    kind = ACTIVATIONS[activation]
    x, scores, down, down_bias = drawn(2, 3, 6), drawn(2, 3, 2), drawn(4, 6, 5), drawn(4, 6)
    gate_up, gate_up_bias = drawn(4, 5 * kind.halves, 6), drawn(4, 5 * kind.halves)
    ids = torch.tensor([[[0, 1], [3, -1], [1, 1]], [[0, 4], [3, 0], [1, 3]]])
    outputs = kernels.experts(x, ids, scores, gate_up, down, gate_up_bias, down_bias, activation)
    expected = torch.zeros_like(x)
    for b, t, j in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(2)).tolist():
        e = int(ids[b, t, j])
        if 0 <= e < 4:
            inner = kind.definition(gate_up[e] @ x[b, t] + gate_up_bias[e])
            update = torch.zeros_like(x).index_put(
                (torch.tensor(b), torch.tensor(t)), scores[b, t, j] * (down[e] @ inner + down_bias[e])
            )
            expected = expected + update
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    leaves = [x, scores, gate_up, down, gate_up_bias, down_bias]
    gradients, expected_gradients = (torch.autograd.grad(each.square().sum(), leaves) for each in (outputs, expected))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-10, atol=1e-10)


def test_operands_that_do_not_fit_are_refused() -> None:
    x, ids, scores = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"down is \[2, 4, 6\], expected \[2, 4, 3\] with 'swiglu'"):
        kernels.experts(x, ids, scores, torch.zeros(2, 6, 4), torch.zeros(2, 4, 6))
    with pytest.raises(ValueError, match="unknown activation 'swish'"):
        kernels.experts(x, ids, scores, torch.zeros(2, 6, 4), torch.zeros(2, 4, 3), activation="swish")
