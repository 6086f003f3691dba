"""Each model type in a process of its own, with limits, forked from one that has run all stages once."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIME_LIMIT = 300
MEMORY_LIMIT = 8 << 30


def warm_up() -> None:
    """Import what every type needs, by running all of it once, before processes are forked."""
    import torch
    import transformers.generation
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama

    import planner
    from benchmarks.coverage.stages import MESH, PIPELINE

    transformers.logging.set_verbosity_error()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    batch = (torch.randn(4, 8),)
    for mesh in (MESH, PIPELINE):
        planner.verify(model, mesh, batch=batch, loss_fn=lambda output, _: output.square().mean())


def run_apart(function: Any, *args: Any, seconds: float = TIME_LIMIT, **kwargs: Any) -> dict[str, Any]:
    """``function(*args, **kwargs)``, which returns plain data, in a forked process.

    Raises:
        ChildProcessError: if that did not end well: it took more processor time than ``seconds``, or crashed.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, function, args, kwargs, seconds))
    process.start()
    sender.close()
    try:
        result: dict[str, Any] = json.loads(receiver.recv())
    except EOFError:
        process.join()
        over_time = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        cause = f"it took more than {seconds:.0f} s" if over_time else "it crashed, or met the limit of memory"
        raise ChildProcessError(f"the process died: {cause}") from None
    finally:
        receiver.close()
        process.join()
    return result


def _child(sender: Connection, function: Any, args: Any, kwargs: Any, seconds: float) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_LIMIT, used + MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))  # of a new process: from zero
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    sender.send(json.dumps(function(*args, **kwargs)))
    sender.close()
    os._exit(0)
