"""The config library: names, models, batches, and errors that say what to do."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from passes.ir.graph import Graph
from passes.rules.operator_call import bind
from planner.library import build_model, config_names, example_batch, example_ids, load_config, random_batch
from planner.library.batch_sizes import takes_tokens
from planner.planning import capture_for_planning
from tests.cells import cells

pytest.importorskip("transformers")

#: Billions of parameters, as published; weights that are tied count once.
SIZES = {
    # GPT-2, GPT-3 (Brown et al. 2020, table 2.1) and Megatron (Narayanan et al. 2021, table 1; Korthikanti et al. 2022)
    "gpt2": 0.124, "gpt2-medium": 0.355, "gpt2-large": 0.774, "gpt2-xl": 1.558, "gpt3-125m": 0.125,
    "gpt3-350m": 0.356, "gpt3-760m": 0.76, "gpt3-1.3b": 1.316, "gpt3-2.7b": 2.651, "gpt3-6.7b": 6.66,
    "gpt3-13b": 12.85, "gpt3-175b": 174.6, "megatron-1.7b": 1.65, "megatron-3.6b": 3.56, "megatron-7.5b": 7.5,
    "megatron-18b": 18.4, "megatron-22b": 22.0, "megatron-39b": 39.1, "megatron-76b": 76.1, "megatron-145b": 145.6,
    "megatron-175b": 174.6, "megatron-310b": 310.1, "megatron-530b": 529.6, "megatron-1t": 1008.0, "gpt-j-6b": 6.05,
    "gpt-neox-20b": 20.55,
    # Llama and its likes
    "llama-7b": 6.74, "llama-13b": 13.02, "llama-30b": 32.53, "llama-65b": 65.29, "llama-2-7b": 6.74,
    "llama-2-13b": 13.0, "llama-2-70b": 69.0, "llama-3-8b": 8.03, "llama-3-70b": 70.6, "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6, "llama-3.1-405b": 405.9, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "tinyllama-1.1b": 1.1,
    "deepseek-llm-7b": 6.91, "deepseek-llm-67b": 67.4, "yi-6b": 6.06, "yi-34b": 34.39,
    # Mistral, Qwen, Gemma, Phi, Falcon
    "mistral-7b-v0.1": 7.24, "mistral-7b": 7.25, "mistral-nemo-12b": 12.25, "mistral-large-123b": 122.6,
    "mixtral-8x7b": 46.7, "mixtral-8x22b": 140.6, "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.77, "qwen2.5-32b": 32.76, "qwen2.5-72b": 72.71, "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.77, "qwen3-32b": 32.76, "gemma-2b": 2.51,
    "gemma-7b": 8.54, "gemma-2-2b": 2.61, "gemma-2-9b": 9.24, "gemma-2-27b": 27.23, "gemma-3-1b": 1.0,
    "gemma-3-4b": 3.88, "gemma-3-12b": 11.77, "gemma-3-27b": 27.01, "phi-1.5": 1.42, "phi-2": 2.78,
    "phi-3-mini": 3.82, "phi-4": 14.66, "falcon-7b": 6.92, "falcon-40b": 41.3,
    # OPT, BLOOM
    "opt-125m": 0.125, "opt-350m": 0.331, "opt-1.3b": 1.32, "opt-2.7b": 2.65, "opt-6.7b": 6.66, "opt-13b": 12.85,
    "opt-30b": 29.97, "opt-66b": 65.7, "opt-175b": 174.6, "bloom-560m": 0.559, "bloom-1b7": 1.72, "bloom-3b": 3.0,
    "bloom-7b1": 7.07, "bloom-176b": 176.25,
    # Encoders and sequence to sequence
    "t5-small": 0.0605, "t5-base": 0.223, "t5-large": 0.738, "t5-3b": 2.85, "t5-11b": 11.31, "t5-xl": 2.85,
    "t5-xxl": 11.14, "bart-base": 0.139, "bart-large": 0.406, "bert-base": 0.1095, "bert-large": 0.335,
    "roberta-base": 0.125, "roberta-large": 0.355,
    # Images; the wide ResNets as encoder (Chen et al. 2020) and 1000 classes on 2048 × width features
    "vit-base": 0.0866, "vit-large": 0.304, "vit-huge": 0.632, "vit-giant": 1.013, "vit-gigantic": 1.843,
    "resnet-50": 0.02556, "wide-resnet-50x2": 0.0981, "wide-resnet-50x4": 0.3832, "wide-resnet-50x8": 1.517,
    "wide-resnet-101x2": 0.1741, "wide-resnet-152x2": 0.2371,
    # Mixtures of experts, all experts counted: model cards and reports (DeepSeek-V3 without its prediction module)
    "qwen1.5-moe-a2.7b": 14.3, "qwen2-57b-a14b": 57.4, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.0,
    "deepseek-v2-lite": 15.7, "deepseek-v2": 236.0, "deepseek-v3": 671.0, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8,
    "olmoe-1b-7b": 6.92, "llama-4-scout": 109.0, "llama-4-maverick": 400.0, "jamba-v0.1": 51.6,
    # Images and text: model cards, as stored
    "clip-vit-b-32": 0.1513, "clip-vit-l-14": 0.4276, "siglip-base-224": 0.2032, "siglip-so400m-384": 0.878,
    "llava-1.5-7b": 7.06, "llava-1.5-13b": 13.35, "qwen2-vl-7b": 8.29, "qwen2-vl-72b": 73.4, "qwen2.5-vl-7b": 8.29,
    "qwen2.5-vl-72b": 73.4, "llama-3.2-11b-vision": 10.67,
    # Speech: Whisper as stored (Radford et al. 2022 round to 39M, 74M, 244M, 769M, 1550M); wav2vec 2.0 (Baevski et al.
    # 2020) and HuBERT (Hsu et al. 2021, table 1) with a head of 32 letters
    "whisper-tiny": 0.0378, "whisper-base": 0.0726, "whisper-small": 0.2417, "whisper-medium": 0.764,
    "whisper-large": 1.543, "whisper-large-v3": 1.543, "wav2vec2-base": 0.095, "wav2vec2-large": 0.317,
    "hubert-base": 0.095, "hubert-large": 0.317, "hubert-xlarge": 0.964,
}  # fmt: skip


def test_every_config_is_tested() -> None:
    assert set(SIZES) == {name for name in config_names() if not name.startswith("tiny-")}


#: The configs of each model type, from the smallest to the largest.
BY_TYPE: dict[str, list[str]] = {}
for _name in sorted(SIZES, key=SIZES.__getitem__):
    BY_TYPE.setdefault(load_config(_name).model_type, []).append(_name)
#: What differs from a smaller and a larger config of its type in the numbers of its file alone.
BETWEEN = [name for names in BY_TYPE.values() for name in names[1:-1]]


@pytest.mark.parametrize("name", cells([name for name in config_names() if name not in BETWEEN], BETWEEN))
def test_models_have_their_published_size(name: str) -> None:
    model = build_model(load_config(name))
    assert all(parameter.is_meta for parameter in model.parameters()) and model.training
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert count == pytest.approx(SIZES[name], rel=0.01) if name in SIZES else count < 1e-3


#: Model types that are planned, tiny, in tests of their own and in ``benchmarks.coverage``.
ELSEWHERE = {
    "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "olmoe", "jamba", "llama4", "siglip", "llava",
    "qwen2_vl", "qwen2_5_vl", "mllama", "wav2vec2", "hubert",
}  # fmt: skip

#: One name for each other model type of the library: the smallest.
TYPES = {model_type: names[0] for model_type, names in BY_TYPE.items() if model_type not in ELSEWHERE}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def shortened(name: str) -> Any:
    """The config with two layers of every kind that it has."""
    config = load_config(name)
    for part in (config, *(getattr(config, field) for field in config.sub_configs)):
        _shorten(part)
    return config


def _shorten(config: Any) -> None:
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    for field in LAYERS:
        if isinstance(getattr(config, field, None), int):
            setattr(config, field, max(2, len(kinds)))
    if kinds:
        config.layer_types = kinds * 2 if len(kinds) == 1 else kinds
    if hasattr(config, "depths"):
        config.depths = [1] * len(config.depths)


@functools.cache
def captured(name: str) -> Graph:
    """The graph of the shortened model on 4 samples of 64 tokens."""
    return capture_for_planning(shortened(name), batch_size=4, seq_len=64)


@pytest.mark.parametrize("name", TYPES.values(), ids=TYPES.keys())
def test_every_model_type_can_be_captured(name: str) -> None:
    """On meta tensors, with the batch first in every input."""
    graph = captured(name)
    assert graph.loss == "loss" and graph.model_name == load_config(name).architectures[0]
    batch_inputs = [value for value in graph.inputs if value.shape[0] == 4]
    assert len(batch_inputs) == len(graph.inputs) >= 2


@pytest.mark.parametrize("name", ["tiny-llava", "tiny-wav2vec2"])
def test_models_whose_code_reads_ids_are_captured_by_name(name: str) -> None:
    """How many tokens stand for an image; whether every label is in the vocabulary: of ids that are made up."""
    graph = capture_for_planning(name, batch_size=2, seq_len=16)
    assert graph.loss == "loss" and graph.guards.input_paths


def test_models_that_are_told_where_images_stand_are_told_so() -> None:
    config = load_config("qwen2-vl-7b")
    batch = example_ids(config, batch_size=2, seq_len=80)
    assert (batch["mm_token_type_ids"] == (batch["input_ids"] == config.image_token_id)).all()
    assert batch["mm_token_type_ids"].sum(1).tolist() == [64, 64]


#: Model types that have eager attention only, or add a learned bias to their scores.
WITH_SCORES = {"bloom", "gptj", "gemma2", "t5", "resnet"}


@pytest.mark.parametrize("name", sorted({"llama-3.1-8b", *TYPES.values()}))
def test_attention_needs_no_mask(name: str) -> None:
    """Causal or not, it is left to the kernel."""
    config = shortened(name)
    if config.model_type in WITH_SCORES:
        pytest.skip("its scores are made by hand")
    graph = captured(name)
    calls = [bind(node, graph.values) for node in graph.nodes if "scaled_dot_product" in node.op]
    assert calls and not any(call is None or call.has("attn_mask") for call in calls)
    causal = {call["is_causal"] for call in calls if call is not None}
    expected = {
        "bart": {False, True},
        "whisper": {False, True},
        "clip": {False, True},
        "bert": {False},
        "roberta": {False},
        "vit": {False},
    }
    assert causal == expected.get(config.model_type, {True})


@pytest.mark.parametrize("name", [name for name in config_names() if name.startswith("tiny-")])
def test_tiny_models_take_a_random_batch(name: str) -> None:
    model = build_model(name, device="cpu")
    batch = random_batch(model, batch_size=3, seq_len=8, seed=1)
    assert model(**batch).loss.isfinite()
    meta = example_batch(model, batch_size=3, seq_len=8)
    flags = {key for key, value in batch.items() if value is True}
    assert set(batch) == set(meta) and flags == {key for key, value in meta.items() if value is True}
    tensors = set(batch) - flags
    assert all((batch[key].shape, batch[key].dtype) == (meta[key].shape, meta[key].dtype) for key in tensors)
    again = random_batch(model, batch_size=3, seq_len=8, seed=1)
    assert all(torch.equal(batch[key], again[key]) for key in tensors)


def test_rows_ignore_different_numbers_of_tokens() -> None:
    batch = random_batch(load_config("tiny-llama"), batch_size=8, seq_len=32)
    num_labels = (batch["labels"] != -100).sum(1)
    assert num_labels.min() >= 2 and len(set(num_labels.tolist())) > 2


def test_an_image_stands_in_the_text_as_the_tokens_that_its_features_replace() -> None:
    config = load_config("tiny-llava")
    ids = random_batch(config, batch_size=3, seq_len=8)["input_ids"]
    assert (ids == config.image_token_index).sum(1).tolist() == [4, 4, 4]
    with pytest.raises(ValueError, match=r"seq_len 5 is too short: an image takes 4 tokens, expected 6 or more"):
        random_batch(config, batch_size=3, seq_len=5)


def test_grids_of_patches_have_values_in_a_batch_of_shapes() -> None:
    batch = example_batch(load_config("qwen2-vl-7b"), batch_size=2, seq_len=80)
    assert batch["image_grid_thw"].tolist() == [[1, 16, 16]] * 2 and batch["pixel_values"].is_meta


def test_dtype_of_parameters_and_pixels() -> None:
    model = build_model("tiny-vit", dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert example_batch(model, batch_size=2)["pixel_values"].dtype == torch.bfloat16


def test_images_have_the_size_of_the_config_or_the_usual_one() -> None:
    config = load_config("tiny-vit")
    assert example_batch(config, batch_size=2)["pixel_values"].shape[-2:] == (config.image_size, config.image_size)
    del (resnet := load_config("resnet-50")).image_size
    assert example_batch(resnet, batch_size=2)["pixel_values"].shape == (2, 3, 224, 224)


def test_configs_from_files_and_folders(tmp_path: Path) -> None:
    entries = {"model_type": "gpt2", "architectures": ["GPT2Model"], "n_layer": 3}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert load_config(tmp_path).n_layer == load_config(tmp_path / "config.json").n_layer == 3
    assert type(build_model(load_config(tmp_path))).__name__ == "GPT2LMHeadModel", "a model without head gets one"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read"),
        ("[]", "no 'model_type'; expected the config.json"),
        ('{"model_type": "nonsense"}', "does not know model type 'nonsense'.* install a transformers that has it"),
        ('{"model_type": "lama"}', "does not know model type 'lama', did you mean 'llama'"),
    ],
)
def test_bad_config_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(path)


def test_embeddings_are_tied_as_the_config_says() -> None:
    """transformers ties those of every T5; in version 1.1 they are not."""
    for name, tied in (("t5-xl", False), ("t5-large", True), ("qwen3-0.6b", True), ("qwen3-8b", False)):
        model: Any = build_model(shortened(name))
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'lama-3-8b': did you mean 'llama-3-8b'.*tiny-vit"):
        load_config("lama-3-8b")


@pytest.mark.parametrize("name", config_names())
def test_the_class_of_a_config_says_whether_its_batches_need_tokens(name: str) -> None:
    """What ``planner plan`` says before transformers is loaded is what the batch of the config says then."""
    told = takes_tokens(name)
    config = load_config(name)
    try:
        example_batch(config, batch_size=2)
        needed = False
    except ValueError as error:
        assert "seq_len is missing" in str(error)
        needed = True
    assert told in (None, needed) and (told is not None or config.model_type in ("clip", "siglip"))


def test_sizes_that_do_not_fit() -> None:
    config = load_config("tiny-gpt2")
    with pytest.raises(ValueError, match="more than the 128 positions"):
        example_batch(config, batch_size=2, seq_len=256)
    roberta = load_config("roberta-base")
    assert example_batch(roberta, batch_size=2, seq_len=512)["input_ids"].shape == (2, 512)
    with pytest.raises(ValueError, match="more than the 512 positions"):
        example_batch(roberta, batch_size=2, seq_len=513)
    with pytest.raises(ValueError, match="seq_len is missing"):
        example_batch(config, batch_size=2)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        example_batch(config, batch_size=0, seq_len=8)
    with pytest.raises(ValueError, match="unknown dtype 'float8'"):
        build_model(config, dtype="float8")
    with pytest.raises(ValueError, match="cannot make up a batch for Linear"):
        example_batch(torch.nn.Linear(2, 2), batch_size=2)
