"""Mlp on mesh tp=4, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, P, R, V

from runtime.programs.program import Block


class Mlp(Block):  # layers.{1..2}
    def forward(self, x):
        w = self.weights
        # x: [4, 8] {tp: I}
        x = spmd.convert(x, "tp", src=I, dst=R)                           # 256 B, backward all-reduce
        up = F.linear(x, w.up.weight, w.up.bias)                          # [4, 32] → [4, 8] {tp: S(1)}
        activation = F.gelu(up)
        down_bias = spmd.convert(w.down.bias, "tp", src=I, dst=P, expert_mode=True)
        down = spmd.reinterpret(F.linear(activation, w.down.weight), "tp", src=V, dst=P) + down_bias  # [4, 8] {tp: P}
        down = spmd.all_reduce(down, "tp", src=P, dst=I)                  # 256 B
        return down


class Program(Block):
    def forward(self, x):
        w = self.weights
        # x: [4, 8] {tp: R}
        up = F.linear(x, w.layers[0].up.weight, w.layers[0].up.bias)      # [4, 32] → [4, 8] {tp: S(1)}
        activation = F.gelu(up)
        down_bias = spmd.convert(w.layers[0].down.bias, "tp", src=I, dst=P, expert_mode=True)
        # [4, 8] {tp: P}
        down = spmd.reinterpret(F.linear(activation, w.layers[0].down.weight), "tp", src=V, dst=P) + down_bias
        x = spmd.all_reduce(down, "tp", src=P, dst=I)                     # 256 B
        # layers.{1..2}
        for layer in w.layers[1:3]:                                       # 2 copies
            x = Mlp(layer)(x)
        product = x * x
        loss = torch.mean(product)
        return {"loss": loss, "out": x}
