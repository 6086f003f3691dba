"""Images on mesh dp=2,cp=1,tp=1, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, P, R, S, V

from runtime import kernels, ops
from runtime.kernels.language import tl, triton
from runtime.kernels.tiles import load, store, whole_tile
from runtime.programs.program import Block


# sub, mul
# of stem.1
def _sub_mul_plain(stem, mean):
    difference = stem - mean
    product = difference * difference
    return difference, product


@triton.jit
def _sub_mul_forward(
    stem_ptr, mean_ptr, difference_ptr, product_ptr, stem_strides, mean_strides, SPACE, TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    stem = load(stem_ptr, stem_strides, rows, columns, exists, SPACE)
    mean = load(mean_ptr, mean_strides, rows, columns, exists, SPACE)
    difference = stem - mean
    product = difference * difference
    store(difference_ptr, difference, rows, columns, exists, SPACE)
    store(product_ptr, product, rows, columns, exists, SPACE)


@triton.jit
def _sub_mul_backward(
    grad_difference_ptr, grad_product_ptr, difference_ptr, grad_stem_ptr, grad_mean_ptr, grad_difference_strides,
    grad_product_strides, difference_strides, SPACE, TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    grad_difference = load(grad_difference_ptr, grad_difference_strides, rows, columns, exists, SPACE)
    grad_product = load(grad_product_ptr, grad_product_strides, rows, columns, exists, SPACE)
    difference = load(difference_ptr, difference_strides, rows, columns, exists, SPACE)
    grad_difference = grad_difference + grad_product * difference + grad_product * difference
    grad_mean = -grad_difference
    store(grad_stem_ptr, grad_difference, rows, columns, exists, SPACE)
    store(grad_mean_ptr, grad_mean, rows, columns, exists, SPACE)


_sub_mul = kernels.Chain(
    plain=_sub_mul_plain,
    forward=_sub_mul_forward,
    inputs={'stem': 'float32', 'mean': 'float32'},
    outputs={'difference': 'float32', 'product': 'float32'},
    columns=1,
    backward=_sub_mul_backward,
    grads=['difference', 'product'],
    saved=['difference'],
    gradients={'stem': 'full', 'mean': 'other'},
)


# add, rsqrt
# of stem.1
def _add_rsqrt_plain(mean):
    added = mean + 1e-05
    inverse_root = torch.rsqrt(added)
    return inverse_root


@triton.jit
def _add_rsqrt_forward(mean_ptr, inverse_root_ptr, mean_strides, SPACE, TILE: tl.constexpr):
    rows, columns, exists = whole_tile(SPACE, TILE)
    mean = load(mean_ptr, mean_strides, rows, columns, exists, SPACE)
    added = mean + 1e-05
    inverse_root = tl.rsqrt(added)
    store(inverse_root_ptr, inverse_root, rows, columns, exists, SPACE)


@triton.jit
def _add_rsqrt_backward(
    grad_inverse_root_ptr, mean_ptr, grad_mean_ptr, grad_inverse_root_strides, mean_strides, SPACE,
    TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    grad_inverse_root = load(grad_inverse_root_ptr, grad_inverse_root_strides, rows, columns, exists, SPACE)
    mean = load(mean_ptr, mean_strides, rows, columns, exists, SPACE)
    added = mean + 1e-05
    inverse_root = tl.rsqrt(added)
    grad_added = -0.5 * grad_inverse_root * inverse_root * inverse_root * inverse_root
    store(grad_mean_ptr, grad_added, rows, columns, exists, SPACE)


_add_rsqrt = kernels.Chain(
    plain=_add_rsqrt_plain,
    forward=_add_rsqrt_forward,
    inputs={'mean': 'float32'},
    outputs={'inverse_root': 'float32'},
    backward=_add_rsqrt_backward,
    grads=['inverse_root'],
    saved=['mean'],
    gradients={'mean': 'full'},
)


# mul, add
# of stem.1
def _mul_add_plain(running_mean, product):
    stem = running_mean * 0.9
    running_mean_1 = stem + product
    return running_mean_1


@triton.jit
def _mul_add_forward(
    running_mean_ptr, product_ptr, running_mean_1_ptr, running_mean_strides, product_strides, SPACE,
    TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    running_mean = load(running_mean_ptr, running_mean_strides, rows, columns, exists, SPACE)
    product = load(product_ptr, product_strides, rows, columns, exists, SPACE)
    stem = running_mean * 0.9
    running_mean_1 = stem + product
    store(running_mean_1_ptr, running_mean_1, rows, columns, exists, SPACE)


_mul_add = kernels.Chain(
    plain=_mul_add_plain,
    forward=_mul_add_forward,
    inputs={'running_mean': 'float32', 'product': 'float32'},
    outputs={'running_mean_1': 'float32'},
)


# mul, mul, add, relu
# of stem.1, stem.2
def _mul_mul_add_relu_plain(difference, inverse_root, stem_weight, stem_bias):
    product = difference * inverse_root
    stem = product * stem_weight
    stem_1 = stem + stem_bias
    activation = F.relu(stem_1)
    return activation


@triton.jit
def _mul_mul_add_relu_forward(
    difference_ptr, inverse_root_ptr, stem_weight_ptr, stem_bias_ptr, activation_ptr, difference_strides,
    inverse_root_strides, stem_weight_strides, stem_bias_strides, SPACE, TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    difference = load(difference_ptr, difference_strides, rows, columns, exists, SPACE)
    inverse_root = load(inverse_root_ptr, inverse_root_strides, rows, columns, exists, SPACE)
    stem_weight = load(stem_weight_ptr, stem_weight_strides, rows, columns, exists, SPACE)
    stem_bias = load(stem_bias_ptr, stem_bias_strides, rows, columns, exists, SPACE)
    product = difference * inverse_root
    stem = product * stem_weight
    stem_1 = stem + stem_bias
    activation = tl.where(stem_1 <= 0, 0, stem_1)
    store(activation_ptr, activation, rows, columns, exists, SPACE)


@triton.jit
def _mul_mul_add_relu_backward(
    grad_activation_ptr, difference_ptr, inverse_root_ptr, stem_weight_ptr, stem_bias_ptr, grad_difference_ptr,
    grad_inverse_root_ptr, grad_stem_weight_ptr, grad_stem_bias_ptr, grad_activation_strides, difference_strides,
    inverse_root_strides, stem_weight_strides, stem_bias_strides, SPACE, TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    grad_activation = load(grad_activation_ptr, grad_activation_strides, rows, columns, exists, SPACE)
    difference = load(difference_ptr, difference_strides, rows, columns, exists, SPACE)
    inverse_root = load(inverse_root_ptr, inverse_root_strides, rows, columns, exists, SPACE)
    stem_weight = load(stem_weight_ptr, stem_weight_strides, rows, columns, exists, SPACE)
    stem_bias = load(stem_bias_ptr, stem_bias_strides, rows, columns, exists, SPACE)
    product = difference * inverse_root
    stem = product * stem_weight
    stem_1 = stem + stem_bias
    activation = tl.where(stem_1 <= 0, 0, stem_1)
    grad_stem_1 = tl.where(activation <= 0, 0.0, grad_activation)
    grad_product = grad_stem_1 * stem_weight
    grad_difference = grad_product * inverse_root
    grad_inverse_root = grad_product * difference
    grad_stem_weight = grad_stem_1 * product
    store(grad_difference_ptr, grad_difference, rows, columns, exists, SPACE)
    store(grad_inverse_root_ptr, grad_inverse_root, rows, columns, exists, SPACE)
    store(grad_stem_weight_ptr, grad_stem_weight, rows, columns, exists, SPACE)
    store(grad_stem_bias_ptr, grad_stem_1, rows, columns, exists, SPACE)


_mul_mul_add_relu = kernels.Chain(
    plain=_mul_mul_add_relu_plain,
    forward=_mul_mul_add_relu_forward,
    inputs={'difference': 'float32', 'inverse_root': 'float32', 'stem_weight': 'float32', 'stem_bias': 'float32'},
    outputs={'activation': 'float32'},
    columns=1,
    backward=_mul_mul_add_relu_backward,
    grads=['activation'],
    saved=['difference', 'inverse_root', 'stem_weight', 'stem_bias'],
    gradients={'difference': 'full', 'inverse_root': 'other', 'stem_weight': 'other', 'stem_bias': 'other'},
)


class Stem0(Block):
    def forward(self, images):
        w = self.weights
        # images: [8, 3, 8, 8] → [4, 3, 8, 8] {dp: S(0)}
        stem = F.conv2d(images, w.stem[0].weight, w.stem[0].bias, [1, 1], [1, 1])
        return stem


class Stem1ToBody(Block):
    def forward(self, stem):
        w = self.weights
        # stem: [8, 8, 8, 8] → [4, 8, 8, 8] {dp: S(0)}
        num_batches_tracked = w.stem[1].num_batches_tracked + 1           # [] {dp: R}
        mean = spmd.reinterpret(torch.sum(stem, [0, 2, 3], True) / 512, "dp", src=V, dst=P)  # [1, 8, 1, 1] {dp: P}
        replicated_mean = spmd.all_reduce(mean, "dp", src=P, dst=R)       # 32 B
        difference, product = _sub_mul(stem, replicated_mean)
        mean_1 = spmd.reinterpret(torch.sum(product, [0, 2, 3], True) / 512, "dp", src=V, dst=P)  # [1, 8, 1, 1] {dp: P}
        local_mean_1 = spmd.reduce_scatter(mean_1, "dp", src=P, dst=S(1))  # 32 B, backward all-gather
        inverse_root = _add_rsqrt(local_mean_1)
        inverse_root = spmd.all_gather(inverse_root, "dp", src=S(1), dst=R)  # 32 B, backward reduce-scatter
        stem_weight = w.stem[1].weight.reshape(1, 8, 1, 1)                # [1, 8, 1, 1] {dp: R}
        stem_bias = w.stem[1].bias.reshape(1, 8, 1, 1)                    # [1, 8, 1, 1] {dp: R}
        mean = mean.detach().reshape(8)
        product = mean * 0.1
        product = spmd.all_reduce(product, "dp", src=P, dst=R)            # 32 B
        running_mean = _mul_add(w.stem[1].running_mean, product)
        mean = mean_1.detach().reshape(8)
        product = mean * 0.10019569471624266
        product = spmd.all_reduce(product, "dp", src=P, dst=R)            # 32 B
        running_var = _mul_add(w.stem[1].running_var, product)
        activation = _mul_mul_add_relu(difference, inverse_root, stem_weight, stem_bias)
        pooled = F.max_pool2d(activation, [2, 2], [2, 2])
        body = F.conv2d(pooled, w.body.weight, w.body.bias, [1, 1], [0, 0], [1, 1], 2)
        ops.store(w.stem[1].num_batches_tracked, num_batches_tracked)
        ops.store(w.stem[1].running_mean, running_mean)
        ops.store(w.stem[1].running_var, running_var)
        return body


class Head(Block):
    def forward(self, body):
        w = self.weights
        # body: [8, 16, 2, 2] → [4, 16, 2, 2] {dp: S(0)}
        activation = F.relu(body)
        pooled = F.adaptive_avg_pool2d(activation, [1, 1]).reshape(4, 16)
        head = F.linear(pooled, w.head.weight, w.head.bias)
        square = torch.square(head)
        loss = spmd.reinterpret(torch.sum(square) / 80, "dp", src=V, dst=P)  # [] {dp: P}
        loss = spmd.all_reduce(loss, "dp", src=P, dst=I)                  # 4 B
        return loss


class Program(Block):
    def forward(self, images):
        w = self.weights
        # images: [8, 3, 8, 8] → [4, 3, 8, 8] {dp: S(0)}
        stem = self.unit(Stem0(w))(images)
        body = self.unit(Stem1ToBody(w))(stem)
        loss = self.unit(Head(w))(body)
        return {"": loss}
