"""Processes killed at random moments of an elastic training: 4 → 3 → 4, and the losses are those of one device.

    python -m benchmarks.elastic [--kills 10] [--seed 0] [--only zero] [--points] [--markdown PATH]

Four processes train in float64, each with a part of the state. Again and again one of them gets a SIGKILL: at a random
moment after all four have taken part in a step. The others go on as three from what they hold, with the same global
batch; another process starts in the place of the lost one and joins. Every loss that any of them wrote, the weights
and their averages at the end are compared with plain PyTorch on one device. The exit status is 1 if any differs by
1e-6, a step is missing, or more than the step under way was lost.

With ``--points`` they are killed at points that are drawn by the seed, and not by a clock: in the forward pass, in the
backward pass, while a collective is under way, between two tensors of the optimizer's step, in the copy to the second
holder, and before all know that it is complete (``kill_points.py``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import multiprocessing.process
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.elastic_worker import Training, rows_in, run_member, train_alone
from benchmarks.kill_points import drawn
from runtime.elastic.job_rounds import MEMBER_VARIABLE, STORE_VARIABLE, Leader
from runtime.elastic.supervisor import Supervisor

NUM_PROCESSES, LEAST, TOLERANCE = 4, 2, 1e-6
#: Seconds that a process needs at most until it is ready to join.
LATEST = 4.0
#: Seconds that a training has at most.
LIMIT = 900.0
#: This process has run autograd, after which torch 2.11 refuses to in its forks: the server has only imported it.
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["benchmarks.elastic_worker", "planner.whole_step.plan_step", "torch.export._trace"])

TRAININGS = {
    "dp, ZeRO 3": Training({n: f"dp={n}" for n in (1, 2, 3, 4)}, {"zero": 3}, num_steps=400, pause=0.1),
    "pp=2, dp=2 and dp=3": Training({4: "pp=2,dp=2", 3: "dp=3", 2: "pp=2", 1: "dp=1"}, {}, num_steps=400, pause=0.1),
    "dp, held by all": Training({n: f"dp={n}" for n in (1, 2, 3, 4)}, {"zero": 0}, num_steps=400, pause=0.1),
}


@dataclass(frozen=True)
class MemberProcess:
    """A process of the fork server, as the supervisor looks after it."""

    process: multiprocessing.process.BaseProcess

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


@dataclass
class Killer:
    """Kills one process after the other, each once ``NUM_PROCESSES`` have taken part in a step since the last."""

    folder: Path
    draw: random.Random
    kills_left: int
    processes: dict[int, MemberProcess] = field(default_factory=dict)
    killed_at: list[int] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while self.kills_left and not self.ended.wait(0.05):
            rows = rows_in(self.folder)
            newest = newest_in(rows)
            at_work = [entry for entry in rows if entry[0] == newest and entry[2] == NUM_PROCESSES]
            if not at_work or newest <= max(self.killed_at, default=-1) + 1:
                continue
            if self.ended.wait(self.draw.uniform(0.0, 1.0)):
                return
            victim = self.draw.choice([one for one in self.processes.values() if one.poll() is None])
            victim.kill()
            self.kills_left -= 1
            time.sleep(0.1)  # what was on its way is written down
            self.killed_at.append(newest_in(rows_in(self.folder)))


def newest_in(rows: Sequence[Sequence[float]]) -> int:
    """The last step of which anything was written down."""
    return int(max((row[0] for row in rows), default=-1))


def run_elastically(
    training: Training,
    folder: Path,
    draw: random.Random,
    num_kills: int,
    *,
    num_processes: int = NUM_PROCESSES,
    least: int = LEAST,
    max_restarts: int | None = None,
) -> Killer:
    """Run it with so many kills; the killer tells what it did."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    killer = Killer(folder, draw, num_kills)

    def start(number: int, place: int) -> MemberProcess:
        pause = draw.uniform(0.0, LATEST) if number > num_processes and num_kills else 0.0
        member = {STORE_VARIABLE: f"127.0.0.1:{store.port}", MEMBER_VARIABLE: str(number)}
        process = FORK_SERVER.Process(target=run_member, args=(training, folder, member, pause), daemon=True)
        process.start()
        killer.processes[number] = MemberProcess(process)
        return killer.processes[number]

    supervisor = Supervisor(
        store,
        start,
        num_processes=num_processes,
        max_restarts=num_kills if max_restarts is None else max_restarts,
        leader=Leader(store, first=num_processes, least=least),
        on_loss=lambda words: None,
    )
    killing = threading.Thread(target=killer.run, daemon=True)
    killing.start()
    limit = threading.Timer(LIMIT, lambda: [one.kill() for one in killer.processes.values()])
    limit.start()
    code = supervisor.run()
    limit.cancel()
    killer.ended.set()
    killing.join()
    if code:
        raise RuntimeError(f"the training ended with {code}:\n{(folder / 'log').read_text()[-6000:]}")
    return killer


