"""Reasons that are the model's, not ours, as data: what it raises or does on one device."""

from __future__ import annotations

import re

#: Pattern of the reason → what it says of the model.
PATTERNS: tuple[tuple[str, str], ...] = (
    (r"requires the (\w+) library", r"needs the package \1, which is not installed"),
    (r"[Tt]raining [\w ]*is not (yet )?(implemented|supported)|does not support training|is not trainable",
     "says itself that it does not train"),
    (r"takes labels, and its forward reads them nowhere", "takes labels, which its forward reads nowhere: no loss"),
    (r"draws a number and reads it in Python, where it decides",
     "decides by a number drawn on the host what each call computes"),
    (r"the shape of a result depends on a value, which depends on the parameter",
     "makes shapes of values that its weights decide"),
    (r"ForCausalLMLoss\(\) missing 1 required positional argument", "transformers calls a loss of another kind for it"),
)  # fmt: skip


def model_reason(reason: str) -> str | None:
    """One line that says what of the model stands in the way; None if the reason is not its own."""
    for pattern, sentence in PATTERNS:
        match = re.search(pattern, reason)
        if match is not None:
            return match.expand(sentence)
    return None
