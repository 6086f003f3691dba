"""What a model does that can be traced if something of it is replaced: it is traced again with that in place.

A refusal that knows such a replacement is a ``NeedsAnotherTrace``. Nothing is replaced where the first trace succeeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from passes.capture.picked_rows import PickedRows
from passes.ir.errors import CaptureError

_Trace = TypeVar("_Trace")


class NeedsAnotherTrace(CaptureError):
    """A refusal of one trace.

    Attributes:
        replaced: a context in which another trace will do.
    """

    def __init__(self, refusal: Exception, replaced: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__(str(refusal))
        self.replaced = replaced


def with_replacements(trace: Callable[[PickedRows], _Trace], picked: PickedRows) -> _Trace:
    """What ``trace`` gives, with all in place that it needs.

    Args:
        trace: traces a copy of the model, with these numbers of picked rows.
    """
    with contextlib.ExitStack() as replacements:
        while True:
            again = picked.fresh()
            try:
                return trace(picked)
            except CaptureError as error:
                need = _need_of(error)
                if need is None:
                    raise
            replacements.enter_context(need.replaced())
            picked = again


def _need_of(error: BaseException | None) -> NeedsAnotherTrace | None:
    while error is not None and not isinstance(error, NeedsAnotherTrace):
        error = error.__cause__
    return error
