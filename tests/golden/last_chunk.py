"""Mlp on mesh dp=4,cp=1,tp=2 (dp: 2 ranks × 2 micro-batches), chunk 2 of 2, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, P, R, V

from runtime.programs.program import Block


class Mlp(Block):  # layers.{2..3}
    def forward(self, x):
        w = self.weights
        # x: [8, 8] → [2, 8] {dp: S(0), tp: I}
        x = spmd.convert(x, "tp", src=I, dst=R)                           # 128 B, backward all-reduce
        up = F.linear(x, w.up.weight, w.up.bias)                          # [8, 32] → [2, 16] {dp: S(0), tp: S(1)}
        activation = F.gelu(up)
        down_bias = spmd.convert(w.down.bias, "tp", src=I, dst=P, expert_mode=True)
        # [8, 8] → [2, 8] {dp: S(0), tp: P}
        down = spmd.reinterpret(F.linear(activation, w.down.weight), "tp", src=V, dst=P) + down_bias
        down = spmd.all_reduce(down, "tp", src=P, dst=I)                  # 128 B
        return down


class Rest(Block):
    def forward(self, down):
        # down: [8, 8] → [2, 8] {dp: S(0), tp: I}
        product = down * down
        loss = spmd.reinterpret(torch.sum(product) / 64, "dp", src=V, dst=P)  # [] {dp: P, tp: I}
        return loss


class Program(Block):
    def forward(self, x):
        w = self.weights
        # x: [8, 8] → [2, 8] {dp: S(0), tp: I}
        # layers.{2..3}
        for layer in w.layers[2:4]:                                       # 2 copies, ZeRO 3
            x = self.unit(Mlp(layer))(x)
        loss = self.unit(Rest(w))(x)
        return {"loss": loss}
