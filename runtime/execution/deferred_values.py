"""What stands in a model's output for a tensor that is not whole yet, or that the step did not keep."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from passes.torch_compat.operators import tree_map


class DeferredValue:
    """In the place of a tensor: functions of torch and attributes get the tensor itself, made by ``fetch``.

    Args:
        what: it is, for people.
    """

    def __init__(self, what: str, fetch: Callable[[], torch.Tensor]) -> None:
        self._what, self._fetch = what, fetch

    def __repr__(self) -> str:
        return f"<{self._what}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._fetch(), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.copy, (self._fetch(),)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(fetched, (args, kwargs or {}))
        return function(*args, **kwargs)


class LeftOut(DeferredValue):
    """In the place of a tensor that there is not: any use of it raises the error of ``fetch``."""


def fetched(value: Any) -> Any:
    """``value``, or the tensor that it stands for."""
    return value._fetch() if isinstance(value, DeferredValue) else value


def _applied(apply: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: apply(fetched(self), *map(fetched, others))


def _swapped(apply: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: apply(other, fetched(self))


def _with_operators(kind: type, names: Iterable[str]) -> None:
    for name in names:
        apply = getattr(operator, name)
        setattr(kind, f"__{name.strip('_')}__", _applied(apply))
        if name in _OF_TWO:
            setattr(kind, f"__r{name.strip('_')}__", _swapped(apply))


_OF_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor")
_with_operators(LeftOut, (*_OF_TWO, "neg", "pos", "abs", "invert", "getitem", "eq", "ne", "lt", "le", "gt", "ge"))
_CONVERSIONS: dict[str, Callable[..., Any]] = {"len": len, "iter": iter, "bool": bool, "float": float, "int": int}
for _name, _function in _CONVERSIONS.items():
    setattr(LeftOut, f"__{_name}__", _applied(_function))
