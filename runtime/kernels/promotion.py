"""The dtypes that operands promote to."""

from __future__ import annotations

import functools

import torch


def promotion_of(*dtypes: torch.dtype) -> torch.dtype:
    """What dtypes promote to together; for functions that a compiler traces, which leave caches out with a warning."""
    return functools.reduce(torch.promote_types, dtypes)


#: The same where it is asked for at every call.
known_promotion_of = functools.cache(promotion_of)
