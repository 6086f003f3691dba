"""A process that saves one checkpoint after the other until it is killed."""

from __future__ import annotations

import itertools
import sys

import torch

from runtime.checkpoint import CheckpointManager
from tests.checkpoint_cases import Pieces, trained_once, whole_pieces

if __name__ == "__main__":
    torch.set_num_threads(1)
    manager = CheckpointManager(sys.argv[1], keep_last=2)
    for step in itertools.count(int(sys.argv[2]) + 1):
        model = Pieces(whole_pieces())
        optimizer = trained_once(model)
        model.fill(seed=step)
        manager.save(model, optimizer, step=step, extra=step)
