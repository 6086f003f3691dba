"""Experts on mesh tp=2, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, R, S

from runtime import kernels
from runtime.kernels.language import tl, triton
from runtime.kernels.tiles import load, store, whole_tile
from runtime.programs.program import Block


# to, mul
# of the model itself
def _to_mul_plain(one_hot, probabilities):
    one_hot_1 = one_hot.to(torch.float32)
    product = one_hot_1 * probabilities
    return product


@triton.jit
def _to_mul_forward(
    one_hot_ptr, probabilities_ptr, product_ptr, one_hot_1_ptr, one_hot_strides, probabilities_strides, SPACE,
    TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    one_hot = load(one_hot_ptr, one_hot_strides, rows, columns, exists, SPACE)
    probabilities = load(probabilities_ptr, probabilities_strides, rows, columns, exists, SPACE)
    one_hot_1 = one_hot.to(tl.float32)
    product = one_hot_1 * probabilities
    store(product_ptr, product, rows, columns, exists, SPACE)
    if one_hot_1_ptr is not None:
        store(one_hot_1_ptr, one_hot_1, rows, columns, exists, SPACE)


@triton.jit
def _to_mul_backward(
    grad_product_ptr, one_hot_1_ptr, grad_probabilities_ptr, grad_product_strides, one_hot_1_strides, SPACE,
    TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    grad_product = load(grad_product_ptr, grad_product_strides, rows, columns, exists, SPACE)
    one_hot_1 = load(one_hot_1_ptr, one_hot_1_strides, rows, columns, exists, SPACE)
    grad_probabilities = grad_product * one_hot_1
    store(grad_probabilities_ptr, grad_probabilities, rows, columns, exists, SPACE)


_to_mul = kernels.Chain(
    plain=_to_mul_plain,
    forward=_to_mul_forward,
    inputs={'one_hot': 'int64', 'probabilities': 'float32'},
    outputs={'product': 'float32'},
    backward=_to_mul_backward,
    grads=['product'],
    saved=['one_hot_1'],
    extra={'one_hot_1': 'float32'},
    gradients={'probabilities': 'full'},
)


# add, square
# of the model itself
def _add_square_plain(x, product):
    x_1 = x + product
    square = torch.square(x_1)
    return square


@triton.jit
def _add_square_forward(
    x_ptr, product_ptr, square_ptr, x_1_ptr, x_strides, product_strides, SPACE, TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    x = load(x_ptr, x_strides, rows, columns, exists, SPACE)
    product = load(product_ptr, product_strides, rows, columns, exists, SPACE)
    x_1 = x + product
    square = x_1 * x_1
    store(square_ptr, square, rows, columns, exists, SPACE)
    if x_1_ptr is not None:
        store(x_1_ptr, x_1, rows, columns, exists, SPACE)


@triton.jit
def _add_square_backward(
    grad_square_ptr, x_1_ptr, grad_product_ptr, grad_square_strides, x_1_strides, SPACE, TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    grad_square = load(grad_square_ptr, grad_square_strides, rows, columns, exists, SPACE)
    x_1 = load(x_1_ptr, x_1_strides, rows, columns, exists, SPACE)
    grad_x_1 = 2 * grad_square * x_1
    store(grad_product_ptr, grad_x_1, rows, columns, exists, SPACE)


_add_square = kernels.Chain(
    plain=_add_square_plain,
    forward=_add_square_forward,
    inputs={'x': 'float32', 'product': 'float32'},
    outputs={'square': 'float32'},
    backward=_add_square_backward,
    grads=['square'],
    saved=['x_1'],
    extra={'x_1': 'float32'},
    gradients={'product': 'full'},
)


class Router(Block):
    def forward(self, x):
        w = self.weights
        # x: [8, 4, 8] {tp: R}
        router = F.linear(x, w.router.weight)                             # [8, 4, 4] {tp: I}
        return router


class Rest(Block):
    def forward(self, router, x):
        w = self.weights
        # router: [8, 4, 4] {tp: I}
        # x: [8, 4, 8] {tp: R}
        probabilities = F.softmax(router, dim=2)
        largest_index = spmd.convert(torch.argmax(probabilities, 2), "tp", src=I, dst=R)  # [8, 4] {tp: R}
        one_hot = F.one_hot(largest_index, 4)
        product = _to_mul(one_hot, probabilities)                         # [8, 4, 4] {tp: I}
        product_1 = torch.einsum('bsd,edh->besh', x, w.up)                # [8, 4, 4, 16] → [8, 2, 4, 16] {tp: S(1)}
        activation = F.gelu(product_1)
        product_1 = torch.einsum('besh,ehd->besd', activation, w.down)
        product_1 = spmd.all_gather(product_1, "tp", src=S(1), dst=I)     # 4 KiB
        product = torch.einsum('besd,bse->bsd', product_1, product)
        square = _add_square(x, product)                                  # [8, 4, 8] {tp: I}
        loss = torch.mean(square)
        return loss


class Program(Block):
    def forward(self, x):
        w = self.weights
        # x: [8, 4, 8] {tp: R}
        router = self.unit(Router(w))(x)
        loss = self.unit(Rest(w))(router, x)
        return {"": loss}
