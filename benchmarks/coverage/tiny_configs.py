"""Shrink the default config of any model type: a table of sizes by the names of fields, and ratios inside lists."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

from benchmarks.coverage.exceptions import CONFIGS

NUM_HEADS, HEAD_DIM, WIDTH = 4, 8, 32

#: Names of integer fields (the first pattern that matches all of the name) and what they become, if they are larger.
#: One model's fields have to agree with one another: 4 heads of 8 are the width of 32.
SIZES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size.*|n_words|num_embeddings|.*codebook_size", 128),
    (r".*mamba.*heads", 8),
    (r"mm_tokens_per_image|num_encoder_blocks", 4),
    (r"rotary_dim|upsample_groups", 4),
    (r".*num_mel_bins|input_feat_per_channel", 16),
    (r"n_groups|mamba_n_groups|topk_group", 1),
    (r"n_group", 2),
    (r".*(ssm_state_size|d_state|state_size)", 8),
    (r".*(num|n)_?(hidden_|decoder_|encoder_|self_|text_|vision_)?(layers?|blocks?)|.*_layers|(.*_)?depth", 2),
    (r"(num|n)_?(key_value|kv)_?heads?|.*num_key_value_heads", 2),
    (r".*(heads?|attention_heads)|.*n_head|.*_head_count", NUM_HEADS),
    (r".*head_dim|head_size|d_kv|.*_d_head|qk_(nope|rope)_head_dim|v_head_dim|dim_head", HEAD_DIM),
    (r".*(intermediate|ffn?|inner|feed_?forward|mlp)_?(size|dim|hidden_dim)|d_ff|n_inner|.*_ffn_dim", 2 * WIDTH),
    (r"(q|kv|o)_lora_rank|.*lora_rank.*|.*_rank", 16),
    (r"emb_dim|.*(hidden|embed|embedding|embeds|model|projection|proj|width|channel)_?(size|dim|dims|channels?)?|d_model|n_embd|dim",
     WIDTH),
    (r".*(max_position|position_embeddings|n_positions|max_source|max_target|n_ctx|max_len).*", 64),
    (r"(num|n)_?(local_|routed_)?experts|moe_num_experts", 4),
    (r".*experts_per_tok|moe_topk|moe_k|num_selected_experts|top_k_experts", 2),
    (r"sliding_window|attention_window|.*chunk_size|window_size|local_attention", 8),
    (r"image_size|img_size|crop_size", 32),
    (r".*patch_size", 8),
    (r".*num_(queries|query_tokens|latents)|.*_latents", 8),
)  # fmt: skip

#: Fields of floats that make forward draw random numbers: off.
DRAWS = re.compile(r".*(drop|drop_rate|layerdrop|drop_path_rate|_pdrop|mask_.*_prob|jitter_noise)$|.*dropout.*")

#: Lists of widths are divided alike, so that the largest in the config is this.
LARGEST_WIDTH = 64
DEPTHS = re.compile(r"depths?$|.*layers_per|.*num_layers|.*blocks|.*layer_nums|.*depths$")
WIDTHS = re.compile(r".*(hidden|embed|channel|width|dim|feature|neck).*(sizes?|dims?|channels?|s)$|width.*|.*embed_dim")

#: Special tokens of a config stay apart from one another, and above the ordinary ones.
FIRST_SPECIAL = 96
SPECIAL = ("pad", "bos", "eos", "decoder_start", "image", "video", "audio", "vision_start", "vision_end", "boi", "eoi",
           "sep", "cls", "mask", "unk")  # fmt: skip


def tiny_config(model_type: str) -> Any:
    """The config of a model type with few and narrow layers.

    Raises:
        Exception: whatever the config class raises for sizes that do not fit one another.
    """
    from transformers import AutoConfig

    exceptions = CONFIGS.get(model_type, {})
    default = AutoConfig.for_model(model_type, **exceptions.get("default", {}))
    return type(default)(**_small_entries(default, exceptions))


def _small_entries(config: Any, exceptions: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the config's class that make it small."""
    from transformers import PretrainedConfig

    values = _declared(config)
    fixed = {name: value for name, value in exceptions.items() if name != "default"}
    entries: dict[str, Any] = dict(exceptions.get("default", {}))
    divisor = _divisor(values)
    for name, value in values.items():
        if isinstance(value, PretrainedConfig):
            nested = fixed.pop(name, {})
            if "model_type" in nested:
                entries[name] = nested
            else:
                nested = {**CONFIGS.get(value.model_type, {}), **nested}
                entries[name] = {"model_type": value.model_type, **_small_entries(value, nested)}
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int):
            entries[name] = _small(name, value)
        elif isinstance(value, float) and DRAWS.fullmatch(name):
            entries[name] = 0.0
        elif isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
            entries[name] = _small_list(name, value, divisor)
    entries.update(_agreeing(config, values, entries))
    return {**_all_kinds(config, {**entries, **fixed}), **fixed}


