"""Branches on values that only weights or earlier calls decide: both are computed, and what they assign is selected.

No answer to ``if low.min() > high.max(): self.low = rows.min() else: self.low = 0.9 * self.low`` can be a constant of a
program. Where the branches of such an ``if`` only assign what has no gradient, the model is traced again with a
function that computes both and selects with ``torch.where`` (``branch_rewriting``). With a gradient the branch that is
not taken could turn it to NaN, so that the ``if`` is left as it is, as is one that draws or changes something: both of
its branches are then traced (``other_branches``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType
from typing import Any

import torch

from passes.capture.another_trace import NeedsAnotherTrace
from passes.capture.branch_rewriting import HELPER, rewritten
from passes.capture.tracing_errors import frames_of_model, innermost_frame_of_model, is_of_the_model
from passes.ir.errors import CaptureError, MissingValues

_BUILTINS = (abs, bool, float, int, len, max, min, round, sum)
_DRAWING = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "cauchy", "geometric")
_INSTEAD = "choose with torch.where"

#: Codes of rewritten functions → their own code, and the line of the ``if``, while they are replaced.
_REWRITTEN: dict[CodeType, tuple[CodeType, int]] = {}
#: Codes and lines of ``if`` that are not rewritten.
_LEFT_ALONE: set[tuple[CodeType, int]] = set()


class Unset:
    """Stands for a name or an attribute without a value."""


def with_selection(refusal: CaptureError) -> NeedsAnotherTrace | None:
    """Another trace for one that was refused, if the line that is running now is an ``if`` that can be rewritten."""
    frame = innermost_frame_of_model()
    if frame is None or isinstance(refusal, MissingValues) or not is_of_the_model(frame.f_code.co_filename):
        return None
    if (frame.f_code, frame.f_lineno) in _LEFT_ALONE:
        return None
    is_rewritten = HELPER in frame.f_code.co_names
    functions = [function for function in _functions(frame) if function.__code__ is frame.f_code]
    other = rewritten(frame.f_code, frame.f_lineno) if functions and not is_rewritten else None
    line = frame.f_lineno
    return None if other is None else NeedsAnotherTrace(refusal, lambda: _replaced(functions, other, line))


def can_be_rewritten() -> bool:
    """Whether the line that is running now is an ``if`` that can be rewritten."""
    return with_selection(CaptureError("")) is not None


def _functions(frame: FrameType) -> Iterator[FunctionType]:
    """Functions that may run in ``frame``: methods of its first argument, and one of its file."""
    name, arguments = frame.f_code.co_name, frame.f_code.co_varnames[:1]
    owner = frame.f_locals.get(arguments[0]) if arguments else None
    spaces = [getattr(owner, "__dict__", {}), *(vars(kind) for kind in type(owner).__mro__), frame.f_globals]
    for space in spaces:
        function: Any = getattr(space.get(name), "__func__", space.get(name))
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if isinstance(function, FunctionType):
            yield function


@contextlib.contextmanager
def _replaced(functions: Sequence[FunctionType], other: CodeType, line: int) -> Iterator[None]:
    """Inside the block functions, which have one code, run the ``other``, in which the ``if`` at ``line`` is new."""
    code, namespace = functions[0].__code__, functions[0].__globals__
    _REWRITTEN[other] = code, line
    for function in functions:
        function.__code__ = other
    namespace[HELPER] = SelectedBranches
    try:
        yield
    finally:
        for function in functions:
            function.__code__ = code
        namespace.pop(HELPER, None)
        _REWRITTEN.pop(other, None)


@contextlib.contextmanager
def _left_alone(functions: Sequence[FunctionType], code: CodeType, line: int) -> Iterator[None]:
    """Inside the block functions run their own code again, whose ``if`` at ``line`` is not rewritten any more."""
    _LEFT_ALONE.add((code, line))
    for function in functions:
        function.__code__ = code
    try:
        yield
    finally:
        _LEFT_ALONE.discard((code, line))


def _without_selection(refusal: CaptureError) -> CaptureError:
    """Another trace without the rewritten function that is running now, which refuses what it is to select."""
    frame = next((each for each in frames_of_model() if each.f_code in _REWRITTEN), None)
    if frame is None:
        return refusal
    functions = [function for function in _functions(frame) if function.__code__ is frame.f_code]
    own = _REWRITTEN[frame.f_code]
    return NeedsAnotherTrace(refusal, lambda: _left_alone(functions, *own))


class SelectedBranches:
    """What rewritten functions call."""

    @staticmethod
    def is_value(condition: object) -> bool:
        """Whether a condition is a tensor, and not known to Python."""
        return isinstance(condition, torch.Tensor)

    @staticmethod
    def all_of(*operands: Callable[[], Any]) -> Any:
        """``and`` of what operands give; the first that is false for Python, if there is one."""
        return _joined(operands, torch.logical_and, stops_at=False)

    @staticmethod
    def any_of(*operands: Callable[[], Any]) -> Any:
        """``or``, likewise."""
        return _joined(operands, torch.logical_or, stops_at=True)

    @staticmethod
    def opposite(condition: Any) -> Any:
        """``not condition``."""
        return torch.logical_not(_flag(condition)) if isinstance(condition, torch.Tensor) else not condition

    @staticmethod
    def values(*readers: Callable[[], Any]) -> tuple[Any, ...]:
        """What names and attributes are."""
        return tuple(map(_read, readers))

    @staticmethod
    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of a call that changes and draws nothing.

        Raises:
            CaptureError: if it may.
        """
        name = getattr(function, "__name__", "")
        is_of_torch = str(getattr(function, "__module__", "") or "").partition(".")[0] == "torch"
        is_method = isinstance(function, BuiltinFunctionType) and isinstance(function.__self__, torch.Tensor)
        is_method |= isinstance(getattr(function, "__self__", None), torch.Tensor)
        writes = name.endswith("_") or kwargs.get("out") is not None or any(part in name for part in _DRAWING)
        if writes or not (is_of_torch or is_method or function in _BUILTINS):
            raise _without_selection(
                CaptureError(
                    f"control flow depends on a value, and a branch calls {name or repr(function)}, which may change "
                    f"or draw something: {_INSTEAD}"
                )
            )
        return function(*args, **kwargs)

    @staticmethod
    def selected(condition: torch.Tensor, then: Sequence[Any], otherwise: Sequence[Any]) -> tuple[Any, ...]:
        """What is assigned in the end: ``then`` where the condition holds.

        Raises:
            CaptureError: for what no program selects.
        """
        flag = _flag(condition)
        try:
            return tuple(_selected(flag, one, other) for one, other in zip(then, otherwise, strict=True))
        except CaptureError as refusal:
            raise _without_selection(refusal) from refusal


