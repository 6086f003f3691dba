"""Sequence to sequence: a small T5 learns to turn camelCase names into snake_case, from the standard library's names.

planner run --nproc 4 examples/sequence_to_sequence.py
"""

from __future__ import annotations

import argparse
import random
import re
import sysconfig
from pathlib import Path

import torch
from transformers import T5Config, T5ForConditionalGeneration

import planner
from planner.trainer import decay_groups, warmup_cosine

LENGTH = 16
STEPS = 70
GOAL = 2.2  # nats a character; 5.1 before training
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_"
PAD, END = 0, 1
Sample = dict[str, torch.Tensor]


def encoded(text: str) -> list[int]:
    return [ALPHABET.index(character) + 2 for character in text] + [END]


def camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def datasets() -> tuple[list[Sample], list[Sample]]:
    """Pairs of one name written both ways, for training and for evaluation; [LENGTH] each."""
    text = "".join(path.read_text(errors="ignore") for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    names = sorted({name for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text) if len(name) < LENGTH})
    random.Random(0).shuffle(names)
    samples = []
    for name in names:
        source, target = encoded(camel_case(name)), encoded(name)
        samples.append({
            "input_ids": torch.tensor(source + [PAD] * (LENGTH - len(source))),
            "attention_mask": torch.tensor([1] * len(source) + [0] * (LENGTH - len(source))),
            "labels": torch.tensor(target + [-100] * (LENGTH - len(target))),
        })  # fmt: skip
    return samples[:-192], samples[-192:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axis sizes, a cluster, or the path of a plan")
    parser.add_argument("--checkpoints", help="folder to keep checkpoints in, and to resume from")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=56,  # 53 characters, padding and end, rounded up to what several ranks can share
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=PAD,
    )
    train, held_out = datasets()
    trainer = planner.Trainer(
        T5ForConditionalGeneration(config),
        options.mesh,
        global_batch=64,
        optimizer=lambda parameters: torch.optim.AdamW(decay_groups(parameters, weight_decay=0.01), lr=5e-3),
        lr_schedule=warmup_cosine(10, STEPS),
        max_grad_norm=1.0,
        checkpoint_dir=options.checkpoints,
        eval_every=STEPS,
        log_every=25,
    )
    result = trainer.fit(train, held_out, num_steps=STEPS)
    if trainer.is_first:
        print(f"loss {result.best:.3f} (goal {GOAL})")


if __name__ == "__main__":
    main()
