"""Mlp on mesh dp=2,tp=2, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, P, R, S, V

from runtime.programs.program import Block


class Mlp(Block):  # layers.{1..3}
    def forward(self, x):
        w = self.weights
        # x: [4, 8] → [2, 4] {dp: S(0), tp: S(1)}
        x = spmd.all_gather(x, "tp", src=S(1), dst=R)                     # 128 B, backward reduce-scatter
        up_weight = spmd.convert(w.up.weight, "dp", src=I, dst=R)         # 1 KiB, backward all-reduce
        up_bias = spmd.convert(w.up.bias, "dp", src=I, dst=R)             # 128 B, backward all-reduce
        up = F.linear(x, up_weight, up_bias)                              # [4, 32] → [2, 16] {dp: S(0), tp: S(1)}
        activation = F.gelu(up)
        down_weight = spmd.all_gather(w.down.weight, "dp", src=S(0), dst=R)  # 1 KiB, backward reduce-scatter
        down_bias = spmd.convert(w.down.bias, "dp", src=I, dst=R)         # 64 B, backward all-reduce
        down_bias = spmd.convert(down_bias, "tp", src=I, dst=P, expert_mode=True)
        # [4, 8] → [2, 8] {dp: S(0), tp: P}
        down = spmd.reinterpret(F.linear(activation, down_weight), "tp", src=V, dst=P) + down_bias
        return down


class Program(Block):
    def forward(self, x):
        w = self.weights
        # x: [4, 8] → [2, 8] {dp: S(0), tp: R}
        up_weight = spmd.convert(w.layers[0].up.weight, "dp", src=I, dst=R)  # 1 KiB, backward all-reduce
        up_bias = spmd.convert(w.layers[0].up.bias, "dp", src=I, dst=R)   # 128 B, backward all-reduce
        up = F.linear(x, up_weight, up_bias)                              # [4, 32] → [2, 16] {dp: S(0), tp: S(1)}
        activation = F.gelu(up)
        down_weight = spmd.all_gather(w.layers[0].down.weight, "dp", src=S(0), dst=R)  # 1 KiB, backward reduce-scatter
        down_bias = spmd.convert(w.layers[0].down.bias, "dp", src=I, dst=R)  # 64 B, backward all-reduce
        down_bias = spmd.convert(down_bias, "tp", src=I, dst=P, expert_mode=True)
        # [4, 8] → [2, 8] {dp: S(0), tp: P}
        down = spmd.reinterpret(F.linear(activation, down_weight), "tp", src=V, dst=P) + down_bias
        x = spmd.reduce_scatter(down, "tp", src=P, dst=S(1))              # 128 B, backward all-gather
        # layers.{1..3}
        for layer in w.layers[1:3]:                                       # 2 copies
            x = Mlp(layer)(x)
            x = spmd.reduce_scatter(x, "tp", src=P, dst=S(1))             # 128 B, backward all-gather
        x = Mlp(w.layers[3])(x)
        x = spmd.all_reduce(x, "tp", src=P, dst=I)                        # 128 B
        product = x * x
        loss = spmd.reinterpret(torch.sum(product) / 32, "dp", src=V, dst=P)  # [] {dp: P, tp: I}
        loss = spmd.all_reduce(loss, "dp", src=P, dst=I)                  # 8 B
        return {"loss": loss, "out": x}
