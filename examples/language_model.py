"""Language modelling: a small Llama learns Python from the standard library's sources, read as bytes.

planner run --nproc 4 examples/language_model.py
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import planner
from planner.trainer import decay_groups, warmup_cosine

SEQ_LEN = 64
STEPS = 70
GOAL = 3.2  # nats a byte; 5.5 before training


class Windows(torch.utils.data.Dataset):
    """Consecutive windows of the bytes of many files; what follows a window is not in it."""

    def __init__(self, text: bytes) -> None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.windows = tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def datasets() -> tuple[Windows, Windows]:
    """For training, and 160 windows for evaluation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    return Windows(text[:2_000_000]), Windows(text[2_000_000:2_010_240])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="pp=2,dp=2", help="axis sizes, a cluster, or the path of a plan")
    parser.add_argument("--checkpoints", help="folder to keep checkpoints in, and to resume from")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4
    )
    train, held_out = datasets()
    trainer = planner.Trainer(
        LlamaForCausalLM(config),
        options.mesh,
        global_batch=32,
        optimizer=lambda parameters: torch.optim.AdamW(decay_groups(parameters, weight_decay=0.1), lr=5e-3),
        lr_schedule=warmup_cosine(10, STEPS),
        max_grad_norm=1.0,
        checkpoint_dir=options.checkpoints,
        log_every=20,
    )
    result = trainer.fit(train, held_out, num_steps=STEPS)
    if trainer.is_first:
        print(f"loss {result.best:.3f} (goal {GOAL})")


if __name__ == "__main__":
    main()
