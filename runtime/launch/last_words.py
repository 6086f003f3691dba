"""What a rank died of, left where the launcher finds it: in the file that torchrun's agent names to each process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

#: Set by ``planner run``: processes leave their last words.
ENABLED = "MESHWRIGHT_LAST_WORDS"
FILE = "TORCHELASTIC_ERROR_FILE"
_MAX_CHARACTERS = 500
#: What a process says that failed because another one did.
_OF_ANOTHER = re.compile(
    r"[Cc]onnection (was )?(reset|closed|refused|aborted)|Broken pipe|[Tt]imed out|time-?out|DistNetworkError|"
    r"another rank failed first|^ValueError: rank \d+:"
)
_hooked = False


def leave_last_words() -> None:
    """Leave the line of an exception that ends this process, if it was started by ``planner run``."""
    global _hooked
    if _hooked or ENABLED not in os.environ or FILE not in os.environ:
        return
    _hooked, previous = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from cost_models.files import write_text  # every process of a job imports this file at its start

        line = next(iter(traceback.format_exception_only(kind, error)[-1].strip().splitlines()), kind.__name__)
        now = time.time()
        # The form that torchrun's agent reads; ``seconds`` is for us.
        more = {"py_callstack": line, "timestamp": str(int(now)), "seconds": now}
        with contextlib.suppress(ValueError):  # there is still what is printed
            # Whole or not at all: the agent may stop this process meanwhile, and fails on half a file.
            write_text(os.environ[FILE], json.dumps({"message": {"message": line, "extraInfo": more}}))
        previous(kind, error, trace)

    sys.excepthook = hook


def last_words(failure: Any) -> str | None:
    """The line that the process of a ``ProcessFailure`` of torch's left, fit for a terminal."""
    from cost_models.text import printable

    message = failure.message
    if not isinstance(message, Mapping):
        return None
    line = printable(str(message.get("message", "")))
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}…"


def first_to_fail(failures: Mapping[int, Any]) -> int:
    """The rank that failed of itself, by its exit code, what it said, and then when it did.

    ``failures`` are torch's ``ProcessFailure`` by rank, of those that the agent stopped (by SIGTERM) too.
    """

    def order(rank: int) -> tuple[bool, bool, float]:
        failure = failures[rank]
        words = last_words(failure)
        seconds = failure.message["extraInfo"].get("seconds") if words is not None else None
        # gloo aborts the process where a peer that ends sends less than was expected
        of_another = failure.exitcode == -signal.SIGABRT if words is None else _OF_ANOTHER.search(words) is not None
        return failure.exitcode == -signal.SIGTERM, of_another, failure.timestamp if seconds is None else float(seconds)

    return min(failures, key=order)