def compared(training: Training, folder: Path) -> dict[str, Any]:
    """What processes have written down, against plain PyTorch on one device."""
    rows = rows_in(folder)
    losses, weights, average = train_alone(training)
    found, found_average = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for path in folder.glob("weights-*.pt"):  # of a pipeline each rank has its own averages
        for tensors, own in zip((found, found_average), torch.load(path, weights_only=True)):
            tensors.update(own)
    return {
        "losses": max(abs(loss - losses[int(step)]) / abs(losses[int(step)]) for step, loss, *_ in rows),
        "weights": max(
            float((got[key] - one).abs().max() / one.abs().max())
            for got, wanted in ((found, weights), (found_average, average))
            for key, one in wanted.items()
        ),
        "steps": sorted({int(entry[0]) for entry in rows}),
        "lost": most_lost(folder),
        "killed": [path.read_text() for path in sorted(folder.glob("killed-*"), key=lambda each: int(each.name[7:]))],
        "processes": sorted({int(entry[2]) for entry in rows}),
        "own bytes": max(int(entry[3]) for entry in rows),
        "second bytes": max(int(entry[4]) for entry in rows),
    }


def most_lost(folder: Path) -> int:
    """The most steps that any process had to do again after another was lost."""
    lost = 0
    for path in folder.glob("losses-*"):
        steps = [json.loads(line)[0] for line in path.read_text().split("\n")[:-1]]
        lost = max([lost, *(before + 1 - step for before, step in itertools.pairwise(steps))])
    return lost


def row(name: str, training: Training, seed: int, num_kills: int) -> tuple[str, bool]:
    """A row of the table, and whether all held."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        started = time.monotonic()
        if training.points:
            killer = run_elastically(training, folder, random.Random(seed), 0, max_restarts=num_kills)
        else:
            killer = run_elastically(training, folder, random.Random(seed), num_kills)
        seconds = time.monotonic() - started
        result = compared(training, folder)
    kills = len(killer.killed_at) + len(result["killed"])
    for words in result["killed"]:
        print(f"killed: {words}")
    off = max(result["losses"], result["weights"])
    holds = off < TOLERANCE and result["steps"] == list(range(training.num_steps)) and kills == num_kills
    holds = holds and result["lost"] <= training.every
    cells = [name, kills, training.num_steps, ", ".join(map(str, result["processes"])),
             f"{result['losses']:.1e}", f"{result['weights']:.1e}", result["lost"],
             f"{result['own bytes']:,}", f"{result['second bytes']:,}", f"{seconds:.0f}"]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |", holds


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10, help="of each training")
    parser.add_argument("--steps", type=int, help="of each training")
    parser.add_argument("--points", action="store_true", help="kill at points within a step, and not by a clock")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="trainings whose name has this in it")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    lines: Sequence[str] = [
        "| training | kills | steps | processes | losses | weights, averages | again | own bytes | another's | s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    all_held = True
    for name, training in TRAININGS.items():
        if options.only in name:
            if options.steps:
                training = replace(training, num_steps=options.steps)
            if options.points:
                points = drawn(options.kills, NUM_PROCESSES, options.seed)
                training = replace(training, points=points, pause=0.0)
            line, held = row(name, training, options.seed, options.kills)
            all_held = all_held and held
            lines = [*lines, line]
            print(line, flush=True)
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if all_held else 1


if __name__ == "__main__":
    sys.exit(main())
