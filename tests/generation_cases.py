"""Tiny models that generate, what they begin with, and ways to generate, to be held against Hugging Face's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

#: Samples, tokens of a prompt.
ROWS, PROMPT = 2, 5
_DECODER = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
_TOKENS = {"bos_token_id": 0, "eos_token_id": 95, "pad_token_id": 1, "decoder_start_token_id": 0}
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 96, **_TOKENS,
}  # fmt: skip
#: A decoder that stages of a pipeline share.
_DEEP = {"encoder_layers": 1, "decoder_layers": 4}


def _gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": 96}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=95))


def _llama(**changes: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_DECODER, **changes}))


def _mistral() -> nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_DECODER, sliding_window=4))


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2)
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model


def _t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **_TOKENS))


def _bart(**changes: Any) -> nn.Module:
    sizes = {**_BART, "max_position_embeddings": 40, "forced_eos_token_id": None, **changes}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))


def _whisper(**changes: Any) -> nn.Module:
    sizes = {**_BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 40, **changes}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes))


def _adapted(model: Any, places: list[str]) -> nn.Module:
    """With LoRA whose matrices are far from zero."""
    torch.manual_seed(3)
    options: dict[str, Any] = {"r": 4, "lora_alpha": 32, "init_lora_weights": False}
    kind = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    return get_peft_model(model, LoraConfig(target_modules=places, task_type=kind, **options))


#: Model → what makes it.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2, "llama": _llama, "mistral": _mistral, "mixtral": _mixtral, "t5": _t5, "bart": _bart,
    "whisper": _whisper,
    "llama-lora": lambda: _adapted(_llama(), ["q_proj", "v_proj", "down_proj"]),
    "t5-lora": lambda: _adapted(_t5(), ["q", "v", "wo"]),
    "bart-deep": lambda: _bart(**_DEEP), "whisper-deep": lambda: _whisper(**_DEEP),
}  # fmt: skip
#: Way to generate → arguments of ``generate``.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 4, "early_stopping": True},
    "sampled_beams": {"do_sample": True, "num_beams": 4, "return_dict_in_generate": True, "output_scores": True},
}


def model_named(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """With weights far apart, so that no two tokens are about as likely."""
    torch.manual_seed(0)
    model: Any = MODELS[name]().to(dtype).eval()
    if name == "mixtral" and dtype == torch.float64:  # which grouped matrix products do not know
        model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model  # type: ignore[no-any-return]


def prompt_of(name: str, *, padded: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """What ``generate`` begins with; ``padded``: the first row is two tokens shorter."""
    generator = torch.Generator().manual_seed(1)
    if name.startswith("whisper"):
        return {"input_features": torch.randn(ROWS, 8, 32, generator=generator).to(dtype)}
    tokens = torch.randint(2, 90, (ROWS, PROMPT), generator=generator)
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :2] = 0
        tokens[0, :2] = 1
    return {"input_ids": tokens, "attention_mask": mask}


def training_batch(name: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """An example of a training step, which the placement of weights is planned for."""
    inputs = {key: value for key, value in prompt_of(name, dtype=dtype).items() if key != "attention_mask"}
    return {**inputs, "labels": torch.randint(2, 90, (ROWS, PROMPT), generator=torch.Generator().manual_seed(2))}


def generated(
    model: Any,
    name: str,
    way: str,
    *,
    padded: bool = False,
    new_tokens: int = 6,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """The tokens [rows, length] as lists."""
    torch.manual_seed(5)
    prompt = prompt_of(name, padded=padded, dtype=dtype)
    result = model.generate(**prompt, max_new_tokens=new_tokens, pad_token_id=1, **WAYS[way], **options)
    return getattr(result, "sequences", result).tolist()
