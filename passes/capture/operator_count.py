"""How many operators a forward calls, and from which lines: a loop over tokens in Python calls some for every token."""

from __future__ import annotations

import inspect
import linecache
import os
import traceback
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import nn

from cost_models.text import counted
from passes.capture.tracing_errors import is_of_the_model
from passes.ir.errors import CaptureError

#: Most operators that one trace of a model may call. The library's models call 4,200 at most (their repeated layers are
#: copied). 33,400, of a loop over chunks of 4,096 tokens, took 47 s to trace; a loop of as many takes minutes to plan.
MAX_OPERATORS = 50_000
#: Environment variable for another number.
VARIABLE = "MESHWRIGHT_MAX_OPERATORS"
#: Operators between two reports of progress.
INTERVAL = 500
#: Where modules call their forward.
_MODULE_FILE = inspect.getfile(nn.Module)

#: Told how many operators have been captured so far.
CaptureProgress = Callable[[int], None]


class TooManyOperators(CaptureError):
    """A forward calls more operators than a graph may have; another trace of it would, too."""


class OperatorCount:
    """The operators that a forward has called so far.

    Args:
        paths: ``id(module)`` → path of every module of the model.
        progress: told their number, every ``INTERVAL``.

    Raises:
        ValueError: if the environment variable is no positive whole number.
    """

    def __init__(self, paths: Mapping[int, str], progress: CaptureProgress | None = None) -> None:
        self._paths = paths
        self._progress = progress
        self._limit = max_operators()
        self._count = 0
        #: Calls by line (file and number) and module, the innermost whose forward has the line.
        self._calls: Counter[tuple[str, int, int]] = Counter()
        self._modules: dict[int, str] = {}

    def note(self) -> None:
        """Count the operator that is being called.

        Raises:
            TooManyOperators: if it is one too many.
        """
        self._count += 1
        self._calls[self._place()] += 1
        if self._count > self._limit:
            raise TooManyOperators(self._refusal())
        if self._progress is not None and self._count % INTERVAL == 0:
            self._progress(self._count)

    def _place(self) -> tuple[str, int, int]:
        filename, line = "", 0
        for frame, number in traceback.walk_stack(None):
            if not filename:
                if is_of_the_model(frame.f_code.co_filename):
                    filename, line = frame.f_code.co_filename, number
            elif frame.f_code.co_filename == _MODULE_FILE:
                module = frame.f_locals.get("self")
                if id(module) in self._paths:
                    self._modules[id(module)] = type(module).__name__
                    return filename, line, id(module)
        return filename, line, 0

    def _refusal(self) -> str:
        ((filename, line, module), repetitions) = self._calls.most_common(1)[0]
        code = linecache.getline(filename, line).strip()
        where = f"module {self._paths[module]!r} ({self._modules[module]})" if module in self._paths else "the model"
        return (
            f"forward calls more than {self._limit:,} operators; most often, {counted(repetitions, 'time')} so far in "
            f"{where}, {filename}:{line}: {code}. Each becomes an operator of the graph, which would take minutes to "
            "hours to plan. If that is a loop over tokens in Python, write it with operators over the whole sequence "
            "(planner.linear_recurrence computes h[t] = a[t] * h[t-1] + b[t], planner.gated_delta_rule a state that "
            "is corrected), or plan fewer tokens; "
            f"{VARIABLE} sets another limit"
        )


def max_operators() -> int:
    """Most operators that one trace may call.

    Raises:
        ValueError: if the environment asks for something that is no positive whole number.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return MAX_OPERATORS
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{VARIABLE}={text!r}: expected a positive whole number, or nothing for {MAX_OPERATORS:,}")
    return int(text)


def calls_operator(name: str, result: object) -> bool:
    """Whether the function ``name`` of torch, which gave ``result``, is an operator and no question about a tensor."""
    return isinstance(result, torch.Tensor) or name == "__setitem__" or type(result) in (tuple, list)
