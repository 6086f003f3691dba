"""Whether a program's ``forward`` makes tensors without saying where: if so it runs with its device as torch's default.

Every call of torch passes through such a default (a mode in Python), for a microsecond or two: a step of BERT calls
2,000 times. Most programs make nothing but constants, which are computed once, by themselves.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

import torch

from runtime.torch_compat.dispatcher import tensor_constructors

#: Operators of ``runtime.ops`` that make tensors of a size.
_OF_OPS = frozenset({"rand", "randn", "randint"})
#: What computes constants of its own is not of ``forward``.
_CONSTANTS = "constants"


@functools.lru_cache(maxsize=256)
def makes_tensors(source: str) -> bool:
    """Whether code of ``source`` other than ``constants`` calls what makes tensors on the default device.

    Example:
        >>> makes_tensors("def forward(self, x): return x + torch.ones(3)")
        True
        >>> makes_tensors("def forward(self, x): return x + torch.ones(3, device=x.device)")
        False
    """
    return any(map(_makes_tensor, _calls(ast.parse(source))))


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    if isinstance(node, ast.FunctionDef) and node.name == _CONSTANTS:
        return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)


def _makes_tensor(call: ast.Call) -> bool:
    function = call.func
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return False
    if function.value.id == "ops":
        return function.attr in _OF_OPS
    if function.value.id != "torch" or any(keyword.arg == "device" for keyword in call.keywords):
        return False
    return getattr(torch, function.attr, None) in tensor_constructors()
