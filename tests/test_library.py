"""The config library: names, models, batches, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from planner.library import build_model, config_names, example_batch, load_config, random_batch

pytest.importorskip("transformers")

#: Billions of parameters, as published.
SIZES = {
    "gpt2": 0.124, "gpt2-medium": 0.355, "gpt2-large": 0.774, "gpt2-xl": 1.558, "llama-2-7b": 6.74, "llama-2-13b": 13.0,
    "llama-2-70b": 69.0, "llama-3-8b": 8.03, "llama-3-70b": 70.6, "opt-125m": 0.125, "opt-350m": 0.331,
    "opt-1.3b": 1.32, "opt-2.7b": 2.65, "opt-6.7b": 6.66, "opt-13b": 12.85, "bloom-560m": 0.559, "bloom-7b1": 7.07,
    "t5-small": 0.0605, "t5-base": 0.223, "t5-large": 0.738, "bert-base": 0.1095, "bert-large": 0.335,
    "vit-base": 0.0866, "vit-large": 0.304, "vit-huge": 0.632,
}  # fmt: skip


def test_every_config_is_tested() -> None:
    assert set(SIZES) == {name for name in config_names() if not name.startswith("tiny-")}


@pytest.mark.parametrize("name", config_names())
def test_models_have_their_published_size(name: str) -> None:
    model = build_model(load_config(name))
    assert all(parameter.is_meta for parameter in model.parameters()) and model.training
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert count == pytest.approx(SIZES[name], rel=0.01) if name in SIZES else count < 1e-3


@pytest.mark.parametrize("name", [name for name in config_names() if name.startswith("tiny-")])
def test_tiny_models_take_a_random_batch(name: str) -> None:
    model = build_model(name, device="cpu")
    batch = random_batch(model, batch_size=3, seq_len=8, seed=1)
    assert model(**batch).loss.isfinite()
    meta = example_batch(model, batch_size=3, seq_len=8)
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in batch.items()} == {
        key: (tensor.shape, tensor.dtype) for key, tensor in meta.items()
    }
    again = random_batch(model, batch_size=3, seq_len=8, seed=1)
    assert all(torch.equal(batch[key], again[key]) for key in batch)


def test_rows_ignore_different_numbers_of_tokens() -> None:
    batch = random_batch(load_config("tiny-llama"), batch_size=8, seq_len=32)
    kept = (batch["labels"] != -100).sum(1)
    assert kept.min() >= 2 and len(set(kept.tolist())) > 2


def test_dtype_of_parameters_and_pixels() -> None:
    model = build_model("tiny-vit", dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert example_batch(model, batch_size=2)["pixel_values"].dtype == torch.bfloat16


def test_configs_from_files_and_folders(tmp_path: Path) -> None:
    entries = {"model_type": "gpt2", "architectures": ["GPT2Model"], "n_layer": 3}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert load_config(tmp_path).n_layer == load_config(tmp_path / "config.json").n_layer == 3
    assert type(build_model(load_config(tmp_path))).__name__ == "GPT2LMHeadModel", "a model without head gets one"


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot read"), ("[]", "no 'model_type'"), ('{"model_type": "nonsense"}', "does not know model type")],
)
def test_bad_config_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(path)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'lama-3-8b': did you mean 'llama-3-8b'.*tiny-vit"):
        load_config("lama-3-8b")


def test_sizes_that_do_not_fit() -> None:
    config = load_config("tiny-gpt2")
    with pytest.raises(ValueError, match="more than the 128 positions"):
        example_batch(config, batch_size=2, seq_len=256)
    with pytest.raises(ValueError, match="seq_len is missing"):
        example_batch(config, batch_size=2)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        example_batch(config, batch_size=0, seq_len=8)
    with pytest.raises(ValueError, match="unknown dtype 'float8'"):
        build_model(config, dtype="float8")
    with pytest.raises(ValueError, match="cannot make up a batch for Linear"):
        example_batch(torch.nn.Linear(2, 2), batch_size=2)
