"""Scaled on mesh dp=2, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, S

from runtime import kernels
from runtime.programs.program import Block


# div, logsumexp
# of the model itself
# For torch.compile: logsumexp is a reduction whose rows are used again.
def _div_logsumexp_plain(linear, temperature):
    quotient = linear / temperature
    logsumexp = torch.logsumexp(quotient, [1])
    return logsumexp


_div_logsumexp = kernels.Chain(plain=_div_logsumexp_plain, backend="inductor")


class Linear(Block):
    def forward(self, x, temperature):
        w = self.weights
        # x: [8, 8] → [4, 8] {dp: S(0)}
        # temperature: [] {dp: R}
        linear = F.linear(x, w.linear.weight, w.linear.bias)
        logsumexp = _div_logsumexp(linear, temperature)
        logsumexp = spmd.all_gather(logsumexp, "dp", src=S(0), dst=I)     # 32 B
        loss = torch.mean(logsumexp)
        return loss


class Program(Block):
    def forward(self, x, temperature):
        w = self.weights
        # x: [8, 8] → [4, 8] {dp: S(0)}
        # temperature: [] {dp: R}
        loss = self.unit(Linear(w))(x, temperature)
        return {"loss": loss}