#: Lists that name the kind of every layer.
KINDS = ("layer_types", "layers_block_type", "block_types")


def _all_kinds(config: Any, entries: dict[str, Any]) -> dict[str, Any]:
    """``entries`` with one layer of each kind, where the first few layers are not of all kinds."""
    for name in KINDS:
        kinds = list(dict.fromkeys(getattr(config, name, None) or ()))
        if len(kinds) < 2 or "num_hidden_layers" not in entries:
            continue
        try:
            current = getattr(type(config)(**entries), name)
        except Exception:  # the list is as long as the large model's
            current = ()
        if set(current) == set(kinds):
            continue
        several = {**entries, "num_hidden_layers": len(kinds), name: kinds}
        try:
            type(config)(**several)
        except Exception:  # derived from other fields
            continue
        return several
    return entries


def _declared(config: Any) -> dict[str, Any]:
    """Sub-configs, and the fields whose defaults are values of their own: None is derived from other fields."""
    from transformers import PretrainedConfig

    values = {}
    for field in dataclasses.fields(config):
        value = vars(config).get(field.name)
        default = field.default() if callable(field.default) else field.default
        if isinstance(value, PretrainedConfig) or default not in (None, dataclasses.MISSING):
            values[field.name] = value
    return values


def _agreeing(config: Any, values: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """Fields that have to agree with others."""
    agreed: dict[str, Any] = {}
    heads, shared = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if heads is not None and heads == shared:
        agreed["num_key_value_heads"] = entries["num_attention_heads"]
    if isinstance(values.get("num_heads"), (list, tuple)) and isinstance(values.get("embed_dim"), int):
        agreed["embed_dim"] = HEAD_DIM * values["num_heads"][0]
    if "spatial_merge_size" in values and "window_size" in values and isinstance(entries.get("patch_size"), int):
        agreed["window_size"] = 2 * values["spatial_merge_size"] * entries["patch_size"]
    if hasattr(config, "depths") and len(getattr(config, "out_features", None) or ()) > 1:
        agreed["out_features"] = list(config.out_features)
    sections = _rotary_sections(config)
    if sections:
        rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
        head_dim = entries.get("head_dim") or WIDTH // NUM_HEADS
        agreed["rope_parameters"] = _with_sections(rope, head_dim)
    return agreed


def _with_sections(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """A rotary embedding, or that of each kind of layer, with sections for time, height and width."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {kind: _with_sections(value, head_dim) for kind, value in rope.items() if isinstance(value, dict)}
    half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    return {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}


def _rotary_sections(config: Any) -> bool:
    """Whether the model cuts its rotary embedding into sections for time, height and width."""
    if not hasattr(config, "rope_parameters") or not hasattr(config, "max_position_embeddings"):
        return False
    path = Path(inspect.getfile(type(config)))
    modeling = path.with_name(path.name.replace("configuration_", "modeling_"))
    return modeling.exists() and "mrope_section" in modeling.read_text()


def _small(name: str, value: int) -> int:
    if name.endswith(("_token_id", "_token_index", "_idx", "_id")):
        return min(value, FIRST_SPECIAL + _place(name))
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return min(value, size)
    return value


def _place(name: str) -> int:
    """A number below 32 for a special token."""
    stem = re.sub(r"_token_(id|index)$|_id$|_idx$", "", name)
    return SPECIAL.index(stem) if stem in SPECIAL else len(SPECIAL) + sum(map(ord, stem)) % 12


def _divisor(values: dict[str, Any]) -> int:
    """The power of two that divides the lists of widths."""
    lists = [value for name, value in values.items() if isinstance(value, (list, tuple)) and WIDTHS.fullmatch(name)]
    largest = max((item for value in lists for item in value if type(item) is int), default=0)
    divisor = 1
    while largest / divisor > LARGEST_WIDTH:
        divisor *= 2
    return divisor


def _small_list(name: str, values: Any, divisor: int) -> Any:
    if DEPTHS.fullmatch(name):
        return type(values)(min(value, 1) for value in values)
    if re.fullmatch(r".*(image|patch)_size", name):
        return type(values)(_small(name, value) for value in values)
    if WIDTHS.fullmatch(name):
        return type(values)(max(value // divisor, min(value, 4)) for value in values)
    return values
