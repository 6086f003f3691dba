"""Fused operators: ``torch.library`` operators with a Triton and an ATen implementation, one file each."""

from runtime.kernels.adamw import AdamW
from runtime.kernels.bias_gelu import bias_gelu
from runtime.kernels.chain_call import Chain
from runtime.kernels.cross_entropy import cross_entropy
from runtime.kernels.delta_rule import gated_delta_rule
from runtime.kernels.embedding import embedding
from runtime.kernels.expert_linear import expert_linear
from runtime.kernels.experts import experts
from runtime.kernels.geglu import geglu
from runtime.kernels.layer_norm import add_layer_norm, layer_norm
from runtime.kernels.linear_cross_entropy import linear_cross_entropy
from runtime.kernels.recurrence import linear_recurrence
from runtime.kernels.rms_norm import add_rms_norm, rms_norm
from runtime.kernels.rotary import rotary
from runtime.kernels.rotary_pair import rotary_pair
from runtime.kernels.swiglu import swiglu

__all__ = [
    "AdamW",
    "Chain",
    "add_layer_norm",
    "add_rms_norm",
    "bias_gelu",
    "cross_entropy",
    "embedding",
    "expert_linear",
    "experts",
    "gated_delta_rule",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_recurrence",
    "rms_norm",
    "rotary",
    "rotary_pair",
    "swiglu",
]
