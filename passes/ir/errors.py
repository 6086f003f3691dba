"""Errors that several passes raise; here so that they can be caught without importing torch."""

from __future__ import annotations


class CaptureError(ValueError):
    """A model could not be captured; the message names the module and the source line."""
