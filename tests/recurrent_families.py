"""Tiny models of transformers whose layers loop over tokens in Python where no kernel package is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_SIZES: Mapping[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2}
_ATTENTION: Mapping[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
_DELTA_RULE: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3,
}  # fmt: skip
#: Model type of transformers → what it needs besides.
RECURRENT_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Mamba": {"state_size": 4},
    "FalconMamba": {"state_size": 4},
    "Jamba": {
        **_ATTENTION, "num_experts": 2, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
    },
    "Zamba": {
        **_ATTENTION, "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4, "attention_head_dim": 8, "n_mamba_heads": 2, "mamba_d_state": 4, "mamba_dt_rank": 4,
    },
    "RecurrentGemma": {
        **_ATTENTION, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 4, "lru_width": 16,
        "attention_window_size": 8,
    },
    "Rwkv": {"attention_hidden_size": 16, "context_length": 32},
    "Qwen3Next": {**_ATTENTION, **_DELTA_RULE, "head_dim": 4, "mlp_only_layers": [0, 1]},
    "OlmoHybrid": {**_ATTENTION, **_DELTA_RULE, "pad_token_id": 0, "eos_token_id": 1},
    "KimiLinear": {
        **_ATTENTION, "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4,
        "linear_head_dim": 4, "linear_conv_kernel_dim": 3, "num_key_value_heads": 4, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "mlp_layer_types": ["dense", "dense"],
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
BATCH, TOKENS = 8, 12


def recurrent_model(name: str, **options: Any) -> nn.Module:
    """A model in float64, in training mode."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **RECURRENT_FAMILIES[name], **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
        for parameter in model.parameters():  # biases begin as zeros, steps of the recurrence all alike
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.double().train()


def recurrent_batch(tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``labels``, some of which are left out."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (BATCH, tokens), generator=generator)
    return {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -100, ids)}
