"""Which class of transformers stands for a model type: one that computes a loss of its own."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

#: Tables of transformers' automatic classes, in the order in which a head is looked for.
TABLES = (
    "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "CTC", "RNNT", "TDT", "CAUSAL_LM",
    "MULTIMODAL_LM", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "IMAGE_SEGMENTATION",
    "MASKED_IMAGE_MODELING", "TIME_SERIES_PREDICTION", "TIME_SERIES_CLASSIFICATION", "TIME_SERIES_REGRESSION",
    "SEQUENCE_CLASSIFICATION", "QUESTION_ANSWERING", "VISUAL_QUESTION_ANSWERING", "TOKEN_CLASSIFICATION",
    "TABLE_QUESTION_ANSWERING", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "ZERO_SHOT_OBJECT_DETECTION", "RETRIEVAL", "DEPTH_ESTIMATION", "CAUSAL_IMAGE_MODELING", "IMAGE_TO_IMAGE",
    "PRETRAINING", "KEYPOINT_DETECTION", "POSE_ESTIMATION", "DECISION",
)  # fmt: skip

#: Model type → class, where the tables name none that trains, or a worse one.
CLASSES: dict[str, str] = {
    "autoformer": "AutoformerForPrediction",
    "bridgetower": "BridgeTowerForContrastiveLearning",
    "informer": "InformerForPrediction",
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
    "seggpt": "SegGptForImageSegmentation",
    "time_series_transformer": "TimeSeriesTransformerForPrediction",
}

#: Arguments of ``forward`` that make a model compute a loss.
LOSS_ARGUMENTS = frozenset({
    "labels", "return_loss", "start_positions", "next_sentence_label", "mask_labels", "future_values", "target_values",
})  # fmt: skip


def model_types() -> dict[str, str]:
    """Model type → the name of the class that trains it, for every type that has one; sorted."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    classes = {model_type: _class_of(model_type) for model_type in sorted(CONFIG_MAPPING_NAMES)}
    return {model_type: name for model_type, name in classes.items() if name is not None}


def class_of(model_type: str) -> str:
    """The class that trains a model type.

    Raises:
        ValueError: if there is none.
    """
    name = _class_of(model_type)
    if name is None:
        raise ValueError(f"no class of transformers computes a loss for model type {model_type!r}")
    return name


def _class_of(model_type: str) -> str | None:
    from transformers.models.auto import modeling_auto

    tables = [
        dict(getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {})) for table in TABLES
    ]  # newer ones too
    tables.append(dict(modeling_auto.MODEL_MAPPING_NAMES))
    names = [CLASSES[model_type]] if model_type in CLASSES else _names(tables, model_type)
    return next((name for name in names if _computes_loss(name)), None)


def _names(tables: list[dict[str, Any]], model_type: str) -> list[str]:
    entries = (table.get(model_type, ()) for table in tables)
    return [name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry)]


def reads_labels(cls: type) -> bool:
    """Whether the class's ``forward`` does anything with an argument that makes a model compute a loss."""
    forward = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward))))  # type: ignore[attr-defined]
    names = (node for node in ast.walk(forward) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return any(name.id in LOSS_ARGUMENTS for name in names)


def _computes_loss(name: str) -> bool:
    """Whether the class takes labels."""
    import transformers

    try:
        forward = getattr(transformers, name).forward
    except (AttributeError, ImportError, RuntimeError):  # needs a package that is not installed
        return False
    return bool(LOSS_ARGUMENTS & set(inspect.signature(forward).parameters))
