"""What ``benchmarks.kill`` trains: a small transformer, tokens, and one rank's run of ``planner.Trainer``."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

import planner
from planner.trainer import decay_groups, warmup_cosine
from planner.verification.verify_model import slow_devices

VOCABULARY, LENGTH, HIDDEN, HEADS = 64, 12, 32, 4
NUM_SAMPLES, GLOBAL_BATCH = 67, 8  # the last batch of an epoch is not full
IGNORED = -100


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.before_mlp = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.before_attention(x)
        heads = [part(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.down(F.gelu(self.up(self.before_mlp(x)))))


class Decoder(nn.Module):
    """Four blocks and an output layer tied to the embedding; the mean loss over labels that are not ignored."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(LENGTH, HIDDEN) * 0.1)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(4))
        self.norm = nn.LayerNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = self.output(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)}


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        fix: decisions of the plan, as in ``planner.plan(fix=…)``; mesh axes that are not given have size 1.
        noise: replace this share of the tokens, drawn from a rank's own generator while it makes a batch.
        pause: seconds that making a batch takes at least.
        options: further arguments of ``planner.Trainer``.
    """

    num_ranks: int
    fix: Mapping[str, Any]
    num_steps: int
    save_every: int
    dropout: float = 0.0
    noise: float = 0.0
    pause: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)


def samples() -> list[dict[str, torch.Tensor]]:
    """Counting modulo the vocabulary, from and by numbers that differ; each sample ignores another number of labels."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for index in range(NUM_SAMPLES):
        first, by = torch.randint(VOCABULARY, (2,), generator=generator).tolist()
        row = (first + by % 5 * torch.arange(LENGTH + 1)) % VOCABULARY
        labels = row[1:].clone()
        labels[: index % 5] = IGNORED
        results.append({"tokens": row[:-1], "labels": labels})
    return results


def trainer_of(run: Run, folder: Path) -> planner.Trainer:
    """The trainer of ``run``; its losses go to a file of ``folder`` that each start of the run has for itself."""
    torch.manual_seed(1)
    losses = (folder / f"losses-{time.time_ns()}").open("a") if os.environ["RANK"] == "0" else None

    def collate(rows: Sequence[Any]) -> dict[str, torch.Tensor]:
        time.sleep(run.pause)
        batch: dict[str, torch.Tensor] = default_collate(list(rows))
        if run.noise:
            drawn = torch.randint_like(batch["tokens"], VOCABULARY)
            batch["tokens"] = torch.where(torch.rand(drawn.shape) < run.noise, drawn, batch["tokens"])
        return batch

    def write_down(values: Mapping[str, float]) -> None:
        if losses is not None:
            losses.write(json.dumps([int(values["step"]), values["loss"].hex()]) + "\n")
            losses.flush()

    return planner.Trainer(
        Decoder(run.dropout),
        slow_devices(run.num_ranks),
        fix={"pp": 1, "dp": 1, "cp": 1, "tp": 1, **run.fix},
        collate_fn=collate,
        optimizer=lambda parameters: torch.optim.AdamW(decay_groups(parameters, weight_decay=0.1), lr=3e-3),
        lr_schedule=warmup_cosine(5, 1000),
        global_batch=GLOBAL_BATCH,
        max_grad_norm=1.0,
        checkpoint_dir=folder / "checkpoints",
        save_every=run.save_every,
        log_every=1,
        on_log=write_down,
        **run.options,
    )


def train(run: Run, folder: Path, rank: int, port: int) -> None:
    """One rank, from wherever the last checkpoint is to the end; rank 0 then writes down a digest of the weights."""
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.nice(5)  # whoever is to kill it must see its moment
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(run.num_ranks), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    trainer = trainer_of(run, folder)
    trainer.fit(samples(), num_steps=run.num_steps)
    weights = trainer.parallel.full_state_dict()
    if rank == 0:
        digest = hashlib.sha256()
        for name in sorted(weights):
            digest.update(weights[name].contiguous().numpy().tobytes())
        (folder / "weights").write_text(digest.hexdigest())
        trainer.parallel.plan.save(folder / "plan.json")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
