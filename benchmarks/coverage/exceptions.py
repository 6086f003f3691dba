"""What the general shrinking and the general inputs get wrong, as data."""

from __future__ import annotations

from typing import Any

import torch


def _image_names(num_codes: int) -> dict[str, int]:
    """Chameleon's names of image tokens: the letters of a code's digits."""
    letters = ("".join(chr(ord("A") + int(digit)) for digit in str(code)) for code in range(num_codes))
    return {f"IMGIMG{name}Z": 90 + code % 6 for code, name in enumerate(letters)}


def _visual_tokens(num_codes: int) -> dict[str, int]:
    """Emu3's names of image tokens."""
    return {f"<|visual token {code:06d}|>": 90 + code % 6 for code in range(num_codes)}


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
    "bridgetower": {"hidden_size": 64, "num_attention_heads": 4, "contrastive_hidden_size": 32,
                    "logit_scale_init_value": 2.6592, "text_config": {"hidden_size": 64},
                    "vision_config": {"hidden_size": 64}},
    "bros": {"hidden_size": 64},
    "chameleon": {"default": {"vocabulary_map": {"<image>": 100, **_image_names(128)}}},
    "clap": {"audio_config": {"spec_size": 128, "num_mel_bins": 64, "patch_embeds_hidden_size": 16, "hidden_size": 128,
                              "window_size": 2}},
    "emu3": {"default": {"vocabulary_map": {
        "<image>": 100, "<|extra_200|>": 101, **_visual_tokens(128)}},
        "vq_config": {"base_channels": 32, "hidden_size": 128}},
    "cvt": {"drop_path_rate": (0.0, 0.0, 0.0), "depth": (1, 2, 3)},
    "clvp": {"text_config": {"num_attention_heads": 1}, "speech_config": {"num_attention_heads": 1},
             "decoder_config": {"num_attention_heads": 1, "num_mel_attn_blocks": 1}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
                      "vision_config": {"sam_config": {"downsample_channels": [16, 32]}}},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"image_size": 64, "global_attn_indexes": [0, 1]}},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "granite_speech": {"window_size": 10},
    "granite_speech_plus": {"window_size": 10},
    "kosmos-2": {"latent_query_num": 4},
    "longcat_flash": {"zero_expert_num": 2},
    "mllama": {"vision_config": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
               "text_config": {"cross_attention_layers": [1]}},
    "mobilevitv2": {"image_size": 64},
    "patchtst": {"num_targets": 2},
    "pix2struct": {"vision_config": {"patch_embed_hidden_size": 768}},
    "pop2piano": {"decoder_start_token_id": 0},
    "seggpt": {"intermediate_hidden_state_indices": [0, 1], "merge_index": 0},
    "speech-encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 1},
    "voxtral": {"audio_token_id": 100, "text_config": {"num_key_value_heads": 2}},
    "timesfm2_5": {"context_length": 64},  # its patches are normalised in a loop
    "vibevoice": {"audio_config": {"num_filters": 2}, "semantic_model_config": {"num_filters": 2}},
    "textnet": {"stem_out_channels": 8, "image_size": (64, 64)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "bamba": {"mamba_d_head": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 8},
    "internvl": {"downsample_ratio": 0.5},
    "jamba": {"mamba_dt_rank": 4, "attn_layer_offset": 1, "attn_layer_period": 2},
    "llama4_vision_model": {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
                            "pixel_shuffle_ratio": 0.5, "intermediate_size": 128},
    "mobilevit": {"hidden_sizes": (16, 24, 32)},
    "perceiver": {"max_position_embeddings": 16},
    "pvt": {"num_attention_heads": (1, 2, 4, 8)},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]},
               "vision_config": {"image_size": [32, 32], "num_position_embeddings": 16}},
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
    "kimi_k25": {"vision_config": {"pos_emb_height": 8, "pos_emb_width": 8}},
    "lw_detr": {"backbone_config": {"num_windows": 4, "out_indices": [1, 2]}, "projector_scale_factors": [1.0]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "musicgen": {"decoder": {"decoder_start_token_id": 1, "pad_token_id": 0}},
    "musicgen_melody": {"decoder": {"decoder_start_token_id": 1, "pad_token_id": 0}},
    "oneformer": {"task_seq_len": 16, "max_seq_len": 16},
    "qwen3_asr": {"audio_config": {"output_dim": 32}},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                       "indexer_compress_ratio": 4},
    "sapiens2": {"head_config": {"upsample_out_channels": [16], "conv_out_channels": [16]}},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4), "attn_layers": ["local", "local"],
                 "local_attn_chunk_length": 4},
    "swin2sr": {"embed_dim": 24, "num_heads": (2, 2), "depths": (1, 1)},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6, "input_size": 32},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 4},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "granite_speech5_ctc": {"encoder_config": {"context_size": 8}},
    "levit": {"image_size": 64, "patch_size": 16},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 32}},
    "pocket_tts": {"flow_head_config": {"condition_dim": 32}, "audio_bos_token_id": 110, "audio_latent_token_id": 111},
    "inkling_mm_model": {"vision_config": {"num_hidden_layers": 3}},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 0.5},
    "blt": {"encoder_config": {"hidden_size_global": 32}, "decoder_config": {"hidden_size_global": 32},
            "encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [2, 3]},
    "dots3_note": {
        "text_config": {"layer_types": ["indexed_attention", "sliding_attention"], "swa_num_attention_heads": 4,
                        "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
                        "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8, "sliding_window": 8},
        "vision_config": {"mlp_layer_types": ["dense", "sparse"], "num_local_experts": 4, "per_layer_config": {},
                          "adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32}},
    "efficientloftr": {"hidden_size": 256},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                            "mrope_section": [1, 1, 2]}}},
    "gemma4": {"default": {"vision_config": {}}, "vision_config": {"pooling_kernel_size": 2}},
    "gemma4_unified": {"default": {"vision_config": {}}},
    "granite4_vision": {"image_grid_pinpoints": [[32, 32]], "downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]],
                        "spatial_target_layers": [1, 1, 1, 1], "vision_config": {"hidden_size": 64}},
    "instructblipvideo": {"video_token_index": 100, "num_query_tokens": 8},
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4}, "out_hidden_size": 128},
    "neomme": {"head_dim": 16},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}, "image_token_id": 100},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "tipsv2_dpt": {"backbone_config": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4],
                                       "reshape_hidden_states": False}},
    "unlimited_ocr": {"vision_config": {"sam_config": {"downsample_channels": (16, 32)}}},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200, "acoustic_tokenizer_encoder_config": {"num_filters": 2},
                      "semantic_tokenizer_encoder_config": {"num_filters": 2}},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}  # fmt: skip

