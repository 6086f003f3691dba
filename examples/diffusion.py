"""Diffusion (DDPM, Ho et al., 2020): a small U-Net learns to take noise out of handwritten digits.

Times and noise are drawn in ``forward``: by counter, so that every mesh draws what one device does.

planner run --nproc 4 examples/diffusion.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import interpolate, silu

import planner
from planner.trainer import warmup_cosine

WIDTH, STEPS = 16, 60
GOAL = 0.45  # mean squared error of the noise; 1 before training
Sample = dict[str, torch.Tensor]


class Block(nn.Module):
    """Two convolutions with the noise level added between them, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.level = nn.Linear(WIDTH, outputs)
        self.norm = nn.GroupNorm(4, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        h = silu(self.norm(self.first(x) + self.level(level)[:, :, None, None]))
        return self.second(h) + self.shortcut(x)


class Diffusion(nn.Module):
    """A U-Net of 8 × 8 and 4 × 4 pixels; ``forward`` is its error on images [n, 1, 8, 8] of random noise levels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(2, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.down, self.middle = Block(1, WIDTH), Block(WIDTH, 2 * WIDTH)
        self.up, self.last = Block(3 * WIDTH, WIDTH), nn.Conv2d(WIDTH, 1, 1)

    def noise_in(self, noisy: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        level = self.embed(torch.stack((angle.cos(), angle.sin()), -1))
        fine = self.down(noisy, level)
        coarse = self.middle(nn.functional.avg_pool2d(fine, 2), level)
        return self.last(self.up(torch.cat((fine, interpolate(coarse, scale_factor=2.0)), 1), level))

    def forward(self, images: torch.Tensor) -> Sample:
        angle = torch.rand(len(images)) * (torch.pi / 2)  # cos² is the share of the image, sin² that of the noise
        noise = torch.randn_like(images)
        mixed = angle.cos()[:, None, None, None] * images + angle.sin()[:, None, None, None] * noise
        return {"loss": (self.noise_in(mixed, angle) - noise).square().mean()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="dp=4", help="axis sizes, a cluster, or the path of a plan")
    parser.add_argument("--checkpoints", help="folder to keep checkpoints in, and to resume from")
    options = parser.parse_args()

    torch.manual_seed(0)
    digits = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    samples = [{"images": image} for image in digits]
    trainer = planner.Trainer(
        Diffusion(),
        options.mesh,
        global_batch=64,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3),
        lr_schedule=warmup_cosine(5, STEPS),
        checkpoint_dir=options.checkpoints,
        eval_every=STEPS,
        log_every=20,
    )
    result = trainer.fit(samples[:1408], samples[1408:1728], num_steps=STEPS)
    if trainer.is_first:
        print(f"loss {result.best:.3f} (goal {GOAL})")


if __name__ == "__main__":
    main()
