"""Fused operators: ``torch.library`` operators with a Triton and an ATen implementation, one file each."""

from runtime.kernels.cross_entropy import cross_entropy
from runtime.kernels.geglu import geglu
from runtime.kernels.swiglu import swiglu

__all__ = ["cross_entropy", "geglu", "swiglu"]
