"""Models that take another path while they are compiled (``torch.compiler.is_compiling()``), and fail on it.

``if attention_mask is None and not is_compiling(): attention_mask = torch.ones(…)`` leaves a model without what its
next line needs. The path that it takes in eager is what it trains on, so that is traced where the other one fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from passes.capture.another_trace import with_replacements
from passes.capture.operator_count import TooManyOperators
from passes.capture.picked_rows import PickedRows
from passes.ir.errors import CaptureError
from passes.torch_compat.tracing import CompilingFlags

_Trace = TypeVar("_Trace")


def compiled_or_eager(trace: Callable[[PickedRows], _Trace], picked: PickedRows) -> _Trace:
    """What ``trace`` gives on the path of compiled models, else on that of eager ones.

    Args:
        trace: traces a copy of the model, with these numbers of picked rows.

    Raises:
        CaptureError: of the first path, if the second fails too.
    """
    flags, again = CompilingFlags(seen=True), picked.fresh()
    try:
        with flags.replaced():
            return with_replacements(trace, picked)
    except TooManyOperators:
        raise
    except CaptureError:
        if flags.asked:
            with contextlib.suppress(CaptureError), CompilingFlags(seen=False).replaced():
                return with_replacements(trace, again)
        raise
