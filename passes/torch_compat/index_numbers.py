"""A number that torch's functions take as an index or a shift and that Python cannot look at: an integer without value.

Functions of torch take a ``torch.SymInt`` wherever an integer may be one; all that Python asks of it, it asks of its
``node``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch


class IndexNumber(torch.SymInt):
    """The number in ``tensor`` [], as ``tensor.item()`` gives it; sums and products of such numbers are some, too.

    Args:
        refusal: what is raised if something asks which number it is.
        refusal_of_int: gives what is raised if Python's own ``int`` does, which has to give an integer of Python.
    """

    def __init__(
        self, tensor: torch.Tensor, refusal: Exception, refusal_of_int: Callable[[Exception], Exception]
    ) -> None:
        # Not the constructor of SymInt, which is of a node.
        self.tensor = tensor.to(torch.int64)
        self.refusal = refusal
        self.refusal_of_int = refusal_of_int

    def _kind(self) -> type:
        return int

    #: What ``isinstance`` goes by: code that tells numbers from lists sees a number.
    __class__ = property(_kind)  # type: ignore[assignment]

    @property
    def node(self) -> Any:
        raise self.refusal

    def __int__(self) -> int:
        raise self.refusal_of_int(self.refusal)

    def like(self, tensor: torch.Tensor) -> IndexNumber:
        """Another number, computed of this one."""
        return IndexNumber(tensor, self.refusal, self.refusal_of_int)

    def __neg__(self) -> IndexNumber:
        return self.like(-self.tensor)

    def __pos__(self) -> IndexNumber:
        return self


def _binary(name: str) -> Callable[[IndexNumber, Any], IndexNumber]:
    compute: Callable[[torch.Tensor, Any], torch.Tensor] = getattr(torch.Tensor, name)

    def operation(number: IndexNumber, other: Any) -> IndexNumber:
        if isinstance(other, IndexNumber):
            return number.like(compute(number.tensor, other.tensor))
        if type(other) is not int:
            raise number.refusal
        return number.like(compute(number.tensor, other))

    return operation


#: What Python computes of integers as torch does of their tensors.
_OPERATIONS = ("add", "radd", "sub", "rsub", "mul", "rmul", "mod")
for _name in _OPERATIONS:
    setattr(IndexNumber, f"__{_name}__", _binary(f"__{_name}__"))


def _refuse(number: IndexNumber, *_: Any, **__: Any) -> NoReturn:
    raise number.refusal


#: What else a SymInt has an answer to.
_QUESTIONS = {name for name in vars(torch.SymInt) if callable(getattr(torch.SymInt, name))} | {"__format__", "__str__"}
for _name in _QUESTIONS - vars(IndexNumber).keys():
    setattr(IndexNumber, _name, _refuse)


def index_numbers_in(value: Any) -> list[IndexNumber]:
    """The numbers in arguments of a function, also inside lists, dicts and slices."""
    if type(value) is IndexNumber:
        return [value]
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, dict):
        value = list(value.values())
    return [number for item in value for number in index_numbers_in(item)] if isinstance(value, (list, tuple)) else []


def as_tensors(value: Any) -> Any:
    """Arguments with the tensors of such numbers in their places; slices stay as they are."""
    if type(value) is IndexNumber:
        return value.tensor
    if type(value) in (list, tuple):
        return type(value)(map(as_tensors, value))
    return {name: as_tensors(item) for name, item in value.items()} if type(value) is dict else value
