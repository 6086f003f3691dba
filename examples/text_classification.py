"""Text classification, as in GLUE: a small BERT reads a line and tells comments from code.

The lines are those of the standard library's sources, without the mark of a comment.

planner run --nproc 4 examples/text_classification.py
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

import planner
from planner.trainer import decay_groups, warmup_cosine

LENGTH = 24
STEPS = 80
GOAL = 0.5  # nats; 0.69 before training
Sample = dict[str, torch.Tensor]


def encoded(line: str, label: int) -> Sample:
    """The first characters of a line as bytes, padded to ``LENGTH``."""
    text = list(line.encode("ascii", "ignore"))[:LENGTH]
    padding = LENGTH - len(text)
    return {
        "input_ids": torch.tensor(text + [0] * padding),
        "attention_mask": torch.tensor([1] * len(text) + [0] * padding),
        "labels": torch.tensor(label),
    }


def datasets() -> tuple[list[Sample], list[Sample]]:
    """As many comments (1) as lines of code (0), for training and for evaluation."""
    lines: tuple[list[str], list[str]] = [], []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py")):
        for line in map(str.strip, path.read_text(errors="ignore").splitlines()):
            if len(line) > 12:
                lines[line.startswith("# ")].append(line.removeprefix("# "))
    count = min(map(len, lines))
    pick = random.Random(0)
    samples = [encoded(line, label) for label in (0, 1) for line in pick.sample(lines[label], count)]
    pick.shuffle(samples)
    return samples[:-256], samples[-256:]


def correct(outputs: Any, batch: Any) -> torch.Tensor:
    return outputs.logits.argmax(-1) == batch["labels"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axis sizes, a cluster, or the path of a plan")
    parser.add_argument("--checkpoints", help="folder to keep checkpoints in, and to resume from")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
        num_labels=2,
    )
    train, held_out = datasets()
    trainer = planner.Trainer(
        BertForSequenceClassification(config),
        options.mesh,
        metrics={"accuracy": correct},
        global_batch=64,
        optimizer=lambda parameters: torch.optim.AdamW(decay_groups(parameters, weight_decay=0.01), lr=1e-2),
        lr_schedule=warmup_cosine(5, STEPS),
        checkpoint_dir=options.checkpoints,
        eval_every=STEPS,
        log_every=20,
    )
    result = trainer.fit(train, held_out, num_steps=STEPS)
    if trainer.is_first:
        print(f"loss {result.best:.3f} (goal {GOAL})")


if __name__ == "__main__":
    main()
