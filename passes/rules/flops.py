"""Floating point operations of one forward call of the operators that are bound by them (2 per multiply-add)."""

from __future__ import annotations

import math
from collections.abc import Callable

from passes.rules.delta_rule_costs import GATED_DELTA_RULE, DeltaRuleCall
from passes.rules.expert_rules import EXPERTS, experts_flops
from passes.rules.operator_call import OperatorCall


def contraction(call: OperatorCall) -> float:
    """Sums of products: 2 × the product of all factors of the index space, read from the shapes."""
    rows = call.inputs[_FIRST.get(call.node.op, 0)].shape
    return 2.0 * math.prod(call.outputs[0].shape) * rows[-1]


def vector_product(call: OperatorCall) -> float:
    return 2.0 * math.prod(call.inputs[0].shape)


def equation(call: OperatorCall) -> float:
    """``einsum``: every letter is a loop; operands are assumed to be multiplied at once."""
    operand_letters = str(call["equation"]).replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for letters, value in zip(operand_letters, call.inputs):
        if "." in letters:
            return 2.0 * math.prod(call.outputs[0].shape) * call.inputs[0].shape[-1]
        for letter, size in zip(letters, value.shape):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return (2.0 if len(call.inputs) > 1 else 0.0) * math.prod(sizes.values())


def attention(call: OperatorCall) -> float:
    """Scores and their product with the values.

    A causal call counts what its queries see: flash kernels skip the blocks that are hidden. Query i sees keys 0 to i,
    of l queries and k keys l²/2 pairs if l <= k, else k²/2 + (l - k)·k (the half of the diagonal is left out).
    """
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    length, keys = query[-2], key[-2]
    pairs = float(length * keys)
    if call["is_causal"]:
        square = min(length, keys)
        pairs = square * square / 2 + (length - square) * keys
    return 2.0 * math.prod(query[:-2]) * pairs * (query[-1] + value[-1])


def grouped_matmul(call: OperatorCall) -> float:
    """Rows of the left that each meet one matrix of the right; the offsets that say which are not known."""
    left, right = (value.shape for value in call.inputs[:2])
    columns = right[-1]
    return 2.0 * math.prod(left) * columns


def expert_linear(call: OperatorCall) -> float:
    """Each row meets one matrix."""
    return 2.0 * math.prod(call.outputs[0].shape) * call.shape("weight")[2]


def linear_cross_entropy(call: OperatorCall) -> float:
    return 2.0 * math.prod(call.shape("hidden")) * call.shape("weight")[0]


def convolution(call: OperatorCall) -> float:
    weight = call.shape("weight")
    positions = call.inputs[0].shape if "transpose" in call.node.op else call.outputs[0].shape
    batch_and_space = math.prod(positions) // positions[-len(weight) + 1]
    return 2.0 * batch_and_space * math.prod(weight)


def recurrence(call: OperatorCall) -> float:
    """Every weight matrix of the layers (or of a cell) meets every entry of the sequence."""
    matrices = [value.shape for value, slot in zip(call.inputs[1:], call.slots[1:]) if slot != "hx"]
    return 2.0 * math.prod(call.inputs[0].shape[:-1]) * sum(math.prod(shape) for shape in matrices if len(shape) == 2)


def gated_delta_rule(call: OperatorCall) -> float:
    return DeltaRuleCall.of(call.shape("key"), call.shape("value"), call.shape("log_decay")).flops


#: Products backward for each forward, where that is not one for each gradient: the scores and ids of experts take none,
#: the gated delta rule computes its own again.
BACKWARD_PRODUCTS = {EXPERTS: 2, GATED_DELTA_RULE: 3}
#: Which input's last dim is the contraction (the first unless a summand comes before it).
_FIRST = {"aten.addmm.default": 1, "aten.baddbmm.default": 1}

FLOPS: dict[str, Callable[[OperatorCall], float]] = {
    **dict.fromkeys(
        ("aten.linear.default", "aten.matmul.default", "aten.mm.default", "aten.bmm.default", "aten.addmm.default",
         "aten.baddbmm.default"),
        contraction,
    ),
    "aten.addbmm.default": lambda call: 2.0 * math.prod(call.inputs[1].shape) * call.inputs[2].shape[-1],
    **dict.fromkeys(("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"), grouped_matmul),
    "meshwright.expert_linear": expert_linear,
    "meshwright.linear_cross_entropy.default": linear_cross_entropy,
    EXPERTS: experts_flops,
    GATED_DELTA_RULE: gated_delta_rule,
    "aten.mv.default": vector_product,
    "aten.dot.default": vector_product,
    "aten.einsum.default": equation,
    "aten.scaled_dot_product_attention.default": attention,
    **dict.fromkeys(
        (f"aten.conv{dims}d.{overload}" for dims in (1, 2, 3) for overload in ("default", "padding")), convolution
    ),
    **dict.fromkeys(
        (f"aten.{name}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
         for name in (f"{kind}.input", f"{kind}_cell.default")),
        recurrence,
    ),
    "aten.bilinear.default": lambda call: 2.0 * math.prod(call.inputs[0].shape) * math.prod(call.shape("weight")[::2]),
    "aten.conv_transpose1d.default": convolution,
    "aten.conv_transpose2d.input": convolution,
    "aten.conv_transpose3d.input": convolution,
}  # fmt: skip
