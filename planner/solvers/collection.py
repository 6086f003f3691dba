"""Planning without the cyclic garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Switch off the cyclic garbage collector, which takes a quarter of importing a model's libraries and of capturing,
    and a tenth of a search: planning makes few cycles, and there are millions of objects to look through.

    Also a decorator, ``@no_collection()``.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
