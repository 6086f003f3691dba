"""The agreement of a rank that has no part in the plan: it makes no calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.agreement.call_agreement import CallAgreement
from runtime.agreement.ranks_together import Ranks


class NoCalls(CallAgreement):
    """Refuses every call."""

    def __init__(self) -> None:
        super().__init__(Ranks(None), data_rank=0, may_leave_out=False)

    def agree(self, action: str, *_: Any, **__: Any) -> Any:
        raise ValueError(
            f"this rank has no part in the plan (parallel.has_work is False), and {action}: only ranks at work do; let "
            "it wait for the next parallel.replan, which all ranks of the job call"
        )

    def together(self, prepare: Callable[[], Any]) -> Any:
        return self.agree("calls the model")
