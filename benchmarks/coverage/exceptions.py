"""What the general shrinking and the general inputs get wrong, as data."""

from __future__ import annotations

from typing import Any

import torch

#: Model type → fields of its small config (sub-configs as dicts). ``default``: what the config cannot be made without.
CONFIGS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    "audio-spectrogram-transformer": {"max_length": 32},
    "autoformer": {"default": {"prediction_length": 8, "context_length": 16}, "moving_average": 5},
    "informer": {"default": {"prediction_length": 8, "context_length": 16}},
    "time_series_transformer": {"default": {"prediction_length": 8, "context_length": 16}},
    "bit": {"num_groups": 2},
    "blip-2": {"image_token_index": 100, "num_query_tokens": 8},
    "instructblip": {"image_token_index": 100, "num_query_tokens": 8},
    "bridgetower": {"hidden_size": 64, "num_attention_heads": 4, "text_config": {"hidden_size": 64},
                    "vision_config": {"hidden_size": 64}},
    "bros": {"dim_bbox_projection": 8},
    "chameleon": {"default": {"vocabulary_map": {"<image>": 100}}},
    "emu3": {"default": {"vocabulary_map": {"<image>": 100}}},
    "cvt": {"drop_path_rate": (0.0, 0.0, 0.0)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "bamba": {"mamba_d_head": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 8},
    "internvl": {"downsample_ratio": 0.5},
    "jamba": {"mamba_dt_rank": 4, "attn_layer_offset": 1, "attn_layer_period": 2},
    "llama4_vision_model": {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
                            "pixel_shuffle_ratio": 0.5},
    "mobilevit": {"hidden_sizes": (16, 24, 32)},
    "perceiver": {"max_position_embeddings": 16},
    "pvt": {"num_attention_heads": (1, 2, 4, 8)},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "xmod": {"default_language": "en_XX"},
    "swin": {"image_size": 64, "window_size": 2},
    "swinv2": {"image_size": 64, "window_size": 2},
    "donut-swin": {"image_size": 64, "window_size": 2},
    "maskformer-swin": {"image_size": 64, "window_size": 2},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 32},
    "gemma3n_text": {"intermediate_size": 64, "num_kv_shared_layers": 0, "activation_sparsity_pattern": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_bigcode": {"n_inner": 64},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lw_detr": {"backbone_config": {"num_windows": 4}},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4), "attn_layers": ["local", "local"],
                 "local_attn_chunk_length": 4},
    "swin2sr": {"embed_dim": 24, "num_heads": (2, 2), "depths": (1, 1)},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6},
    "lilt": {"channel_shrink_ratio": 4},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "granite_speech5_ctc": {"context_size": 8},
    "levit": {"image_size": 64},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 32}},
    "pocket_tts": {"flow_head_config": {"condition_dim": 32}},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 0.5},
}  # fmt: skip

#: Detectors' own backbones are timm's, or too deep for a small image.
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
          "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}  # fmt: skip
for _name in ("conditional_detr", "dab-detr", "detr", "table-transformer"):
    CONFIGS[_name] = {"backbone_config": {**RESNET, "out_features": ["stage4"]}}
CONFIGS["deformable_detr"] = {"backbone_config": RESNET}
for _name in ("grounding-dino", "mm-grounding-dino"):
    CONFIGS[_name] = {"num_queries": 4}
CONFIGS["recurrent_gemma"] = {"block_types": ("recurrent", "attention")}
CONFIGS["granitemoehybrid"] = {"mamba_d_head": 8, "layer_types": ["linear_attention", "full_attention"]}

#: The stem of EfficientNet has the width that its first block takes.
EFFICIENT_WIDTHS = {"in_channels": (32, 16, 24, 40, 80, 112, 192), "out_channels": (16, 24, 40, 80, 112, 192, 320),
                    "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 64}  # fmt: skip
CONFIGS["efficientnet"] = EFFICIENT_WIDTHS
CONFIGS["align"] = {"vision_config": EFFICIENT_WIDTHS}

#: Speech models that share wav2vec 2.0's front of strided convolutions; seconds of sound are not needed to try them.
CONVOLUTIONS = {
    "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 3, "apply_spec_augment": False,
    "ctc_zero_infinity": True, "num_codevectors_per_group": 8, "codevector_dim": 16, "proj_codevector_dim": 16,
}  # fmt: skip
for _name in ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "sew"):
    CONFIGS[_name] = CONVOLUTIONS
