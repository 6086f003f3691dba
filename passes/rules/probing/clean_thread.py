"""Running something where no mode of the caller's is on: modes of torch belong to a thread."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def on_clean_thread(work: Callable[[], Result], *, name: str) -> Result:
    """What ``work`` returns, or raises, on a thread of its own: no tracing, no device, gradients on, no warnings."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results.append(work())
        except BaseException as error:  # raised again where it is waited for
            errors.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
