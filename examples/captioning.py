"""Captioning: a vision transformer and a GPT-2 learn to say what digit an image shows ("a seven").

planner run --nproc 4 examples/captioning.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from transformers import GPT2Config, GPT2LMHeadModel, VisionEncoderDecoderModel, ViTConfig, ViTModel

import planner
from planner.trainer import warmup_cosine

STEPS = 50
GOAL = 0.5  # nats a character; 3.2 before training
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
CAPTIONS = [f"a{'n' if number == 'eight' else ''} {number}." for number in NUMBERS]
LENGTH = max(map(len, CAPTIONS))
ALPHABET = "\0" + "".join(sorted(set("".join(CAPTIONS))))  # the first one starts and fills
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
Sample = dict[str, torch.Tensor]


def datasets() -> tuple[list[Sample], list[Sample]]:
    """Images [1, 8, 8] with captions [LENGTH]: 1,472 for training, 320 for evaluation; batches of 64 are full."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.full((10, LENGTH), -100)
    for row, caption in zip(labels, CAPTIONS):
        row[: len(caption)] = torch.tensor([ALPHABET.index(character) for character in caption])
    samples = [{"pixel_values": image, "labels": labels[digit]} for image, digit in zip(images, digits.target)]
    return samples[:1472], samples[1472:1792]


def build() -> VisionEncoderDecoderModel:
    encoder = ViTModel(ViTConfig(image_size=8, patch_size=2, num_channels=1, intermediate_size=128, **SIZES))
    sizes = {"vocab_size": 24, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": LENGTH}
    decoder = GPT2LMHeadModel(GPT2Config(**sizes, add_cross_attention=True, bos_token_id=0, eos_token_id=0))
    model = VisionEncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.config.decoder_start_token_id = model.config.pad_token_id = 0
    return model


def captions(parallel: planner.ParallelModule, batch: Sample) -> list[str]:
    """The most likely caption of every image, a character at a time."""
    tokens = torch.zeros(len(batch["labels"]), LENGTH, dtype=torch.long)
    for place in range(1, LENGTH + 1):
        # Every call has the same shapes: the caption so far, filled up.
        logits = parallel(pixel_values=batch["pixel_values"], decoder_input_ids=tokens).logits
        if place < LENGTH:
            tokens[:, place] = logits[:, place - 1].argmax(-1)
    tokens = torch.cat([tokens[:, 1:], logits[:, -1:].argmax(-1)], dim=1)
    return ["".join(ALPHABET[token] if token < len(ALPHABET) else "?" for token in row).split(".")[0] for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axis sizes, a cluster, or the path of a plan")
    parser.add_argument("--checkpoints", help="folder to keep checkpoints in, and to resume from")
    options = parser.parse_args()

    torch.manual_seed(0)
    train, held_out = datasets()
    trainer = planner.Trainer(
        build(),
        options.mesh,
        predict_fn=captions,
        global_batch=64,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3),
        lr_schedule=warmup_cosine(10, STEPS),
        max_grad_norm=1.0,
        checkpoint_dir=options.checkpoints,
        eval_every=STEPS,
        log_every=20,
    )
    result = trainer.fit(train, held_out, num_steps=STEPS)
    said = trainer.predict(held_out[:64])
    if trainer.is_first:
        print("the first images show:", ", ".join(said[:5]))
        print(f"loss {result.best:.3f} (goal {GOAL})")


if __name__ == "__main__":
    main()
