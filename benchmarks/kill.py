"""Workers killed at random moments of training and of saving: what is left resumes with the very same losses.

    python -m benchmarks.kill [--seed 0] [--only pipeline] [--markdown benchmarks/results/kill.md]

For each way of training, a run that nothing interrupts writes down the loss of every step. Then the same run is started
again and again, and workers are killed (SIGKILL; one, or all): at a random moment after a random step, or at a random
moment at which the folder of an unfinished checkpoint is there. The rest must end by itself, the next start must go on
after the last complete checkpoint, and every loss that any start wrote down, and the weights at the end, must be
bitwise those of the uninterrupted run. Last, a checkpoint of dp=2, tp=2 is resumed on other meshes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.kill_worker import Run, train
from benchmarks.ports import free_port
from runtime.checkpoint import directory as folders

#: Relative difference of losses (float32) that another mesh may have.
TOLERANCE = 1e-5
#: Seconds that survivors have to end by themselves, and that any run has.
GRACE, LIMIT = 90.0, 600.0
LOOK = 0.005
Row = TypeVar("Row")
#: A mesh, how many steps it went on for, and the largest relative difference of their losses.
Resumed = tuple[str, int, float]


@dataclass(frozen=True)
class Scenario:
    name: str
    run: Run
    training: int  # kills while training
    saving: int  # kills while saving


def scenario(name: str, training: int, saving: int, *, num_ranks: int = 2, **fix: object) -> Scenario:
    run = Run(num_ranks, {"num_microbatches": 2, **fix}, num_steps=30, save_every=3, pause=0.03)
    return Scenario(name, run, training, saving)


def with_noise(case: Scenario, *, dropout: float = 0.0, noise: float = 0.0) -> Scenario:
    return replace(case, run=replace(case.run, dropout=dropout, noise=noise))


SCENARIOS = (
    scenario("dp=2 ZeRO 2", 3, 3, dp=2, zero=2),
    with_noise(scenario("dp=2 ZeRO 3, dropout, noise in batches", 3, 3, dp=2, zero=3), dropout=0.2, noise=0.1),
    scenario("pp=2 1f1b", 2, 2, pp=2, num_microbatches=4, schedule="1f1b"),
    with_noise(scenario("tp=2, dropout", 2, 2, tp=2), dropout=0.2),
)

#: Who goes on with the checkpoint of dp=2, tp=2.
BASE = Run(4, {"dp": 2, "tp": 2, "zero": 1, "num_microbatches": 2}, num_steps=12, save_every=100)
SAVED_AT = 5
OTHERS = {
    "tp=4": replace(BASE, fix={"tp": 4, "num_microbatches": 2}),
    "pp=4": replace(BASE, fix={"pp": 4, "num_microbatches": 4, "schedule": "1f1b"}),
    "one process": replace(BASE, num_ranks=1, fix={"num_microbatches": 1}),
    "dp=2, tp=2": BASE,
    "dp=4, ZeRO 3": replace(BASE, fix={"dp": 4, "zero": 3, "num_microbatches": 1}),
    "pp=2, dp=2, ZeRO 1": replace(BASE, fix={"pp": 2, "dp": 2, "zero": 1, "num_microbatches": 2, "schedule": "1f1b"}),
}


@dataclass(frozen=True)
class Kill:
    """One kill and what came of it; ``ended``: seconds until the survivors had ended (None: they hung)."""

    scenario: str
    moment: str
    victim: str
    at_step: int
    left: str
    resumed_from: int
    ended: float | None
    wrong: int


def start(run: Run, folder: Path) -> list[ForkProcess]:
    """All ranks, forked from this process, which has PyTorch loaded and has no process group."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    forked = multiprocessing.get_context("fork")
    processes = [forked.Process(target=train, args=(run, folder, rank, port)) for rank in range(run.num_ranks)]
    for process in processes:
        process.start()
    return processes


