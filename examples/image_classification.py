"""Image classification: a small vision transformer reads scikit-learn's handwritten digits.

planner run --nproc 4 examples/image_classification.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

import planner
from planner.trainer import decay_groups, warmup_cosine

STEPS = 60
GOAL = 0.4  # 2.3 before training

Sample = dict[str, torch.Tensor]


def datasets() -> tuple[list[Sample], list[Sample]]:
    """Images [1, 8, 8] and their classes: 1,472 for training, 320 for evaluation; batches of 64 are full."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    samples = [{"pixel_values": image, "labels": label} for image, label in zip(images, torch.tensor(digits.target))]
    return samples[:1472], samples[1472:1792]


def correct(outputs: Any, batch: Any) -> torch.Tensor:
    return outputs.logits.argmax(-1) == batch["labels"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axis sizes, a cluster, or the path of a plan")
    parser.add_argument("--checkpoints", help="folder to keep checkpoints in, and to resume from")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=10,
        initializer_range=0.1,
    )
    train, held_out = datasets()
    trainer = planner.Trainer(
        ViTForImageClassification(config),
        options.mesh,
        metrics={"accuracy": correct},
        global_batch=64,
        optimizer=lambda parameters: torch.optim.AdamW(decay_groups(parameters, weight_decay=0.05), lr=5e-3),
        lr_schedule=warmup_cosine(10, STEPS),
        checkpoint_dir=options.checkpoints,
        eval_every=STEPS,
        log_every=20,
    )
    result = trainer.fit(train, held_out, num_steps=STEPS)
    predicted = torch.stack(trainer.predict(held_out[:128])).argmax(-1)
    right = sum(int(guess) == int(sample["labels"]) for guess, sample in zip(predicted, held_out))
    if trainer.is_first:
        print(f"{right} of 128 digits read right")
        print(f"loss {result.best:.3f} (goal {GOAL})")


if __name__ == "__main__":
    main()
