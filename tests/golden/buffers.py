"""Counted on mesh dp=2, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, R, S

from runtime import kernels, ops
from runtime.kernels.language import tl, triton
from runtime.kernels.tiles import load, store, whole_tile
from runtime.programs.program import Block


# sub, square
# of the model itself
def _sub_square_plain(activation, mean):
    difference = activation - mean
    square = torch.square(difference)
    return square


@triton.jit
def _sub_square_forward(
    activation_ptr, mean_ptr, square_ptr, difference_ptr, activation_strides, mean_strides, SPACE,
    TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    activation = load(activation_ptr, activation_strides, rows, columns, exists, SPACE)
    mean = load(mean_ptr, mean_strides, rows, columns, exists, SPACE)
    difference = activation - mean
    square = difference * difference
    store(square_ptr, square, rows, columns, exists, SPACE)
    if difference_ptr is not None:
        store(difference_ptr, difference, rows, columns, exists, SPACE)


@triton.jit
def _sub_square_backward(
    grad_square_ptr, difference_ptr, grad_activation_ptr, grad_square_strides, difference_strides, SPACE,
    TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    grad_square = load(grad_square_ptr, grad_square_strides, rows, columns, exists, SPACE)
    difference = load(difference_ptr, difference_strides, rows, columns, exists, SPACE)
    grad_difference = 2 * grad_square * difference
    store(grad_activation_ptr, grad_difference, rows, columns, exists, SPACE)


_sub_square = kernels.Chain(
    plain=_sub_square_plain,
    forward=_sub_square_forward,
    inputs={'activation': 'float32', 'mean': 'float32'},
    outputs={'square': 'float32'},
    backward=_sub_square_backward,
    grads=['square'],
    saved=['difference'],
    extra={'difference': 'float32'},
    gradients={'activation': 'full'},
)


class Linear(Block):
    def forward(self, x):
        w = self.weights
        # x: [8, 8] → [4, 8] {dp: S(0)}
        calls = w.calls + 1                                               # [] {dp: R}
        linear = F.linear(x, w.linear.weight, w.linear.bias)
        activation = torch.tanh(linear)
        activation = spmd.all_gather(activation, "dp", src=S(0), dst=I)   # 256 B
        activation_1 = spmd.convert(activation.detach(), "dp", src=I, dst=R)  # [8, 8] {dp: R}
        mean = torch.mean(activation_1, [0])
        mean = torch.lerp(w.mean, mean, 0.1)
        square = _sub_square(activation, mean)
        loss = torch.mean(square)
        ops.store(w.calls, calls)
        ops.store(w.mean, mean)
        return loss


class Program(Block):
    def forward(self, x):
        w = self.weights
        # x: [8, 8] → [4, 8] {dp: S(0)}
        loss = self.unit(Linear(w))(x)
        return {"": loss}
