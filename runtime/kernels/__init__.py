"""Fused operators: ``torch.library`` operators with a Triton and an ATen implementation, one file each."""

from runtime.kernels.swiglu import swiglu

__all__ = ["swiglu"]
