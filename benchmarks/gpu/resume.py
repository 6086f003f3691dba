"""The item about resuming: workers are killed while they train, and what is left goes on with the same losses."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Setting
from benchmarks.ports import free_port

NUM_STEPS, SAVE_EVERY, KILL_AFTER = 12, 3, 7
#: Relative difference of losses (float32); sums on a GPU may be added up in another order.
TOLERANCE = 1e-5
GRACE = 30.0


def resume(setting: Setting) -> Iterator[dict[str, Any]]:
    """One run without interruption, one that is killed after a step and started again."""
    ranks = 2 if setting.num_gpus >= 2 else 1
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        _finish(_start(whole, ranks, setting), whole)
        processes = _start(killed, ranks, setting)
        while len(_losses(killed)) < KILL_AFTER and all(process.is_alive() for process in processes):
            time.sleep(0.01)
        processes[-1].kill()
        ended = _wait(processes, GRACE)
        first = _losses(killed)
        _finish(_start(killed, ranks, setting), killed)
        expected, results = _losses(whole), _losses(killed)
        again = [json.loads(line)[0] for line in max(killed.glob("losses-*")).read_text().splitlines()]
    worst = max(abs(results[number] - loss) / abs(loss) for number, loss in expected.items())
    yield {
        "ranks": ranks, "killed after step": max(first), "went on at step": min(again, default=None),
        "survivors ended": ended, "largest difference of losses": float(f"{worst:.1e}"),
        "ok": len(results) == len(expected) == NUM_STEPS and worst <= TOLERANCE and ended,
    }  # fmt: skip


def _start(folder: Path, ranks: int, setting: Setting) -> list[ForkProcess]:
    """All ranks, forked from this process, which has everything imported and has touched no GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = str(folder), ranks, free_port(), setting.device
    forked = multiprocessing.get_context("fork")
    processes = [forked.Process(target=_work, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def _work(rank: int, folder: str, ranks: int, port: int, device: str) -> None:
    """One rank, from wherever the last checkpoint is to the end."""
    import planner
    from benchmarks.kill_worker import Run, samples, trainer_of

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    planner.init(device=device)
    fix = {"dp": ranks, "zero": 2 if ranks > 1 else 0, "num_microbatches": 2}
    run = Run(ranks, fix, num_steps=NUM_STEPS, save_every=SAVE_EVERY, pause=0.05)
    trainer_of(run, Path(folder)).fit(samples(), num_steps=NUM_STEPS)


def _finish(processes: Sequence[ForkProcess], folder: Path) -> None:
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    if any(codes):
        raise RuntimeError(f"workers of {folder.name} ended with {codes}: see the log")


def _wait(processes: Sequence[ForkProcess], seconds: float) -> bool:
    """Whether all ended by themselves."""
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.1, until - time.monotonic()))
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
        process.join()
    return not alive


def _losses(folder: Path) -> dict[int, float]:
    """Losses by step, of all starts; a later start's count."""
    results = {}
    for file in sorted(folder.glob("losses-*")):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                number, loss = json.loads(line)
                results[int(number)] = float.fromhex(loss)
    return results
