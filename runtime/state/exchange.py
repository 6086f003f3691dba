"""Gives tensors that scripts hold another content; they stay the same objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def exchange(target: torch.Tensor, new: torch.Tensor) -> None:
    """Give ``target`` the content of ``new``, and the other way round, each with its class and attributes.

    An autograd graph that still leads to ``target``, as that of outputs which a script holds, raises when it is run
    again; graphs made from now on do not see it.

    Raises:
        ValueError: if such a graph has kept ``target`` itself for a backward pass that has not run.
    """
    try:
        with _found_in_graphs(target, new):
            torch.utils.swap_tensors(target, new)
    except RuntimeError as error:
        if "use_count" not in str(error):
            raise
        raise ValueError(
            f"a parameter of shape {list(target.shape)} is kept by an autograd graph whose backward has not run, or "
            "ran with retain_graph=True: run it, or delete what a script still holds of it (losses, outputs), first"
        ) from error


@contextmanager
def _found_in_graphs(target: torch.Tensor, new: torch.Tensor) -> Iterator[None]:
    """Torch finds the graphs that lead to ``target`` though it was frozen since they were made."""
    if not target.is_leaf or target.requires_grad or not target.is_floating_point():
        yield
        return
    exchanged = False
    target.requires_grad = True
    try:
        yield
        exchanged = True
    finally:
        (new if exchanged else target).requires_grad = False
