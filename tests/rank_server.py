"""A process that has imported what tests need, and forks the ranks of one multi-process test after the other.

Importing torch, our packages and what else a rank needs takes longer than most of them run. Each process of pytest
starts one server at first use; it ends with the input that it reads requests from.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Seconds that the other ranks have left when one has failed.
GRACE = 20.0
ROOT = Path(__file__).resolve().parent.parent


#: Variables that say something about a job; a test sets its own.
_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def of_no_job(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without what the job says in which the tests themselves may run."""
    return {name: value for name, value in environment.items() if name not in _JOB and not name.startswith("SLURM_")}


def environment_of_ranks() -> dict[str, str]:
    """This process's, for several on one host that find the project without it being installed."""
    return {**of_no_job(os.environ), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}


class RankServer:
    """The server as its client sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.rank_server"],
            env=environment_of_ranks(),
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run(
        self,
        script: Path,
        folder: Path,
        environments: Sequence[Mapping[str, str]],
        *,
        arguments: Sequence[str] = (),
        timeout: float,
    ) -> list[int | None]:
        """Run a script on a process for each environment; what they write is in ``folder/log0``, ``folder/log1``, …

        Returns:
            Exit codes (None: it did not end in ``timeout`` seconds).
        """
        request = {
            "script": str(script),
            "arguments": list(arguments),
            "folder": str(folder),
            "environment": environment_of_ranks(),
            "ranks": [dict(environment) for environment in environments],
            "timeout": timeout,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], timeout + 3 * GRACE)
        answer = self._process.stdout.readline() if ready else ""
        if not answer:
            self._process.kill()
            raise AssertionError("the server of ranks did not answer")
        codes: list[int | None] = json.loads(answer)
        return codes


def serve() -> None:
    """Read a request a line, answer with the ranks' exit codes; what is printed meanwhile goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_what_ranks_need()
    for category in (DeprecationWarning, FutureWarning):  # as pytest's own process takes them
        warnings.filterwarnings("error", category=category, module=r"(planner|passes|runtime|cost_models)\.")
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    for line in sys.stdin:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")
        answers.flush()


#: Modules that most ranks import at their first plan, capture, step or checkpoint.
_NEEDED = (
    *("networkx", "scipy.optimize", "highspy", "torch.export._trace", "torch.profiler", "torch.utils.serialization"),
    *("torch.distributed.checkpoint", "torch.distributed.pipelining", "spmd_types", "safetensors.torch"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "t5", "vit")),
    *("planner.trainer.trainer", "planner.verification.verify_model", "planner.library", "planner.fusing"),
    *("planner.whole_step.plan_step", "planner.pipeline_ilp", "planner.graph_cache.planned_graph"),
    *("planner.auditing.repriced_step", "runtime.checkpoint", "runtime.execution.engine"),
)

#: Worker → what its ranks import beside that; the server does at its first run.
_NEEDED_BY = {
    "example_worker": ("sklearn.datasets", "peft"),
    "lightning_worker": ("lightning",),
    "plan_order_worker": ("tests.communication.plans",),
    "torch_tools_worker": ("transformers.optimization",),
    "hugging_face_worker": ("peft", "planner.integrations.transformers", "planner.integrations.accelerate"),
}


def _import_what_ranks_need() -> None:
    for name in _NEEDED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        _take_first_steps()


def _take_first_steps() -> None:
    """What capture, planning, programs and pipelines set up at first use: 0.1 to 0.4 s of every rank."""
    from passes.plan import Plan
    from planner.verification.verify_model import verify
    from tests.small_models import Mlp, mlp_batch, seeded, squared_error

    for mesh in ("dp=2,tp=2", "pp=2"):
        with contextlib.suppress(Exception):  # what is wrong is for the tests to say
            report = verify(seeded(Mlp), mesh, batch=mlp_batch(), loss_fn=squared_error, steps=1)
            Plan.from_json(report.plan.to_json())


def _run(request: dict[str, Any]) -> list[int | None]:
    folder = Path(request["folder"])
    for name in _NEEDED_BY.get(Path(request["script"]).stem, ()):
        importlib.import_module(name)
    ranks = []
    for rank, environment in enumerate(request["ranks"]):
        ranks.append(_fork(request, {**request["environment"], **environment}, folder / f"log{rank}"))
    codes = _wait(ranks, request["timeout"])
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # it, or what it has started and left behind
            os.killpg(rank, signal.SIGKILL)
    for rank, code in zip(ranks, codes):
        if code is None:
            os.waitpid(rank, 0)
    return codes


def _fork(request: dict[str, Any], environment: dict[str, str], log: Path) -> int:
    """The process of a rank, which runs the script as if it were started with it."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable()  # a process that the C library aborts says where it was
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [request["script"], *request["arguments"]]
        runpy.run_path(request["script"], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(ranks: list[int], timeout: float) -> list[int | None]:
    """Exit codes; once one has failed, the others have a few seconds left, and none when the client is gone."""
    end = time.monotonic() + timeout
    codes: dict[int, int] = {}
    while len(codes) < len(ranks) and time.monotonic() < end:
        for rank in ranks:
            if rank not in codes:
                ended, status = os.waitpid(rank, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank]:
                        end = min(end, time.monotonic() + GRACE)
        # Between two requests nothing comes but the end of the input.
        if select.select([sys.stdin], [], [], 0.05)[0]:
            break
    return [codes.get(rank) for rank in ranks]


if __name__ == "__main__":
    serve()
