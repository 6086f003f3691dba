"""The task that a Hugging Face model is trained for, derived from its class."""

from __future__ import annotations

from typing import Any

from planner.library.installed_transformers import transformers_module

CAUSAL_LM = "causal_lm"
SEQ_TO_SEQ_LM = "seq_to_seq_lm"
MASKED_LM = "masked_lm"
IMAGE_CLASSIFICATION = "image_classification"
SEQUENCE_CLASSIFICATION = "sequence_classification"
TOKEN_CLASSIFICATION = "token_classification"
SPEECH_TO_TEXT = "speech_to_text"
SPEECH_FRAMES = "speech_frames"
IMAGE_TEXT_TO_TEXT = "image_text_to_text"
IMAGE_TEXT_PAIRS = "image_text_pairs"

#: Task → transformers' table of classes by model type; the order in which a head is chosen for a bare model.
TABLES = {
    SEQ_TO_SEQ_LM: "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    MASKED_LM: "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    SPEECH_TO_TEXT: "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    CAUSAL_LM: "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    IMAGE_CLASSIFICATION: "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    SEQUENCE_CLASSIFICATION: "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    TOKEN_CLASSIFICATION: "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    SPEECH_FRAMES: "MODEL_FOR_CTC_MAPPING_NAMES",
    IMAGE_TEXT_TO_TEXT: "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    IMAGE_TEXT_PAIRS: "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}


def task_of(class_name: str) -> str:
    """The task of a model class.

    Raises:
        ValueError: if it is none that a batch can be made up for.
    """
    tables = {task: _table(name) for task, name in TABLES.items()}
    for task, table in tables.items():
        if class_name in table.values():
            return task
    raise ValueError(
        f"cannot make up a batch for {class_name}: known are models for {', '.join(tables)}; pass example_inputs="
    )


def training_class(model_type: str, architectures: list[str] | None) -> Any:
    """The class with a training head: the first of ``architectures``, or the usual one for the model type.

    Raises:
        ValueError: if transformers has none.
    """
    transformers = transformers_module()
    for name in architectures or ():
        if hasattr(transformers, name) and any(name in _table(table).values() for table in TABLES.values()):
            return getattr(transformers, name)
    for table in TABLES.values():
        class_names = _table(table).get(model_type)
        if class_names is not None:
            return getattr(transformers, class_names if isinstance(class_names, str) else class_names[0])
    raise ValueError(
        f"no class with a training head for model type {model_type!r} and architectures {architectures}: "
        f"expected one for {', '.join(TABLES)}"
    )


def _table(name: str) -> dict[str, Any]:
    transformers_module()
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, name))
