"""The fuser: elementwise operators of a sharded program that become one kernel, found on local shapes.

A chain is written as Triton source into the program's own file. Two kinds are left to ``torch.compile`` (its backend
Inductor), whose kernels are better there: those with a reduction in the middle (Inductor keeps a row where it is, or
reads it twice, and derives the gradient through it), and those with an operator that is elementwise in torch but not in
the table of formulas here (Inductor has them all; leaving the operator out would cut the chain in two, and move the
tensors between the parts). Everything else is better written here: it starts without a compiler's guards, needs no
tracing at the first call, keeps only what its gradient needs, and can be read.

What is planned is what the operators keep one by one: a chain keeps at most as much.
"""

from __future__ import annotations

from passes.chains.operator_chain import INDUCTOR, TRITON, Member, OperatorChain
from passes.chains.place_chains import chain_up

__all__ = ["INDUCTOR", "TRITON", "Member", "OperatorChain", "chain_up"]