#: Detectors' own backbones are timm's, or too deep for a small image.
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
          "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}  # fmt: skip
for _name in ("conditional_detr", "dab-detr", "detr", "table-transformer"):
    CONFIGS[_name] = {"backbone_config": {**RESNET, "out_features": ["stage4"]}}
CONFIGS["deformable_detr"] = {"backbone_config": RESNET}
for _name in ("grounding-dino", "mm-grounding-dino"):
    CONFIGS[_name] = {"num_queries": 4, "num_labels": 1}
CONFIGS["recurrent_gemma"] = {"block_types": ("recurrent", "attention")}
CONFIGS["granitemoehybrid"] = {"mamba_d_head": 8, "layer_types": ["linear_attention", "full_attention"]}

#: The stem of EfficientNet has the width that its first block takes.
EFFICIENT_SIZES = {"in_channels": (32, 16, 24, 40, 80, 112, 192), "out_channels": (16, 24, 40, 80, 112, 192, 320),
                    "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280,
                   "num_block_repeats": (1, 1, 1, 1, 1, 1, 1)}  # fmt: skip
CONFIGS["efficientnet"] = EFFICIENT_SIZES
CONFIGS["align"] = {"vision_config": EFFICIENT_SIZES, "projection_dim": 320}
CONFIGS["upernet"] = {"backbone_config": {**RESNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
                      "auxiliary_in_channels": 16, "auxiliary_channels": 16}  # fmt: skip
#: Queries that are noised labels would be drawn at random.
for _name in ("rt_detr", "rt_detr_v2", "d_fine", "deimv2", "pp_doclayout_v2", "pp_doclayout_v3"):
    CONFIGS[_name] = {"decoder_in_channels": [32, 32, 32], "num_denoising": 0}
#: Convolutions of small weights, then norms of sixteen samples and fewer: gradients of 1e19, in which rounding decides.
CONFIGS["d_fine"] |= {"depth_mult": 0.34, "initializer_range": 0.2, "backbone_config": {"initializer_range": 0.4}}
CONFIGS["pp_doclayout_v2"] |= {"class_thresholds": [0.5] * 32, "class_order": list(range(32)),
                               "reading_order_config": {"max_2d_position_embeddings": 1024}}  # fmt: skip
CONFIGS["pp_doclayout_v3"] |= {"x4_feat_dim": 4}
#: Images in tiles: one tile as large as the image, beside the image itself.
for _name in ("llava_next", "llava_next_video", "llava_onevision"):
    CONFIGS[_name] = {"image_grid_pinpoints": [[32, 32]]}

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
    "clap": {"input_features": lambda t: t.floats(t.batch_size, 1, 256, 64)},
    "fuyu": {"pixel_values": lambda t: t.floats(t.batch_size, 4, 192)},
    "glpn": {"labels": lambda t: t.floats(t.batch_size, *t.image_size).abs() + 1},
    "idefics": {
        "pixel_values": lambda t: t.floats(t.batch_size, 1, 3, *t.image_size),
        "image_attention_mask": lambda t: torch.ones(t.batch_size, t.num_tokens, 1, dtype=torch.long),
    },
    "kosmos-2": {"image_embeds_position_mask": lambda t: t.marked(2, 6)},
    "deepseek_vl_hybrid": {"high_res_pixel_values": lambda t: t.floats(t.batch_size, 3, 64, 64)},
    "llava": {"image_sizes": None},
    "vipllava": {"image_sizes": None},
    "lxmert": {
        "visual_feats": lambda t: t.floats(t.batch_size, 4, t.config.visual_feat_dim),
        "visual_pos": lambda t: t.floats(t.batch_size, 4, 4),
        "labels": lambda t: t.integers(0, 100, t.batch_size),
    },
    "mllama": {
        "pixel_values": lambda t: t.floats(t.batch_size, 1, t.vision("max_num_tiles"), 3, *t.image_size),
        "cross_attention_mask": lambda t: torch.ones(t.batch_size, t.num_tokens, 1, 4, dtype=torch.long),
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
    "granite_speech5_ctc": {"input_features": lambda t: t.floats(t.batch_size, 32, 64)},
    "pix2struct": {
        "flattened_patches": lambda t: torch.cat(
            [t.integers(0, 4, t.batch_size, 16, 2), t.floats(t.batch_size, 16, 768)], dim=-1
        ),
        "input_ids": None,
    },
    "pop2piano": {
        "input_ids": None,
        "attention_mask": None,
        "input_features": lambda t: t.floats(t.batch_size, 16, t.config.d_model),
    },
    "speech-encoder-decoder": {"input_features": None},
    "blt": {"patch_lengths": lambda t: torch.tensor([[1, 5, 5, 5]] * t.batch_size)},  # else as its weights say
    "xclip": {"pixel_values": lambda t: t.floats(t.batch_size, t.vision("num_frames"), 3, *t.image_size)},
    "instructblip": {"qformer_input_ids": lambda t: t.tokens(t.batch_size, 8)},
    "instructblipvideo": {"qformer_input_ids": lambda t: t.tokens(t.batch_size, 8)},
    "colqwen2": {"pixel_values": lambda t: t.floats(t.batch_size, 16, 384)},
    "csm": {
        "input_ids": lambda t: t.tokens(t.batch_size, t.num_tokens, t.config.num_codebooks),
        "labels": lambda t: t.tokens(t.batch_size, t.num_tokens, t.config.num_codebooks),
        "input_values": None,
    },
    "dia": {
        "decoder_input_ids": lambda t: t.tokens(t.batch_size, t.num_tokens, t.config.decoder_config.num_channels),
        "labels": lambda t: t.tokens(t.batch_size * t.config.decoder_config.num_channels, t.num_tokens),
    },
    "kimi_k25": {"pixel_values": lambda t: t.floats(t.batch_size * 16, 3, 8, 8)},
    "inkling_mm_model": {"pixel_values": lambda t: t.floats(t.batch_size, 2, 8, 8, 3)},
    "inkling2": {"pixel_values": lambda t: t.floats(t.batch_size * 16, 16, 16, 3)},
    "molmo2": {
        "pixel_values": lambda t: t.floats(t.batch_size, 16, 192),
        "image_token_pooling": lambda t: torch.arange(16 * t.batch_size).reshape(-1, 4),
        "image_grids": lambda t: torch.tensor([[2, 2, 0, 0]] * t.batch_size),
        "image_num_crops": lambda t: torch.ones(t.batch_size, dtype=torch.long),
        "pixel_values_videos": None,
    },
    "musicgen": {"labels": lambda t: t.tokens(t.batch_size, t.num_tokens, 4)},
    "musicgen_melody": {
        "input_features": lambda t: t.floats(t.batch_size, 32, 12),
        "labels": lambda t: t.tokens(t.batch_size, t.num_tokens, 4),
    },
    "nemotron_h_omni": {
        "pixel_values": lambda t: t.floats(t.batch_size * 16, 192),
        "image_grid_hw": lambda t: torch.tensor([[4, 4]] * t.batch_size),
    },
    "kyutai_speech_to_text": {
        "input_ids": lambda t: t.tokens(t.batch_size, t.num_tokens, 33),
        "labels": lambda t: t.tokens(t.batch_size, t.num_tokens),
    },
    "moss_transcribe_diarize": {"input_features": lambda t: t.floats(t.batch_size, 16, 128)},
    "muse_glimmer": {"pixel_values": lambda t: t.floats(t.batch_size * 16, 384)},
    "muse_spark": {"pixel_values": lambda t: t.floats(t.batch_size * 16, 384), "input_values": None},
    "paddleocr_vl": {"pixel_values": lambda t: t.floats(t.batch_size * 16, 3, 8, 8)},
    "pe_audio": {"input_values": lambda t: t.floats(t.batch_size, 1, 6400)},
    "qwen3_asr": {
        "input_features": lambda t: t.floats(t.batch_size, 16, 100),
        "input_features_mask": lambda t: torch.ones(t.batch_size, 100, dtype=torch.long),
    },
    "fun_asr_nano": {"input_features": lambda t: t.floats(t.batch_size, 32, 112)},
    "granite_docling": {
        "pixel_values": lambda t: t.floats(t.batch_size, 1, 3, *t.image_size),
        "pixel_attention_mask": lambda t: torch.ones(t.batch_size, 1, dtype=torch.bool),
    },
    "flava": {
        "mim_labels": lambda t: t.integers(0, 128, t.batch_size, 4, 4),
        "mlm_labels": lambda t: t.tokens(t.batch_size, t.num_tokens),
        "itm_labels": lambda t: t.integers(0, 2, t.batch_size),
    },
    "higgs_audio_v2": {
        "input_ids": lambda t: t.with_tokens(2, 6, t.config.audio_token_id),
        "audio_input_ids": lambda t: t.tokens(t.batch_size, 4, t.config.num_codebooks),
        "audio_input_ids_mask": lambda t: torch.ones(t.batch_size, 4, dtype=torch.bool),
        "audio_labels": lambda t: t.tokens(t.batch_size, 4, t.config.num_codebooks),
        "labels": None,
    },
    "timesfm2_5": {
        "past_values": lambda t: t.floats(t.batch_size, 64),
        "future_values": lambda t: t.floats(t.batch_size, 128),
    },
    "neomme": {"pixel_values": None},
    "dots3_note": {"input_features": None},
    "vibevoice": {"input_values": None},
    "vibevoice_asr": {"input_values": lambda t: t.floats(t.batch_size, 1, 3200)},
    "video_llama_3": {"image_merge_sizes": lambda t: torch.ones(t.batch_size, dtype=torch.long)},
    "video_llava": {
        "pixel_values": None,
        "pixel_values_videos": None,
        "pixel_values_images": lambda t: t.floats(t.batch_size, 3, *t.image_size),
    },
    "voxtral_realtime": {"input_features": lambda t: t.floats(t.batch_size, 16, 128)},
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
    "visual_bert": {
        "visual_embeds": lambda t: t.floats(t.batch_size, 4, t.config.visual_embedding_dim),
        "visual_attention_mask": lambda t: torch.ones(t.batch_size, 4),
        "visual_token_type_ids": lambda t: torch.ones(t.batch_size, 4, dtype=torch.long),
        "labels": lambda t: t.tokens(t.batch_size, t.num_tokens + 4),
    },
}
for _name, _width in (("gemma4", 192), ("gemma4_unified", 1728)):
    INPUTS[_name] = {
        "input_features": None, "input_features_mask": None,
        "pixel_values": lambda t, width=_width: t.floats(t.batch_size, 16, width),
        "image_position_ids": lambda t: torch.cartesian_prod(*[torch.arange(4)] * 2).repeat(t.batch_size, 1, 1),
    }  # fmt: skip
for _name in ("gradium_phonon_tts", "pocket_tts"):
    INPUTS[_name] = {
        "input_ids": lambda t: t.with_tokens(1, 2, t.config.audio_bos_token_id, 8, t.config.audio_latent_token_id),
        "labels": lambda t: t.floats(t.batch_size, 6, t.config.latent_dim),
    }
for _name in ("idefics2", "idefics3", "smolvlm", "modernvbert", "ultravbert"):
    INPUTS[_name] = {"pixel_values": lambda t: t.floats(t.batch_size, 1, 3, *t.image_size)}
for _name in ("llava_next", "llava_next_video", "llava_onevision", "granite4_vision"):
    INPUTS[_name] = {"pixel_values": lambda t: t.floats(t.batch_size, 2, 3, *t.image_size)}
for _name, _frames in (("vjepa2", 4), ("videoprism", 16), ("videoprism_vision_model", 16)):
    INPUTS[_name] = {"pixel_values_videos": lambda t, frames=_frames: t.floats(t.batch_size, frames, 3, *t.image_size)}
for _name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"):
    INPUTS[_name] = {"input_features": None, "feature_attention_mask": None}
for _name in ("nemotron3_5_asr", "nemotron_asr_streaming", "parakeet_rnnt", "parakeet_tdt"):
    INPUTS[_name] = {"decoder_input_ids": lambda t: t.tokens(t.batch_size, 5)}
for _name in ("grounding-dino", "mm-grounding-dino"):
    INPUTS[_name] = {"input_ids": lambda t: t.between(101, 102)}
for _name in ("granite_speech", "granite_speech_plus"):
    INPUTS[_name] = {"input_features_mask": lambda t: torch.ones(t.batch_size, 8, dtype=torch.bool)}
for _name in ("autoformer", "informer", "time_series_transformer"):
    INPUTS[_name] = {
        "past_values": lambda t: t.floats(t.batch_size, 23),
        "past_time_features": lambda t: t.floats(t.batch_size, 23, max(t.config.num_time_features, 1)),
        "past_observed_mask": lambda t: torch.ones(t.batch_size, 23),
        "future_values": lambda t: t.floats(t.batch_size, 8),
        "future_time_features": lambda t: t.floats(t.batch_size, 8, max(t.config.num_time_features, 1)),
    }
    CONFIGS[_name]["num_time_features"] = 1