def end(processes: Sequence[ForkProcess], seconds: float) -> float | None:
    """Seconds until all have ended; None if some had to be killed."""
    began = time.monotonic()
    for process in processes:
        process.join(max(0.0, began + seconds - time.monotonic()))
    hung = [process for process in processes if process.is_alive()]
    for process in hung:
        process.kill()
        process.join()
    return None if hung else time.monotonic() - began


def finish(processes: Sequence[ForkProcess], folder: Path) -> None:
    """Wait until training is complete.

    Raises:
        RuntimeError: with the end of a worker's log, if one failed.
    """
    deadline = time.monotonic() + LIMIT
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes) or time.monotonic() > deadline:
            end(processes, GRACE / 3)
        time.sleep(0.05)
    check_codes(processes, folder)


def check_codes(processes: Sequence[ForkProcess], folder: Path) -> None:
    for rank, process in enumerate(processes):
        if process.exitcode:
            log = (folder / f"log{rank}").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"rank {rank} ended with {process.exitcode}:\n{log}")


def losses_of(file: Path) -> list[tuple[int, str]]:
    """Step and loss (as hexadecimal, to the last bit) of what one start wrote down; half a line is left out."""
    lines = file.read_text().splitlines(keepends=True)
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


def newest(folder: Path) -> Path | None:
    return max(folder.glob("losses-*"), default=None)


def last_of(folder: Path) -> Path:
    return folder / "checkpoints" / "last"


def unfinished(folder: Path) -> dict[tuple[str, int, int], int]:
    """Folders of checkpoints being written (or left behind), by name, inode and time of change: their steps."""
    observed = {}
    for entry in last_of(folder).glob(folders.UNFINISHED + "*"):
        try:
            stat = entry.stat()
        except FileNotFoundError:
            continue
        observed[entry.name, stat.st_ino, stat.st_ctime_ns] = folders.step_of(
            entry.name.removeprefix(folders.UNFINISHED)
        )
    return observed


@dataclass(frozen=True)
class Pace:
    """Seconds of a step, and of a save, in an uninterrupted run (medians)."""

    step: float
    save: float


def uninterrupted(run: Run, folder: Path) -> tuple[dict[int, str], str, Pace]:
    """Losses by step, the digest of the final weights, and how long things take."""
    processes = start(run, folder)
    saves: dict[int, list[float]] = {}
    steps: dict[int, float] = {}
    removed: set[int] = set()
    while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
        now = time.monotonic()
        present = set(unfinished(folder).values())
        removed |= saves.keys() - present  # a folder is seen once more when its old checkpoint is removed
        for of_step in present - removed:
            saves.setdefault(of_step, []).append(now)
        file = newest(folder)
        done = losses_of(file) if file is not None else []
        if done:
            steps.setdefault(done[-1][0], now)
        time.sleep(LOOK)
    finish(processes, folder)
    file = newest(folder)
    assert file is not None
    times = sorted(steps.values())
    pace = Pace(
        statistics.median(after - before for before, after in itertools.pairwise(times)),
        statistics.median(seen[-1] - seen[0] + LOOK for seen in saves.values()) if saves else LOOK,
    )
    return dict(losses_of(file)), (folder / "weights").read_text(), pace


