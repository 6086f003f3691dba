"""Chained on mesh dp=1, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import torch
import torch.nn.functional as F

from runtime import kernels
from runtime.kernels.language import tl, triton
from runtime.kernels.scalar_math import row_sum, sigmoid
from runtime.kernels.tiles import load, rows_from, share_of_rows, store, store_column_sums, store_rows, whole_tile
from runtime.programs.program import Block


# add, sigmoid, mul, masked_fill, mean
# of gate, pool
def _add_to_mean_plain(hidden, gate_bias, mask):
    gate = hidden + gate_bias
    gating = torch.sigmoid(gate)
    product = gating * hidden
    masked = product.masked_fill(mask, 0.0)
    mean_4 = torch.mean(masked, [-1])
    return masked, mean_4


@triton.jit
def _add_to_mean_forward(
    hidden_ptr, gate_bias_ptr, mask_ptr, masked_ptr, mean_4_ptr, hidden_strides, gate_bias_strides, mask_strides,
    SPACE, TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    hidden = load(hidden_ptr, hidden_strides, rows, columns, exists, SPACE).to(tl.float32)
    gate_bias = load(gate_bias_ptr, gate_bias_strides, rows, columns, exists, SPACE).to(tl.float32)
    mask = load(mask_ptr, mask_strides, rows, columns, exists, SPACE)
    gate = hidden + gate_bias
    gating = sigmoid(gate)
    product = gating * hidden
    masked = tl.where(mask, 0.0, product)
    mean_4 = row_sum(masked, exists) / SPACE[3]
    store(masked_ptr, masked, rows, columns, exists, SPACE)
    store_rows(mean_4_ptr, mean_4, rows, SPACE)


@triton.jit
def _add_to_mean_backward(
    grad_masked_ptr, grad_mean_4_ptr, hidden_ptr, gate_bias_ptr, mask_ptr, grad_hidden_ptr, grad_gate_bias_ptr,
    grad_masked_strides, grad_mean_4_strides, hidden_strides, gate_bias_strides, mask_strides, SPACE,
    TILE: tl.constexpr, SHARES,
):
    first, last, columns = share_of_rows(SPACE, TILE, SHARES)
    grad_gate_bias_total = tl.full(TILE, 0.0, tl.float32)
    for start in range(first, last, TILE[0]):
        rows, exists = rows_from(start, last, columns, SPACE, TILE)
        grad_masked = load(grad_masked_ptr, grad_masked_strides, rows, columns, exists, SPACE).to(tl.float32)
        grad_mean_4 = load(grad_mean_4_ptr, grad_mean_4_strides, rows, columns, exists, SPACE).to(tl.float32)
        hidden = load(hidden_ptr, hidden_strides, rows, columns, exists, SPACE).to(tl.float32)
        gate_bias = load(gate_bias_ptr, gate_bias_strides, rows, columns, exists, SPACE).to(tl.float32)
        mask = load(mask_ptr, mask_strides, rows, columns, exists, SPACE)
        gate = hidden + gate_bias
        gating = sigmoid(gate)
        grad_masked = grad_masked + grad_mean_4 / SPACE[3]
        grad_product = tl.where(mask, 0.0, grad_masked)
        grad_gating = grad_product * hidden
        grad_gate = grad_gating * gating * (1 - gating)
        grad_hidden = grad_product * gating + grad_gate
        store(grad_hidden_ptr, grad_hidden, rows, columns, exists, SPACE)
        grad_gate_bias_total += tl.where(exists, grad_gate, 0.0)
    store_column_sums(grad_gate_bias_ptr, grad_gate_bias_total, columns, SPACE, TILE)


_add_to_mean = kernels.Chain(
    plain=_add_to_mean_plain,
    forward=_add_to_mean_forward,
    inputs={'hidden': 'bfloat16', 'gate_bias': 'bfloat16', 'mask': 'bool'},
    outputs={'masked': 'bfloat16', 'mean_4': 'bfloat16'},
    rows={'mean_4': False},
    columns=1,
    backward=_add_to_mean_backward,
    grads=['masked', 'mean_4'],
    saved=['hidden', 'gate_bias', 'mask'],
    gradients={'hidden': 'full', 'gate_bias': 'row'},
)


# mul, softmax
# of scores
# For torch.compile: softmax is a reduction whose rows are used again.
def _mul_softmax_plain(scores):
    scores_1 = scores * 0.125
    softmax_7 = F.softmax(scores_1, dim=-1)
    return softmax_7


_mul_softmax = kernels.Chain(plain=_mul_softmax_plain, backend="inductor")


class Program(Block):
    def forward(self, hidden, mask):
        w = self.weights
        # hidden: [4, 6, 8]
        # mask: [6, 8]
        masked, mean_4 = _add_to_mean(hidden, w.gate.bias, mask)
        scores = masked @ w.scores.weight
        softmax_7 = _mul_softmax(scores)
        return {"mean_4": mean_4, "softmax_7": softmax_7}
