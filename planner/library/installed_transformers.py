"""The installed transformers, which has to be one that is supported."""

from __future__ import annotations

import re
from typing import Any

#: The oldest release that is supported, as in ``pyproject.toml``: the suite runs with it (``make test-oldest``). The
#: Trainer of 5.4 adds up other gradients on a plan, that of 5.2 has other methods.
OLDEST = (5, 17)


def transformers_module() -> Any:
    """The transformers package.

    Raises:
        ValueError: if it is not installed, or too old.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError("Hugging Face models need the transformers package: pip install 'meshwright[hf]'") from error
    check_version(transformers.__version__)
    return transformers


def check_version(version: str) -> None:
    """Raise ValueError if a version of transformers is older than what is supported."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ValueError(
            f"transformers {version} is installed, and Meshwright needs {oldest} or newer: "
            f"pip install 'transformers>={oldest},<6'"
        )