def moments(count: int, run: Run, generator: random.Random, kinds: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Steps at which to kill, ascending, uniform over training, each with what the kill is to meet."""
    steps = sorted(generator.randrange(1, run.num_steps - 2 * run.save_every) for _ in range(count))
    order = list(kinds)
    generator.shuffle(order)
    return zip(steps, order, strict=True)


def await_moment(
    processes: Sequence[ForkProcess], folder: Path, step: int, kind: str, pace: Pace, generator: random.Random
) -> int | None:
    """Return at the moment to kill, with the last step done; None if training was complete before."""
    before, files = unfinished(folder), set(folder.glob("losses-*"))
    deadline = time.monotonic() + LIMIT
    done = 0
    while all(process.is_alive() for process in processes):
        if time.monotonic() > deadline:
            raise RuntimeError(f"step {step} was not reached within {LIMIT} s")
        time.sleep(LOOK)
        file = newest(folder)
        if file is None or file in files:
            continue
        losses = losses_of(file)
        done = losses[-1][0] if losses else 0
        if kind == "training" and done >= step:
            time.sleep(generator.uniform(0.0, pace.step))
            return done
        current = [key for key, of_step in unfinished(folder).items() if key not in before and of_step >= step]
        if kind == "saving" and current:
            time.sleep(generator.uniform(0.0, pace.save))
            # Only while the folder is still there is it a kill while saving; else wait for the next one.
            if any(of_step > complete_step(folder) for of_step in unfinished(folder).values()):
                return losses_of(file)[-1][0]
    end(processes, GRACE)
    check_codes(processes, folder)
    return None


def state_after(folder: Path) -> tuple[str, int]:
    """What a kill left behind, and the step of the last complete checkpoint (0: none), whose files are all there."""
    directory = last_of(folder)
    left = list(directory.glob(folders.UNFINISHED + "*")) if directory.exists() else []
    files = [file for entry in left for file in entry.iterdir()]
    text = f"unfinished folder, {len(files)} files" if left else "nothing unfinished"
    name = folders.latest_name(directory)
    if name is not None:
        folders.check_complete(directory / name)
    return text, complete_step(folder)


def complete_step(folder: Path) -> int:
    """Of the last complete checkpoint; 0 if there is none."""
    name = folders.latest_name(last_of(folder))
    return 0 if name is None else folders.step_of(name)


def killed_again_and_again(case: Scenario, folder: Path, generator: random.Random) -> Iterator[Kill]:
    """All kills of a scenario; the last start trains to the end.

    Raises:
        RuntimeError: if losses or weights are not those of the uninterrupted run.
    """
    run = case.run
    losses, weights, pace = uninterrupted(run, folder / "uninterrupted")
    print(f"{case.name}: a step {pace.step:.3f} s, a save {pace.save:.3f} s", flush=True)
    assert sorted(losses) == list(range(1, run.num_steps + 1))
    killed = folder / "killed"
    kinds = ["training"] * case.training + ["saving"] * case.saving
    pending: Kill | None = None
    for step, kind in moments(len(kinds), run, generator, kinds):
        at: int | None = None
        while at is None:
            processes = start(run, killed)
            at = await_moment(processes, killed, step, kind, pace, generator)
            if at is None:  # training was complete before the moment came: from the beginning
                if pending is not None:
                    yield check(pending, killed, losses)
                pending = None
                shutil.rmtree(killed / "checkpoints")
        victims = generator.choice([[rank] for rank in range(run.num_ranks)] * 2 + [list(range(run.num_ranks))])
        for rank in victims:
            processes[rank].kill()
        ended = end(processes, GRACE)
        if pending is not None:
            yield check(pending, killed, losses)
        left, complete = state_after(killed)
        victim = "all" if len(victims) > 1 else f"rank {victims[0]}"
        pending = Kill(case.name, kind, victim, at, left, complete, ended, wrong=0)
    finish(start(run, killed), killed)
    if pending is not None:
        yield check(pending, killed, losses)
    if (killed / "weights").read_text() != weights:
        raise RuntimeError(f"{case.name}: other weights at the end than those of the uninterrupted run")
    if (killed / "plan.json").read_text() != (folder / "uninterrupted" / "plan.json").read_text():
        raise RuntimeError(f"{case.name}: another plan was found")


def check(kill: Kill, folder: Path, losses: dict[int, str]) -> Kill:
    """Compare what the start after a kill wrote down."""
    file = newest(folder)
    assert file is not None
    observed = losses_of(file)
    steps = [step for step, _ in observed]
    expected = range(kill.resumed_from + 1, kill.resumed_from + 1 + len(steps))
    wrong = sum(losses[step] != loss for step, loss in observed) if steps == list(expected) else len(steps)
    return replace(kill, wrong=wrong)


def on_other_meshes(folder: Path) -> Iterator[Resumed]:
    """The checkpoint of one mesh, resumed on each of the others."""
    losses, _, _ = uninterrupted(BASE, folder / "uninterrupted")
    finish(start(replace(BASE, num_steps=SAVED_AT), folder / "saved"), folder / "saved")
    for name, run in OTHERS.items():
        place = folder / name.replace(" ", "")
        shutil.copytree(folder / "saved" / "checkpoints", place / "checkpoints")
        finish(start(run, place), place)
        file = newest(place)
        assert file is not None
        observed = {step: float.fromhex(loss) for step, loss in losses_of(file)}
        assert list(observed) == list(range(SAVED_AT + 1, BASE.num_steps + 1))
        expected = {step: float.fromhex(losses[step]) for step in observed}
        yield name, len(observed), max(abs(observed[step] / expected[step] - 1) for step in observed)


def table(head: str, rows: Sequence[Sequence[object]]) -> str:
    columns = head.split("|")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).strip() for cell in line) + " |" for line in lines)


def report(kills: Sequence[Kill], others: Sequence[Resumed]) -> str:
    text = (
        f"# Workers killed\n\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores shared with other "
        f"work, Python {platform.python_version()}, PyTorch {torch.__version__}, gloo over loopback, float32.\n"
    )
    if kills:
        counts = Counter(kill.moment for kill in kills)
        ended = [kill.ended for kill in kills if kill.ended is not None]
        text += (
            f"\n{len(kills)} kills, {counts['saving']} of them while saving: after "
            f"{sum(kill.wrong > 0 for kill in kills)} of them a loss differed from the uninterrupted run's (bitwise); "
            f"after {len(kills) - len(ended)} survivors hung, else they had ended within {max(ended, default=0):.1f} s "
            f"(median {statistics.median(ended or [0]):.1f} s).\n\n"
        )
        text += f"{table(KILL_HEAD, [row_of(kill) for kill in kills])}\n"
    if others:
        rows = [(name, steps, f"{worst:.1e}", "yes" if worst <= TOLERANCE else "no") for name, steps, worst in others]
        head = f"resumed on | steps | largest relative difference of a loss | within {TOLERANCE:g}"
        text += f"\n## The checkpoint of dp=2, tp=2 (ZeRO 1) after {SAVED_AT} steps\n\n{table(head, rows)}\n"
    return text


KILL_HEAD = (
    "run | killed while | victim | last step | left behind | resumed after step | others ended, s | losses after"
)


def row_of(kill: Kill) -> tuple[object, ...]:
    ended = "hung" if kill.ended is None else f"{kill.ended:.1f}"
    wrong = f"{kill.wrong} differ" if kill.wrong else "the same"
    return kill.scenario, kill.moment, kill.victim, kill.at_step, kill.left, kill.resumed_from, ended, wrong


def kills_of(number: int, seed: int, folder: Path) -> list[Kill]:
    """All kills of one scenario."""
    case = SCENARIOS[number]
    generator = random.Random(f"{seed}/{case.name}")
    return shown(killed_again_and_again(case, folder / str(number), generator))


def meshes(folder: Path) -> list[Resumed]:
    return shown(on_other_meshes(folder / "meshes"))


def shown(rows: Iterator[Row]) -> list[Row]:
    """All rows; each is printed as it comes."""
    observed = []
    for row in rows:
        print(f"  {row}", flush=True)
        observed.append(row)
    return observed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a scenario's name; 'meshes' for the last part alone")
    parser.add_argument("--jobs", type=int, default=1, help="how many scenarios run at once")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [number for number, case in enumerate(SCENARIOS) if arguments.only in case.name]
    pool = ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("fork"))
    with tempfile.TemporaryDirectory() as name, pool:
        running = [pool.submit(kills_of, number, arguments.seed, Path(name)) for number in chosen]
        resuming = [pool.submit(meshes, Path(name))] if arguments.only in ("", "meshes") else []
        kills = [kill for future in running for kill in future.result()]
        others = [row for future in resuming for row in future.result()]
    text = report(kills, others)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
