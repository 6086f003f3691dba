"""TiedClassifier on mesh tp=2, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, P, S

from runtime import kernels, ops
from runtime.kernels.language import tl, triton
from runtime.kernels.scalar_math import tanh
from runtime.kernels.tiles import load, store, whole_tile
from runtime.programs.program import Block


# mul, add, tanh
# of the model itself
def _mul_add_tanh_plain(middle, scale, shift):
    product = middle * scale
    added = product + shift
    activation = torch.tanh(added)
    return activation


@triton.jit
def _mul_add_tanh_forward(
    middle_ptr, scale_ptr, shift_ptr, activation_ptr, middle_strides, scale_strides, shift_strides, SPACE,
    TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    middle = load(middle_ptr, middle_strides, rows, columns, exists, SPACE)
    scale = load(scale_ptr, scale_strides, rows, columns, exists, SPACE)
    shift = load(shift_ptr, shift_strides, rows, columns, exists, SPACE)
    product = middle * scale
    added = product + shift
    activation = tanh(added)
    store(activation_ptr, activation, rows, columns, exists, SPACE)


@triton.jit
def _mul_add_tanh_backward(
    grad_activation_ptr, scale_ptr, activation_ptr, grad_middle_ptr, grad_activation_strides, scale_strides,
    activation_strides, SPACE, TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    grad_activation = load(grad_activation_ptr, grad_activation_strides, rows, columns, exists, SPACE)
    scale = load(scale_ptr, scale_strides, rows, columns, exists, SPACE)
    activation = load(activation_ptr, activation_strides, rows, columns, exists, SPACE)
    grad_added = grad_activation * (1 - activation * activation)
    grad_middle = grad_added * scale
    store(grad_middle_ptr, grad_middle, rows, columns, exists, SPACE)


_mul_add_tanh = kernels.Chain(
    plain=_mul_add_tanh_plain,
    forward=_mul_add_tanh_forward,
    inputs={'middle': 'float32', 'scale': 'float32', 'shift': 'float32'},
    outputs={'activation': 'float32'},
    backward=_mul_add_tanh_backward,
    grads=['activation'],
    saved=['scale', 'activation'],
    gradients={'middle': 'full'},
)


class EmbeddingToMiddle(Block):
    def forward(self, tokens):
        w = self.weights
        # tokens: [8, 6] {tp: R}
        embedding = ops.embedding(tokens, w.embedding.weight, vocabulary=32, axes=("tp",))  # [8, 6, 16] {tp: P}
        embedding = spmd.all_reduce(embedding, "tp", src=P, dst=I)        # 3 KiB
        middle = F.linear(embedding, w.middle.weight, w.middle.bias)
        return middle


class Output(Block):
    def forward(self, middle, labels):
        w = self.weights
        # middle: [8, 6, 16] {tp: I}
        # labels: [8, 6] {tp: R}
        activation = _mul_add_tanh(middle, w.scale, w.shift)
        # output
        embedding_weight = spmd.all_gather(w.embedding.weight, "tp", src=S(0), dst=I)  # 2 KiB
        logits = F.linear(activation, embedding_weight)
        losses = ops.cross_entropy(logits, labels, reuse_logits=True)
        valid = labels != -100
        total = torch.sum(losses)
        count = torch.sum(valid)
        loss = total / count
        return loss


class Program(Block):
    def forward(self, tokens, labels):
        w = self.weights
        # tokens: [8, 6] {tp: R}
        # labels: [8, 6] {tp: R}
        middle = self.unit(EmbeddingToMiddle(w))(tokens)
        loss = self.unit(Output(w))(middle, labels)
        return {"loss": loss}
