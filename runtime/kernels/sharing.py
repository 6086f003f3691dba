"""Sharing between emitted programs: a function with the same source in several is compiled once for all.

A program is made for each length of its inputs, and each loads functions of its own: without this, a kernel would be
compiled for each length, though its code is the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from runtime.torch_compat.compilers import TooManyKinds, call_within_limit

_functions: dict[Any, Any] = {}
_compiled: dict[Any, CompiledChain] = {}


def shared_function(function: Any) -> Any:
    """The first function, or Triton kernel, whose code and meaning are those of this one."""
    key = _meaning(function)
    return function if key is None else _functions.setdefault(key, function)


def compile_shared(plain: Callable[..., Any]) -> CompiledChain:
    """``plain`` by ``torch.compile``: one for all functions that are written alike."""
    first = shared_function(plain)
    return _compiled.setdefault(first, CompiledChain(first))


class CompiledChain:
    """A chain by ``torch.compile``; sizes that change from call to call become variables of its code.

    It is compiled anew for other dtypes, other orders in memory, and with or without gradients. Dynamo does that a few
    times (``torch._dynamo.config.recompile_limit``) and then runs operators one by one: a warning says when.
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._name = plain.__name__.removesuffix("_plain").strip("_")
        self._run = torch.compile(plain)
        self._is_limited = False

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._is_limited:
            return self._run(*tensors)
        try:
            return call_within_limit(self._run, tensors)
        except TooManyKinds as error:
            self._is_limited = True
            warnings.warn(
                f"the chain {self._name} was called with more kinds of tensors than torch._dynamo.config."
                f"recompile_limit={error.limit} (dtypes, orders in memory, needing gradients "
                "or not): other kinds run as separate operators, slower; raise the limit, or call with fewer kinds",
                stacklevel=2,
            )
            return self._run(*tensors)


def _meaning(function: Any) -> Any:
    """The code of a function, wherever it stands, and what its names mean; None for what is no Python function."""
    inner = getattr(function, "fn", function)
    code = getattr(inner, "__code__", None)
    if code is None or inner.__closure__:
        return None
    names = tuple(id(inner.__globals__[name]) for name in code.co_names if name in inner.__globals__)
    return type(function), code.replace(co_firstlineno=1, co_filename=""), names
