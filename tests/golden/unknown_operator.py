"""Powered on mesh dp=2, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, S

from runtime.programs.program import Block


class First(Block):
    def forward(self, x):
        w = self.weights
        # x: [8, 8] → [4, 8] {dp: S(0)}
        first = F.linear(x, w.first.weight, w.first.bias)
        return first


class Last(Block):
    def forward(self, first):
        w = self.weights
        # first: [8, 8] → [4, 8] {dp: S(0)}
        first = spmd.all_gather(first, "dp", src=S(0), dst=I)             # 256 B
        linalg_matrix_power = torch.ops.aten.linalg_matrix_power.default(first, 3)
        linalg_matrix_power = spmd.convert(linalg_matrix_power, "dp", src=I, dst=S(0))  # 256 B, backward all-gather
        last = F.linear(linalg_matrix_power, w.last.weight, w.last.bias)
        square = torch.square(last)
        square = spmd.all_gather(square, "dp", src=S(0), dst=I)           # 256 B
        loss = torch.mean(square)
        return loss


class Program(Block):
    def forward(self, x):
        w = self.weights
        # x: [8, 8] → [4, 8] {dp: S(0)}
        first = self.unit(First(w))(x)
        loss = self.unit(Last(w))(first)
        return {"": loss}
