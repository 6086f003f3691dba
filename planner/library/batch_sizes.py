"""Samples and tokens of a batch, checked by the text of a config: transformers takes seconds to load."""

from __future__ import annotations

from pathlib import Path

from planner.library.configs import config_entries, config_file

NO_SAMPLES = "batch_size (global_batch, --global-batch) is missing: give the samples in a step, over all devices"
#: Samples, or tokens of one: with more, numbers of elements no longer fit into 64 bits.
MOST_OF_A_BATCH = 10**8
NO_LENGTH = "seq_len is missing: give the number of tokens of each sample"

#: Ends of the names of classes whose samples have tokens, or labels that are counted as such.
_TOKENS = (
    "ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForSequenceClassification",
    "ForTokenClassification", "ForCTC",
)  # fmt: skip
_IMAGES = ("ForImageClassification",)


def check_batch_sizes(model: str | Path, *, batch_size: int | None, seq_len: int | None) -> None:
    """Raise ValueError for a config that cannot be read, or a size of its batch that is missing or too large."""
    tokens = takes_tokens(model)
    for name, value in (("batch_size (global_batch, --global-batch)", batch_size), ("seq_len", seq_len)):
        if value is not None and not 1 <= value <= MOST_OF_A_BATCH:
            raise ValueError(f"{name} must be a whole number from 1 to {MOST_OF_A_BATCH:,}, got {value:,}")
    if batch_size is None:
        raise ValueError(NO_SAMPLES)
    if seq_len is None and tokens:
        raise ValueError(NO_LENGTH)


def takes_tokens(model: str | Path) -> bool | None:
    """Whether samples of a config's model have tokens, by the name of its class; None if that does not say.

    Raises:
        ValueError: as ``load_config``, but for what only transformers knows.
    """
    classes = config_entries(config_file(str(model))).get("architectures")
    name = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
    if name.endswith(_TOKENS):
        return True
    return False if name.endswith(_IMAGES) else None
