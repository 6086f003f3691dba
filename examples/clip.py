"""CLIP: two towers learn which picture of four handwritten digits goes with which text ("3 1 4 1"), by contrast.

planner run --nproc 4 examples/clip.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from transformers import CLIPConfig, CLIPModel

import planner
from planner.trainer import warmup_cosine

STEPS = 100
GOAL = 1.5  # nats a pair among 32; 3.5 before training
START, END = 10, 11  # tokens beside the ten digits
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 64,
}
Sample = dict[str, torch.Tensor]


def pairs(number: int, digits: range) -> list[Sample]:
    """Pictures [1, 16, 16] of four digits each, and what they show [6]."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32) / 8 - 1
    chosen = torch.randint(digits.start, digits.stop, (number, 4), generator=torch.Generator().manual_seed(0))
    quarters = images[chosen]  # [number, 4, 8, 8]
    rows = torch.cat([torch.cat(list(quarters[:, row : row + 2].unbind(1)), dim=-1) for row in (0, 2)], dim=-2)
    texts = torch.tensor(data.target)[chosen]
    ends = torch.tensor([[START, END]]).expand(number, 2)
    tokens = torch.cat([ends[:, :1], texts, ends[:, 1:]], dim=1)
    return [{"pixel_values": image[None], "input_ids": text} for image, text in zip(rows, tokens)]


def build() -> CLIPModel:
    text = {"vocab_size": 12, "max_position_embeddings": 6, "bos_token_id": START, "eos_token_id": END, **SIZES}
    vision = {"image_size": 16, "patch_size": 8, "num_channels": 1, **SIZES}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


def contrast(outputs: Any, batch: Sample) -> torch.Tensor:
    """Every text has to find its picture among all of the batch, and every picture its text."""
    logits = outputs.logits_per_text
    pair = torch.arange(logits.shape[0], device=logits.device)
    return (cross_entropy(logits, pair) + cross_entropy(logits.T, pair)) / 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axis sizes, a cluster, or the path of a plan")
    parser.add_argument("--checkpoints", help="folder to keep checkpoints in, and to resume from")
    options = parser.parse_args()

    torch.manual_seed(0)
    trainer = planner.Trainer(
        build(),
        options.mesh,
        loss_fn=contrast,
        global_batch=32,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        lr_schedule=warmup_cosine(10, STEPS),
        max_grad_norm=1.0,
        checkpoint_dir=options.checkpoints,
        eval_every=STEPS,
        log_every=20,
    )
    result = trainer.fit(pairs(STEPS * 32, range(1437)), pairs(96, range(1437, 1797)), num_steps=STEPS)
    if trainer.is_first:
        print(f"loss {result.best:.3f} (goal {GOAL})")


if __name__ == "__main__":
    main()