def _read(reader: Callable[[], Any]) -> Any:
    try:
        return reader()
    except (NameError, AttributeError):
        return Unset()


def _flag(condition: torch.Tensor) -> torch.Tensor:
    """The truth of a tensor of one element, as Python has it."""
    if condition.numel() != 1:
        raise CaptureError("the truth of a tensor of several elements is ambiguous: ask for any() or all()")
    condition = condition.detach().reshape(())
    return condition if condition.dtype == torch.bool else condition != 0


def _joined(operands: Sequence[Callable[[], Any]], join: Callable[..., torch.Tensor], *, stops_at: bool) -> Any:
    joined: Any = not stops_at
    for operand in operands:
        value = operand()
        if not isinstance(value, torch.Tensor):
            if bool(value) is stops_at:
                return value
            continue
        joined = join(joined, _flag(value)) if isinstance(joined, torch.Tensor) else _flag(value)
    return joined


def _selected(flag: torch.Tensor, one: Any, other: Any) -> Any:
    if isinstance(one, Unset) or isinstance(other, Unset):
        raise _refusal("a name in one of them alone")
    if one is other:
        return one
    are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if not are_tensors:
        if type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other:
            return one
        raise _refusal("something other than tensors")
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        raise _refusal("tensors of several shapes or dtypes")
    if one.requires_grad or other.requires_grad:
        raise _refusal("what has a gradient, which a branch that is not taken may turn to NaN")
    return torch.where(flag, one, other)


def _refusal(what: str) -> CaptureError:
    return CaptureError(f"control flow depends on a value, and its branches assign {what}: {_INSTEAD}")
