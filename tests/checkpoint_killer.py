"""Kill processes at random moments of saving, and load what is there: ``python checkpoint_killer.py DIR RANKS ROUNDS``.

Processes are forked from this one, which has PyTorch loaded and has no process group.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

import torch

from runtime.checkpoint import CheckpointManager
from runtime.checkpoint.directory import latest_name
from tests.checkpoint_cases import Pieces, state_is_right, trained_once, uneven_chunks, whole_pieces
from tests.patience import PATIENCE


def save_forever(rank: int, num_ranks: int, directory: Path, first: int) -> None:
    """Save one checkpoint after the other, until killed or left alone."""
    if num_ranks > 1:
        store = f"file://{directory}/store{first}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    manager = CheckpointManager(directory, keep_last=2)
    for step in itertools.count(first):
        model = Pieces(uneven_chunks(rank, num_ranks))
        optimizer = trained_once(model)
        model.fill(seed=step)
        manager.save(model, optimizer, step=step, extra=step)


def round_of_saves(directory: Path, num_ranks: int, latest: int, generator: random.Random) -> None:
    """Let processes save until there is a checkpoint after ``latest``; then kill one a little later, and the rest."""
    forked = multiprocessing.get_context("fork")
    processes = [
        forked.Process(target=save_forever, args=(rank, num_ranks, directory, latest + 1)) for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + PATIENCE
        while latest_name(directory) in (None, f"step-{latest:08d}"):
            assert all(process.is_alive() for process in processes), "a process ended before it was killed"
            assert time.monotonic() < deadline, "no checkpoint in time"
            time.sleep(0.01)
        time.sleep(generator.uniform(0.0, 0.3))
        generator.choice(processes).kill()
        time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.join()


def main(directory: Path, num_ranks: int, rounds: int) -> None:
    generator, latest = random.Random(5), 0
    for _ in range(rounds):
        round_of_saves(directory, num_ranks, latest, generator)
        model = Pieces(whole_pieces(), seed=None)
        optimizer = trained_once(model)
        loaded = CheckpointManager(directory).load(model, optimizer)
        assert loaded.step > latest and loaded.extra == loaded.step
        assert model.holds(seed=loaded.step) and state_is_right(model, optimizer)
        latest = loaded.step
    print(f"the last good checkpoint loaded {rounds} times")


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
