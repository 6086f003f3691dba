"""Numbers of weights that Python reads and only gives back to torch, as places: ``x.roll(-int(delays[i]), 1)``.

What ``.item()`` gives of an integer that weights decide is an ``IndexNumber``, which stands in indices and shifts and
nowhere else: there its tensor is looked up (``computed_indices``). ``int(tensor)`` has to give an integer of Python.
Where a line of the model asks for one, the model is traced again with an ``int`` in that file's global names that calls
``.item()``.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from passes.capture.computed_indices import look_up
from passes.capture.ordered_sets import AsBase
from passes.capture.picked_rows import PickedRows
from passes.capture.tracing_errors import innermost_frame_of_model, is_of_the_model
from passes.capture.value_reads import ValueReads
from passes.ir.errors import CaptureError
from passes.torch_compat.index_numbers import IndexNumber, as_tensors, index_numbers_in

_Trace = TypeVar("_Trace")


class IntOfTensor(CaptureError):
    """``int(tensor)`` in a file whose ``int`` can be another one.

    Attributes:
        namespace: the global names of that file.
    """

    def __init__(self, refusal: Exception, namespace: dict[str, Any]) -> None:
        super().__init__(str(refusal))
        self.namespace = namespace


class IndexNumbers:
    """The numbers that one trace reads so."""

    def __init__(self, reads: ValueReads) -> None:
        self._reads = reads
        self._is_any = False

    def read(self, name: str, args: Sequence[Any]) -> IndexNumber | None:
        """What ``item`` gives of an integer that no values of the example decide; None for other calls.

        Raises:
            IntOfTensor: for ``int(tensor)``.
        """
        if name not in ("item", "__int__") or args[0].numel() != 1 or args[0].dtype not in _INTEGERS:
            return None
        refusal = self._reads.refusal_to_read(args[0])
        if refusal is None:
            return None
        if name == "__int__":
            raise _refusal_of_int(refusal)
        self._is_any = True
        return IndexNumber(args[0].reshape(()), refusal, _refusal_of_int)

    def look_up(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Whether the arguments of a function of torch have such numbers, and what it gives then.

        Raises:
            CaptureError: if they are neither indices nor shifts.
        """
        numbers = index_numbers_in((args, dict(kwargs))) if self._is_any else []
        if not numbers:
            return False, None
        is_looked_up, result = look_up(name, as_tensors(args), as_tensors(dict(kwargs)), self._reads.is_settled)
        if not is_looked_up:
            raise numbers[0].refusal
        return True, result


def refuse_left_over(values: Any) -> None:
    """Raise if one of these numbers is among what a call leaves behind, which no program computes."""
    for number in index_numbers_in(values):
        raise number.refusal


def with_int_of_tensors(trace: Callable[[PickedRows], _Trace], picked: PickedRows) -> _Trace:
    """What ``trace`` gives, with another ``int`` in the files of the model that need it.

    Args:
        trace: traces a copy of the model, with these numbers of picked rows.
    """
    namespaces: list[dict[str, Any]] = []
    while True:
        again = picked.fresh()
        try:
            with _int_in(namespaces):
                return trace(picked)
        except CaptureError as error:
            namespace = _namespace_of(error)
            if namespace is None:
                raise
            namespaces.append(namespace)
        picked = again


class _Int(int, metaclass=AsBase):
    """``int``, which gives of a tensor what ``.item()`` does."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype in _INTEGERS:
            return args[0].item()
        return args[0] if args and type(args[0]) is IndexNumber else builtins.int(*args, **kwargs)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


@contextlib.contextmanager
def _int_in(namespaces: Sequence[dict[str, Any]]) -> Iterator[None]:
    for namespace in namespaces:
        namespace["int"] = _Int
    try:
        yield
    finally:
        for namespace in namespaces:
            namespace.pop("int", None)


def _namespace_of(error: BaseException | None) -> dict[str, Any] | None:
    """The global names that an error of tracing asks for an ``int`` in."""
    while error is not None and not isinstance(error, IntOfTensor):
        error = error.__cause__
    return None if error is None else error.namespace


def _refusal_of_int(refusal: Exception) -> Exception:
    namespace = _namespace_with_int()
    return refusal if namespace is None else IntOfTensor(refusal, namespace)


def _namespace_with_int() -> dict[str, Any] | None:
    """The global names of the line that is running now, if their ``int`` can be replaced unseen."""
    frame = innermost_frame_of_model()
    if frame is None or not is_of_the_model(frame.f_code.co_filename):
        return None
    names, path = frame.f_globals, frame.f_code.co_filename
    if "int" in names or names.get("__file__") != path:
        return None
    return names if _only_calls_int(linecache.getlines(path)) else None


def _only_calls_int(lines: Sequence[str]) -> bool:
    """Whether a file uses ``int`` as a function, in ``isinstance`` and in annotations alone."""
    allowed: set[int] = set()
    names: list[ast.Name] = []
    for node in ast.walk(ast.parse("".join(lines))):
        kinds: list[ast.AST | None] = []
        if isinstance(node, ast.Name) and node.id == "int":
            names.append(node)
        elif isinstance(node, ast.Call):
            allowed.add(id(node.func))
            is_check = isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass")
            kinds = list(node.args[1:2]) if is_check else []
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            kinds = [node.annotation]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kinds = [node.returns]
        allowed.update(id(part) for kind in kinds if kind is not None for part in ast.walk(kind))
    return all(id(name) in allowed for name in names)
