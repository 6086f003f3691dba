"""The config library: names, and reading a config by name or from a path.

Sizes are those of the published configs. Where papers leave something open:

* ``gpt3-*`` keep GPT-2's vocabulary of 50,257 tokens; ``megatron-*`` pad it to 51,200, as their published sizes do.
  ``gpt3-1.3b`` has 16 heads of 128 (the paper's 24 do not divide its width), ``gpt3-13b`` is 5,120 wide (not 5,140).
* ``t5-xl`` and ``t5-xxl`` are version 1.1 (gated, the head not tied); ``t5-3b`` and ``t5-11b`` are version 1.0.
* ``vit-giant`` is ViT-g/14, ``vit-gigantic`` ViT-G/14. ``wide-resnet-50x2`` is ResNet-50 with twice the channels
  everywhere, inside and outside its bottlenecks.
* ``deepseek-v3`` is without its multi-token prediction module, which transformers does not build either (671B, not
  685B).
* ``clip-*``, ``siglip-*``: batches are images with their texts, and the loss is contrastive over the whole batch.
* ``llava-*``, ``llama-4-*``, ``qwen*-vl-*``: texts of one image each, its tokens first (Qwen's of 16 × 16 patches).
* ``whisper-*``: 30 seconds of sound; ``wav2vec2-*`` and ``hubert-*`` are fine-tuned by CTC on 32 letters, without the
  masks of their pre-training, which are drawn by NumPy.

Sizes come from the published configs on the models' pages; ``tests/test_library.py`` holds their numbers of parameters
against the published ones.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from cost_models.fields import suggest
from cost_models.files import read_json
from planner.library.installed_transformers import transformers_module

FOLDER = Path(__file__).parent / "configs"


def config_names() -> tuple[str, ...]:
    """The sorted names that ``load_config`` accepts."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load_config(name_or_path: str | Path) -> Any:
    """A transformers config: a name from the library, a ``config.json``, or a folder with one. Nothing is downloaded.

    Raises:
        ValueError: for an unknown name, a file that is no config, or a model type that transformers does not know.
    """
    path = config_file(str(name_or_path))
    entries = config_entries(path)
    model_type = entries.pop("model_type")
    transformers = transformers_module()
    try:
        config = transformers.AutoConfig.for_model(model_type, **entries)
    except Exception as error:  # its checks raise what they like
        if isinstance(error, ValueError) and "Unrecognized model identifier" in str(error):
            raise ValueError(
                f"{path}: transformers {transformers.__version__} does not know model type {str(model_type)[:60]!r}"
                f"{suggest(str(model_type), transformers.CONFIG_MAPPING)}; correct it, or install a transformers that "
                "has it; code of your own is planned from Python, planner.plan(module, cluster, example_inputs=…)"
            ) from error
        raise ValueError(f"{path}: transformers does not take this config: {error}") from error
    if isinstance(entries.get("tie_word_embeddings"), bool):
        config.tie_word_embeddings = entries["tie_word_embeddings"]  # T5's own config class says True whatever is given
    return config


def config_entries(path: Path) -> dict[str, Any]:
    """What stands in the file of a config, read without transformers.

    Raises:
        ValueError: for a file that is no config.
    """
    try:
        entries = read_json(path)
    except ValueError as error:
        raise ValueError(f"cannot read {path}: expected a Hugging Face config in JSON ({error})") from error
    if not isinstance(entries, dict) or "model_type" not in entries:
        raise ValueError(
            f"{path} is no Hugging Face config: it has no 'model_type'; expected the config.json of a model, which "
            'says what it is ("model_type": "llama")'
        )
    return entries


def config_file(name: str) -> Path:
    """The file of a library name or of a path.

    Raises:
        ValueError: if there is none.
    """
    names = config_names()
    if name in names:
        return FOLDER / f"{name}.json"
    path = Path(name).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        return path / "config.json"
    if path.is_file():
        return path
    if ":" in name or path.suffix == ".py":
        raise ValueError(
            f"unknown model {name!r}: models are named by configs here; one that is Python is planned from Python, "
            "planner.plan(module, cluster, example_inputs=…)"
        )
    if path.suffix == ".json" or len(path.parts) > 1 or path.is_dir():
        what = "a folder without a config.json" if path.is_dir() else "no file"
        raise ValueError(
            f"unknown model {name!r}: there is {what} of this name; expected the path of a config.json, a folder with "
            "one, or a name from the config library, such as llama-3-8b"
        )
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise ValueError(
        f"unknown model {name!r}: {hint}expected the path of a config.json, a folder with one, or one of "
        f"{', '.join(names)}"
    )
