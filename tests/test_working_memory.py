"""What operators hold while they run, as prices count it, beside what they allocate."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from memory_truth import allocations
from torch.profiler import ProfilerActivity, profile

from passes.autograd import working as counted
from passes.autograd.working import Working, working
from passes.ir.graph import Node, Ref, Value
from runtime.kernels import row_blocks
from runtime.kernels.experts import backward, forward

#: Tokens, experts of a token, experts, and widths of a token and of an inner vector.
TOKENS, CHOSEN, EXPERTS, HIDDEN, INNER = 4096, 2, 8, 128, 192


def peak(events: list[int]) -> int:
    return max(accumulate(events))


def experts_hold(dtype: str, divided: dict[str, int]) -> Working:
    """By the table; each name's bytes divided as said."""
    shapes = {
        "x": (TOKENS, HIDDEN), "ids": (TOKENS, CHOSEN), "scores": (TOKENS, CHOSEN),
        "first": (EXPERTS, 2 * INNER, HIDDEN), "second": (EXPERTS, HIDDEN, INNER),
    }  # fmt: skip
    values = {
        name: Value(name, shape, "int64" if name == "ids" else dtype, requires_grad=name != "ids")
        for name, shape in shapes.items()
    }
    output = Value("y", (TOKENS, HIDDEN), dtype)
    node = Node("y", "meshwright.experts.default", tuple(map(Ref, shapes)), {}, (output,))
    return working(node, values, lambda value: value.num_bytes / divided.get(value.name, 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_hold_what_is_counted(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "BLOCK", 2**16)
    monkeypatch.setattr(counted, "WIDE_BLOCK", 2**16)
    shapes = [(TOKENS, HIDDEN), (TOKENS, CHOSEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)]
    x, scores, first, second = (torch.randn(shape, dtype=getattr(torch, dtype)) for shape in shapes)
    ids = torch.randint(0, EXPERTS, (TOKENS, CHOSEN))
    operands = (x, ids, scores, first, second, None, None)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as of_forward:
        output, hidden = forward(*operands, "swiglu")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as of_backward:
        results = backward(torch.randn_like(x), *operands, hidden, "swiglu", [True] * 4 + [False] * 2)
    holds = experts_hold(dtype, {})
    # 15%: tables of the routing and the float32 copies of other operands are not counted.
    weights = first.nbytes + second.nbytes  # whoever asks counts their gradients, and what experts give
    assert peak(allocations(of_forward)) == pytest.approx(holds.forward + hidden.nbytes, rel=0.15)
    assert peak(allocations(of_backward)) == pytest.approx(holds.backward + weights + x.nbytes, rel=0.15)
    assert output.shape == x.shape and len(results) == 6


def test_experts_divided_over_ranks_hold_a_part_of_each_row() -> None:
    whole = experts_hold("bfloat16", {})
    by_tokens = experts_hold("bfloat16", dict.fromkeys(("x", "ids", "scores"), 4))
    assert by_tokens.forward == whole.forward / 4
    by_inner = experts_hold("bfloat16", {"first": 4, "second": 4})
    rows = 2 * TOKENS * CHOSEN
    assert by_inner.forward == rows * (INNER / 4 + 2 * HIDDEN)
    by_experts = experts_hold("bfloat16", dict.fromkeys(("x", "ids", "scores", "first", "second"), 4))
    assert by_experts.forward == whole.forward / 4


def test_blocks_of_rows_are_as_wide_as_is_counted() -> None:
    assert counted.WIDE_BLOCK == row_blocks.BLOCK


@pytest.mark.parametrize(("heads", "requires_grad"), [(8, True), (8, False), (1, True)])
def test_attention_holds_the_gradient_of_a_bias_of_every_sample(heads: int, requires_grad: bool) -> None:
    query, key, bias = (
        Value("query", (4, 8, 32, 16), "bfloat16", requires_grad=True),
        Value("key", (4, 8, 64, 16), "bfloat16", requires_grad=True),
        Value("bias", (1, heads, 32, 64), "bfloat16", requires_grad=requires_grad),
    )
    output = Value("y", query.shape, "bfloat16")
    args = (Ref("query"), Ref("key"), Ref("key"), Ref("bias"))
    node = Node("y", "aten.scaled_dot_product_attention.default", args, {}, (output,))
    values = {value.name: value for value in (query, key, bias)}
    held = working(node, values, lambda value: float(value.num_bytes)).backward
    assert held == (2 * (4 * 8 - heads) * 32 * 64 if requires_grad else 0.0)
