"""Mlp on mesh dp=2, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import torch
import torch.nn.functional as F
from spmd_types import I, P, R, S, V

from runtime import ops
from runtime.programs.program import Block

spmd = ops.reducing_in(torch.bfloat16)  # gradients of what is bfloat16 are reduced as bfloat16


class Program(Block):
    def forward(self, x):
        w = self.weights
        # x: [4, 8] → [2, 8] {dp: S(0)}
        up_weight = spmd.all_gather(w.layers[0].up.weight, "dp", src=S(0), dst=R)  # 512 B, backward reduce-scatter
        up_bias = spmd.all_gather(w.layers[0].up.bias, "dp", src=S(0), dst=R)  # 64 B, backward reduce-scatter
        up = F.linear(x, up_weight, up_bias)
        activation = F.gelu(up)
        down_weight = spmd.all_gather(w.layers[0].down.weight, "dp", src=S(0), dst=R)  # 512 B, backward reduce-scatter
        down_bias = spmd.all_gather(w.layers[0].down.bias, "dp", src=S(0), dst=R)  # 16 B, backward reduce-scatter
        down = F.linear(activation, down_weight, down_bias)
        up_weight = spmd.all_gather(w.layers[1].up.weight, "dp", src=S(0), dst=R)  # 512 B, backward reduce-scatter
        up_bias = spmd.all_gather(w.layers[1].up.bias, "dp", src=S(0), dst=R)  # 64 B, backward reduce-scatter
        up = F.linear(down, up_weight, up_bias)
        activation = F.gelu(up)
        down_weight = spmd.all_gather(w.layers[1].down.weight, "dp", src=S(0), dst=R)  # 512 B, backward reduce-scatter
        down_bias = spmd.all_gather(w.layers[1].down.bias, "dp", src=S(0), dst=R)  # 16 B, backward reduce-scatter
        out = F.linear(activation, down_weight, down_bias)
        product = out * out
        loss = spmd.reinterpret(torch.sum(product) / 32, "dp", src=V, dst=P)  # [] {dp: P}
        loss = spmd.all_reduce(loss, "dp", src=P, dst=I)                  # 2 B
        return {"loss": loss, "out": out}
