"""Errors that several passes raise; here so that they can be caught without importing torch."""

from __future__ import annotations


class CaptureError(ValueError):
    """A model could not be captured; the message names the module and the source line."""


class MissingValues(CaptureError):
    """The value of an input decides what a model does, and the example has none (it is on the meta device)."""

    def __init__(self, path: tuple[str | int, ...], place: str) -> None:
        name = ".".join(map(str, path))
        super().__init__(
            f"in {place}: Python reads a value that depends on input {name!r}, which has none here (it is on the meta "
            "device, or left out): pass example_inputs with real tensors"
        )
        self.path = path
