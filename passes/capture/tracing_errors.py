"""Say of an error of tracing which module and which line of the model caused it, and what to do."""

from __future__ import annotations

import contextlib
import functools
import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).parent)
_LAYERS = f"{_TORCH}/nn/"
_STANDARD_LIBRARY = str(Path(contextlib.__file__).parent) + "/"
#: Folders inside of the standard library's that hold other packages.
_INSTALLED = ("site-packages", "dist-packages")
#: Ours, that a model is traced by.
_TRACING = (Path(__file__).parent, Path(__file__).parent.parent / "torch_compat")


def describe_failure(error: BaseException, paths: Mapping[int, str]) -> str:
    """``in model.layers.0 (Gate), gate.py:12: if x.sum() > 0:`` for the innermost frame outside torch.

    Args:
        error: what tracing raised.
        paths: ``id(module)`` → path of every module of the model.
    """
    return _place(_frames(error.__traceback__), paths)


def describe_stack(paths: Mapping[int, str]) -> str:
    """The same for the line of the model that is running now."""
    return _place(list(traceback.walk_stack(None))[::-1], paths)


def innermost_frame_of_model() -> FrameType | None:
    """The frame of the line that is running now, of the model or of a function or module of ``torch.nn``."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    names = ((frame, frame.f_code.co_filename) for frame in frames)
    return next((frame for frame, name in names if is_of_the_model(name) or name.startswith(_LAYERS)), None)


def frames_of_model() -> Iterator[FrameType]:
    """The frames of a model's own functions that are running now, from the inside out."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return (frame for frame in frames if is_of_the_model(frame.f_code.co_filename))


def _place(frames: list[tuple[FrameType, int]], paths: Mapping[int, str]) -> str:
    """The innermost module, and the innermost line that is of a model, of frames from the outside in."""
    place, module = "", None
    for frame, line in frames:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            module = owner
        filename = frame.f_code.co_filename
        if is_of_the_model(filename):
            place = f"{filename}:{line}: {linecache.getline(filename, line).strip()}"
    where = f"module {paths[id(module)]!r} ({type(module).__name__})" if module is not None else "the model"
    return f"{where}, {place}" if place else where


def is_raised_by_the_model(error: BaseException) -> bool:
    """Whether a model's author wrote the line that raised an error: its ``raise`` or ``assert``."""
    frames = _frames(error.__traceback__)
    frame, line = frames[-1] if frames else (None, 0)
    if frame is None or not is_of_the_model(frame.f_code.co_filename):
        return False
    return re.search(r"\b(raise|assert)\b", linecache.getline(frame.f_code.co_filename, line)) is not None


@functools.cache
def is_of_the_model(filename: str) -> bool:
    """Whether a model's author wrote the file: it is not torch's, not ours, not of the standard library."""
    path = Path(filename)
    if filename.startswith((_TORCH, "<")) or path.parent in _TRACING:
        return False
    return not filename.startswith(_STANDARD_LIBRARY) or any(part in _INSTALLED for part in path.parts)


def _frames(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    return list(traceback.walk_tb(trace))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class name if it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def explain(error: BaseException) -> str:
    """Advice on an error of tracing, for the user."""
    advice = {
        "GuardOnDataDependentSymNode": "control flow depends on the values of a tensor: use torch.where, or decide "
        "from shapes and Python values",
        "DataDependentOutputException": "a tensor's value is read in Python (.item(), .tolist(), bool())",
        "DynamicOutputShapeException": "an operator's output shape depends on values (nonzero, boolean indexing)",
        "UncapturedHigherOrderOpError": "a control-flow operator (torch.cond, while_loop, …) cannot be planned: its "
        "branches or loops run by the values of tensors; use torch.where",
    }
    if isinstance(error, NotImplementedError) and str(torch.Generator) in str(error):
        return (
            f"torch {torch.__version__} traces no call with generator=: draw from the default generator, or use torch "
            "2.13"
        )
    return advice.get(type(error).__name__, f"{type(error).__name__}: {first_line(error)}")
