"""Each model type in a process of its own, forked from one that has imported torch, with limits of time and memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIME_LIMIT = 600
MEMORY_LIMIT = 8 << 30


def import_once() -> None:
    """Import what every type needs, before processes are forked."""
    import transformers.generation
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama

    import planner  # noqa: F401

    transformers.logging.set_verbosity_error()


def run_apart(function: Any, *args: Any, seconds: float = TIME_LIMIT) -> dict[str, Any]:
    """``function(*args)``, which returns a row, in a forked process; a row that says why if that did not end well."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, function, args))
    process.start()
    sender.close()
    row: dict[str, Any] = {}
    try:
        if receiver.poll(seconds):
            row = json.loads(receiver.recv())
        else:
            row = {"failed": "time", "reason": f"took more than {seconds:.0f} s"}
    except EOFError:
        row = {"failed": "process", "reason": "the process died (memory limit, or a crash)"}
    finally:
        if process.is_alive() and "reason" in row:
            process.kill()
        process.join()
    return row


def _child(sender: Connection, function: Any, args: tuple[Any, ...]) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_LIMIT, used + MEMORY_LIMIT))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    row = function(*args)
    sender.send(json.dumps(row))
    sender.close()
    os._exit(0)