CONFIGS["data2vec-audio"] = {**CONVOLUTIONS, "num_conv_pos_embeddings": 2}
CONFIGS["wav2vec2-conformer"] = {**CONVOLUTIONS, "vocab_size": 32}

#: Model type → inputs: argument → a value, a function of ``TinyInputs``, or None for none.
INPUTS: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"input_values": lambda t: t.floats(t.batch_size, 32, 16)},
    "bailing_hybrid": {"use_cache": False},
    "clvp": {"input_features": lambda t: t.floats(t.batch_size, 80, 20)},
    "clap": {"input_features": lambda t: t.floats(t.batch_size, 1, 64, 64)},
    "deepseek_vl_hybrid": {"high_res_pixel_values": lambda t: t.floats(t.batch_size, 3, 64, 64)},
    "llava": {"image_sizes": None},
    "vipllava": {"image_sizes": None},
    "lxmert": {
        "visual_feats": lambda t: t.floats(t.batch_size, 4, t.config.visual_feat_dim),
        "visual_pos": lambda t: t.floats(t.batch_size, 4, 4),
    },
    "mllama": {
        "pixel_values": lambda t: t.floats(t.batch_size, 1, t.vision("max_num_tiles"), 3, *t.image_size),
        "aspect_ratio_ids": lambda t: torch.ones(t.batch_size, 1, dtype=torch.long),
        "aspect_ratio_mask": lambda t: torch.ones(t.batch_size, 1, t.vision("max_num_tiles"), dtype=torch.long),
    },
    "patchtsmixer": {
        "past_values": lambda t: t.floats(t.batch_size, t.config.context_length, 1),
        "target_values": lambda t: t.integers(0, 2, t.batch_size),
    },
    "patchtst": {
        "past_values": lambda t: t.floats(t.batch_size, t.config.context_length, 1),
        "target_values": lambda t: t.integers(0, 2, t.batch_size),
    },
    "pix2struct": {"flattened_patches": lambda t: t.floats(t.batch_size, 16, 770), "input_ids": None},
    "pop2piano": {"input_ids": None, "attention_mask": None},
    "instructblip": {"qformer_input_ids": lambda t: t.tokens(t.batch_size, 8)},
    "oneformer": {"task_inputs": lambda t: t.tokens(t.batch_size, 16)},
    "wav2vec2-bert": {"input_features": lambda t: t.floats(t.batch_size, 32, t.config.feature_projection_input_dim)},
    "timesfm": {
        "past_values": lambda t: t.floats(t.batch_size, 64),
        "future_values": lambda t: t.floats(t.batch_size, 128),
    },
    "seggpt": {
        "pixel_values": lambda t: t.floats(t.batch_size, 3, t.image_size[0] // 2, t.image_size[1]),
        "prompt_pixel_values": lambda t: t.floats(t.batch_size, 3, t.image_size[0] // 2, t.image_size[1]),
        "prompt_masks": lambda t: t.floats(t.batch_size, 3, t.image_size[0] // 2, t.image_size[1]),
        "labels": lambda t: t.floats(t.batch_size, 3, t.image_size[0] // 2, t.image_size[1]),
    },
    "layoutlmv2": {"image": lambda t: t.floats(t.batch_size, 3, *t.image_size)},
    "vilt": {"labels": lambda t: t.floats(t.batch_size, 2).sigmoid()},
    "visual_bert": {"visual_embeds": lambda t: t.floats(t.batch_size, 4, 32)},
}
for _name in ("idefics2", "idefics3", "smolvlm", "modernvbert", "ultravbert"):
    INPUTS[_name] = {"pixel_values": lambda t: t.floats(t.batch_size, 1, 3, *t.image_size)}
for _name in ("vjepa2", "videoprism_vision_model"):
    INPUTS[_name] = {"pixel_values_videos": lambda t: t.floats(t.batch_size, 4, 3, *t.image_size)}
for _name in ("autoformer", "informer", "time_series_transformer"):
    INPUTS[_name] = {
        "past_values": lambda t: t.floats(t.batch_size, 23),
        "past_time_features": lambda t: t.floats(t.batch_size, 23, max(t.config.num_time_features, 1)),
        "past_observed_mask": lambda t: torch.ones(t.batch_size, 23),
        "future_values": lambda t: t.floats(t.batch_size, 8),
        "future_time_features": lambda t: t.floats(t.batch_size, 8, max(t.config.num_time_features, 1)),
    }
    CONFIGS[_name]["num_time_features"] = 1
