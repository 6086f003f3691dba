"""Mlp on mesh dp=2,tp=2, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import math

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, P, R, S, V

from runtime import ops
from runtime.program import Block


class Mlp(Block):  # layers.{1..3}
    def forward(self, x):
        w = self.weights
        # x: [4, 8] → [2, 4] {dp: S(0), tp: S(1)}
        x = spmd.all_gather(x, "tp", src=S(1), dst=R)                             # all-gather, backward reduce-scatter: 128 B
        # up
        up_weight = spmd.convert(w.up.weight, "dp", src=I, dst=R)                 # backward all-reduce: 1 KiB
        up_bias = spmd.convert(w.up.bias, "dp", src=I, dst=R)                     # backward all-reduce: 128 B
        up = F.linear(x, up_weight, up_bias)                                      # [4, 32] → [2, 16] {dp: S(0), tp: S(1)}
        gelu = F.gelu(up)
        # down
        down_weight = spmd.all_gather(w.down.weight, "dp", src=S(0), dst=R)       # all-gather, backward reduce-scatter: 1 KiB
        down_bias = spmd.convert(w.down.bias, "dp", src=I, dst=R)                 # backward all-reduce: 64 B
        down_bias = spmd.convert(down_bias, "tp", src=I, dst=P, expert_mode=True)
        down = spmd.reinterpret(F.linear(gelu, down_weight), "tp", src=V, dst=P) + down_bias  # [4, 8] → [2, 8] {dp: S(0), tp: P}
        return down


class Program(Block):
    def forward(self, x):
        w = self.weights
        # x: [4, 8] → [2, 8] {dp: S(0), tp: R}
        # layers.0.up
        up_weight = spmd.convert(w.layers[0].up.weight, "dp", src=I, dst=R)       # backward all-reduce: 1 KiB
        up_bias = spmd.convert(w.layers[0].up.bias, "dp", src=I, dst=R)           # backward all-reduce: 128 B
        up = F.linear(x, up_weight, up_bias)                                      # [4, 32] → [2, 16] {dp: S(0), tp: S(1)}
        # layers.0
        gelu = F.gelu(up)
        # layers.0.down
        down_weight = spmd.all_gather(w.layers[0].down.weight, "dp", src=S(0), dst=R)  # all-gather, backward reduce-scatter: 1 KiB
        down_bias = spmd.convert(w.layers[0].down.bias, "dp", src=I, dst=R)       # backward all-reduce: 64 B
        down_bias = spmd.convert(down_bias, "tp", src=I, dst=P, expert_mode=True)
        down = spmd.reinterpret(F.linear(gelu, down_weight), "tp", src=V, dst=P) + down_bias  # [4, 8] → [2, 8] {dp: S(0), tp: P}
        x_1 = spmd.reduce_scatter(down, "tp", src=P, dst=S(1))                    # reduce-scatter, backward all-gather: 128 B
        # layers.{1..3}
        for layer in w.layers[1:3]:                                               # 2 copies
            x_1 = Mlp(layer)(x_1)
            x_1 = spmd.reduce_scatter(x_1, "tp", src=P, dst=S(1))                 # reduce-scatter, backward all-gather: 128 B
        x_1 = Mlp(w.layers[3])(x_1)
        x_1 = spmd.all_reduce(x_1, "tp", src=P, dst=I)                            # all-reduce: 128 B
        square = x_1 * x_1
        loss = spmd.reinterpret(torch.sum(square) / 32, "dp", src=V, dst=P)       # [] {dp: P, tp: I}
        loss = spmd.all_reduce(loss, "dp", src=P, dst=I)                          # all-reduce: 8 B
        return {"loss": loss, "out": x_1}
