"""Mlp on mesh dp=2, written by Meshwright.

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


class Program(Block):
    def forward(self, x):
        w = self.weights
        # x: [4, 8] → [2, 8] {dp: S(0)}
        # layers.0.up
        # all-gather, backward reduce-scatter: 512 B
        up_weight = spmd.all_gather(w.layers[0].up.weight, "dp", src=S(0), dst=R, backward_options={"op_dtype": torch.bfloat16})
        # all-gather, backward reduce-scatter: 64 B
        up_bias = spmd.all_gather(w.layers[0].up.bias, "dp", src=S(0), dst=R, backward_options={"op_dtype": torch.bfloat16})
        up = F.linear(x, up_weight, up_bias)                                      # [4, 32] → [2, 32] {dp: S(0)}
        # layers.0
        gelu = F.gelu(up)
        # layers.0.down
        # all-gather, backward reduce-scatter: 512 B
        down_weight = spmd.all_gather(w.layers[0].down.weight, "dp", src=S(0), dst=R, backward_options={"op_dtype": torch.bfloat16})
        # all-gather, backward reduce-scatter: 16 B
        down_bias = spmd.all_gather(w.layers[0].down.bias, "dp", src=S(0), dst=R, backward_options={"op_dtype": torch.bfloat16})
        down = F.linear(gelu, down_weight, down_bias)                             # [4, 8] → [2, 8] {dp: S(0)}
        # layers.1.up
        # all-gather, backward reduce-scatter: 512 B
        up_weight_1 = spmd.all_gather(w.layers[1].up.weight, "dp", src=S(0), dst=R, backward_options={"op_dtype": torch.bfloat16})
        # all-gather, backward reduce-scatter: 64 B
        up_bias_1 = spmd.all_gather(w.layers[1].up.bias, "dp", src=S(0), dst=R, backward_options={"op_dtype": torch.bfloat16})
        up_1 = F.linear(down, up_weight_1, up_bias_1)                             # [4, 32] → [2, 32] {dp: S(0)}
        # layers.1
        gelu_1 = F.gelu(up_1)
        # layers.1.down
        # all-gather, backward reduce-scatter: 512 B
        down_weight_1 = spmd.all_gather(w.layers[1].down.weight, "dp", src=S(0), dst=R, backward_options={"op_dtype": torch.bfloat16})
        # all-gather, backward reduce-scatter: 16 B
        down_bias_1 = spmd.all_gather(w.layers[1].down.bias, "dp", src=S(0), dst=R, backward_options={"op_dtype": torch.bfloat16})
        down_1 = F.linear(gelu_1, down_weight_1, down_bias_1)                     # [4, 8] → [2, 8] {dp: S(0)}
        square = down_1 * down_1
        loss = spmd.reinterpret(torch.sum(square) / 32, "dp", src=V, dst=P)       # [] {dp: P}
        loss = spmd.all_reduce(loss, "dp", src=P, dst=I)                          # all-reduce: 2 B
        return {"loss": loss, "out": down_1}
