"""Functions of other packages that models call on tensors, as operators of the graph for the time of a trace."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from passes.capture.namespaces import namespaces_with
from passes.torch_compat import host_operators  # noqa: F401

#: Package → function → the operator that stands for it where its first argument is a tensor, or several.
_OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    "scipy.optimize": {"linear_sum_assignment": lambda *args: torch.ops.meshwright.linear_sum_assignment(*args)},
    "numpy": {"concatenate": torch.cat},  # of assignments
}


@contextlib.contextmanager
def traced_host_functions() -> Iterator[None]:
    """Inside the block, whoever imported these functions by name calls the operators instead.

    A function that was handed on under another name stays as it is, and asks for values, which is refused.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    functions: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        name: (getattr(sys.modules[package], name), operator)
        for package, operators in _OPERATORS.items()
        for name, operator in operators.items()
        if package in sys.modules
    }
    for _, names in namespaces_with(functions.keys()):
        for name, (original, operator) in functions.items():
            if names.get(name) is original:
                replaced.append((names, name, original))
                names[name] = _on_tensors(original, operator)
    try:
        yield
    finally:
        for names, name, original in replaced:
            names[name] = original


def _on_tensors(original: Callable[..., Any], operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(argument: Any, *args: Any, **kwargs: Any) -> Any:
        entries = argument if isinstance(argument, (list, tuple)) and argument else (argument,)
        if all(isinstance(entry, torch.Tensor) for entry in entries):
            return operator(argument, *args, *kwargs.values())
        return original(argument, *args, **kwargs)

    return call
