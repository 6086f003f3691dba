"""The error of a search that found no plan, which says whether there is none."""

from __future__ import annotations


class NoPlan(ValueError):
    """No plan was found. ``proved``: there is none; else a limit ended the search before it knew."""

    def __init__(self, message: str, *, proved: bool = True) -> None:
        super().__init__(message)
        self.proved = proved
