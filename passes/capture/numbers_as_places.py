"""Numbers of weights that Python reads and only gives back to torch, as places: ``x.roll(-int(delays[i]), 1)``.

What ``.item()`` gives of an integer that weights decide is an ``IndexNumber``, which stands in indices and shifts and
nowhere else: there its tensor is looked up (``computed_indices``). ``int(tensor)`` has to give an integer of Python, so
it is replaced where a line of the model asks for one (``replaced_builtins``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from passes.capture.computed_indices import look_up
from passes.capture.replaced_builtins import INTEGERS, with_builtin
from passes.capture.value_reads import ValueReads
from passes.torch_compat.index_numbers import IndexNumber, as_tensors, index_numbers_in


class IndexNumbers:
    """The numbers that one trace reads so."""

    def __init__(self, reads: ValueReads) -> None:
        self._reads = reads
        self._is_any = False

    def read(self, name: str, args: Sequence[Any]) -> IndexNumber | None:
        """What ``item`` gives of an integer that no values of the example decide; None for other calls.

        Raises:
            NeedsAnotherTrace: for ``int(tensor)``.
        """
        if name not in ("item", "__int__") or args[0].numel() != 1 or args[0].dtype not in INTEGERS:
            return None
        refusal = self._reads.refusal_to_read(args[0])
        if refusal is None:
            return None
        if name == "__int__":
            raise refusal_of_int(refusal)
        self._is_any = True
        return IndexNumber(args[0].reshape(()), refusal, refusal_of_int)

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


def refusal_of_int(refusal: Exception) -> Exception:
    """What is raised where Python's own ``int`` asks for an integer of Python."""
    return with_builtin("int", refusal)
