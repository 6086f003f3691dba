"""Mlp on mesh dp=4,cp=1,tp=2 (dp: 2 ranks × 2 micro-batches), chunk 1 of 2, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import spmd_types as spmd
import torch.nn.functional as F
from spmd_types import I, P, R, V

from runtime.programs.program import Block


class Up(Block):
    def forward(self, x):
        w = self.weights
        # x: [8, 8] → [2, 8] {dp: S(0), tp: R}
        up = F.linear(x, w.layers[0].up.weight, w.layers[0].up.bias)      # [8, 32] → [2, 16] {dp: S(0), tp: S(1)}
        return up


class Layers0ToDown(Block):
    def forward(self, up):
        w = self.weights
        # up: [8, 32] → [2, 16] {dp: S(0), tp: S(1)}
        # layers.0
        activation = F.gelu(up)
        down_bias = spmd.convert(w.layers[0].down.bias, "tp", src=I, dst=P, expert_mode=True)
        # [8, 8] → [2, 8] {dp: S(0), tp: P}
        down = spmd.reinterpret(F.linear(activation, w.layers[0].down.weight), "tp", src=V, dst=P) + down_bias
        return down


class Mlp(Block):  # layers.1
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


class Program(Block):
    def forward(self, x):
        w = self.weights
        # x: [8, 8] → [2, 8] {dp: S(0), tp: R}
        up = self.unit(Up(w))(x)
        down = self.unit(Layers0ToDown(w))(up)
        x = spmd.all_reduce(down, "tp", src=P, dst=I)                     # 128 B
        # layers.1
        x = self.unit(Mlp(w.layers[1]), recompute='selective')(x)         # ZeRO 1
        return {"0": x}
