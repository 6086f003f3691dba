"""What kind of kernel an operator runs, for its efficiency: the rows of the cost model's curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cost_models.efficiency import ANY_ROWS
from passes.ir.graph import Node
from passes.rules.delta_rule_costs import GATED_DELTA_RULE, DeltaRuleCall

MATMUL, ATTENTION, CONVOLUTION, NORM = "matmul", "attention", "convolution", "norm"
ELEMENTWISE, REDUCTION, GATHER, COPY = "elementwise", "reduction", "gather", "copy"
#: Operators that this project fuses, which a processor runs as several.
FUSED_ELEMENTWISE, FUSED_NORM = "fused_elementwise", "fused_norm"

#: Operators (without overload) by kind; what is not listed is elementwise.
_OPERATORS: dict[str, str] = {
    MATMUL: "linear matmul mm bmm addmm baddbmm addbmm mv dot einsum",
    ATTENTION: "scaled_dot_product_attention",
    CONVOLUTION: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    NORM: "layer_norm rms_norm group_norm batch_norm instance_norm native_layer_norm softmax _softmax log_softmax",
    REDUCTION: "sum mean amax amin max min prod var std var_mean logsumexp argmax argmin any all norm cumsum cumprod",
    GATHER: "embedding index index_select gather scatter scatter_add index_add index_put",
    COPY: "cat stack clone contiguous pad constant_pad_nd roll flip repeat repeat_interleave to _to_copy",
}
KINDS: dict[str, str] = {f"aten.{name}": kind for kind, names in _OPERATORS.items() for name in names.split()}
_FUSED: dict[str, str] = {
    FUSED_NORM: "cross_entropy rms_norm layer_norm add_rms_norm add_layer_norm",
    FUSED_ELEMENTWISE: "swiglu geglu bias_gelu rotary rotary_pair",
    GATHER: "embedding",
    MATMUL: "linear_cross_entropy expert_linear experts gated_delta_rule",
}
KINDS.update((f"meshwright.{name}", kind) for kind, names in _FUSED.items() for name in names.split())


def kind_of(node: Node) -> str:
    """The kind of ``node``, one of the names above."""
    namespace, _, rest = node.op.partition(".")
    return KINDS.get(f"{namespace}.{rest.split('.')[0]}", ELEMENTWISE)


def matmul_shape(node: Node, inputs: Sequence[tuple[int, ...]], output: tuple[int, ...]) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of a matrix product from the local shapes of its operands and its output.

    An operand with a batch of its own makes ``batch``; a plain weight makes one large product of all rows.
    """
    if node.op == "meshwright.linear_cross_entropy.default":
        classes, width = inputs[1]
        return 1, math.prod(inputs[0][:-1]), classes, width
    if node.op == "meshwright.expert_linear":
        experts, outside, inside = inputs[2]
        rows = math.prod(output[:-1])
        groups = max(1, min(experts, rows))
        return groups, max(1, rows // groups), outside, inside
    if node.op == GATED_DELTA_RULE:
        call = DeltaRuleCall.of(inputs[1], inputs[2], inputs[3])
        return round(call.heads) * call.num_chunks, call.chunk, call.values, call.keys
    by_letters = _einsum_shape(node, inputs)
    if by_letters is not None:
        return by_letters
    matrices = [shape for shape in inputs if len(shape) >= 2] or [(1, 1)]
    first = matrices[1] if node.op.startswith(("aten.addmm", "aten.baddbmm")) and len(matrices) > 2 else matrices[0]
    weights = [shape for shape in matrices if len(shape) == 2]
    n = output[-1] if output else 1
    rows = math.prod(output) // max(1, n)
    if weights or len(output) < 3:
        return 1, rows, n, first[-1]
    batch = math.prod(output[:-2])
    return batch, rows // max(1, batch), n, first[-1]


def row_step(shape: tuple[int, int, int, int]) -> int:
    """The largest power of two, up to ``ANY_ROWS``, that divides the elements of every row of a product's matrices.

    Rows are n or k long in a product (batch, m, n, k) and in those of its backward, never m: samples and positions. One
    element is no row.
    """
    return math.gcd(ANY_ROWS, *(length for length in shape[2:] if length > 1))


def _einsum_shape(node: Node, inputs: Sequence[tuple[int, ...]]) -> tuple[int, int, int, int] | None:
    """The same of an einsum of two operands: what both and the result have, one of them and the result, both alone."""
    equation = node.args[0] if node.op == "aten.einsum.default" else None
    left, arrow, result = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    operands = left.split(",")
    if not arrow or len(operands) != 2 or len(inputs) != 2 or "." in left:
        return None
    sizes = {letter: size for letters, shape in zip(operands, inputs) for letter, size in zip(letters, shape)}
    first, second, output = set(operands[0]), set(operands[1]), set(result)
    groups = (
        (first & second & output),
        (first & output) - second,
        (second & output) - first,
        (first & second) - output,
    )
    batch, m, n, k = (math.prod(sizes[letter] for letter in group) for group in groups)
    return batch, m, n, k
