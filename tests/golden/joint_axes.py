"""Turn on mesh dp=2,tp=2, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, S

from runtime import ops
from runtime.programs.program import Block


class RowsToColumns(Block):
    def forward(self, x):
        w = self.weights
        # x: [8, 8] → [8, 2] {dp: S(1), tp: S(1)}
        product = x * w.scale
        # rows
        probabilities = F.softmax(product, dim=0)
        probabilities = spmd.all_to_all(probabilities, ops.joint("dp", "tp"), src=S(1), dst=S(0))  # 512 B
        # columns
        probabilities = F.softmax(probabilities, dim=1)
        probabilities = spmd.all_gather(probabilities, ops.joint("dp", "tp"), src=S(0), dst=I)  # 512 B
        square = torch.square(probabilities)
        loss = torch.mean(square)
        return loss


class Program(Block):
    def forward(self, x):
        w = self.weights
        # x: [8, 8] → [8, 2] {dp: S(1), tp: S(1)}
        loss = self.unit(RowsToColumns(w))(x)
        return {"": loss}
