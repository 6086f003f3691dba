"""Meta-learning (MAML): weights from which one step of gradient descent learns to tell apart digits never seen before.

The outer gradient goes through the inner step, so it has second-order terms; the tasks of a batch are split over dp.

planner run --nproc 4 examples/meta_learning.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import planner
from planner.trainer import warmup_cosine

WAYS, SHOTS, QUERIES = 3, 5, 5
STEPS = 100
GOAL = 0.7  # nats; log 3 = 1.1 without learning
Sample = dict[str, torch.Tensor]


class Tasks(torch.utils.data.Dataset):
    """Tells ``WAYS`` of the given digits apart: support and query images [WAYS * n, 64], their classes one-hot."""

    def __init__(self, digits: list[int], num_tasks: int) -> None:
        data = load_digits()
        self.images = [torch.tensor(data.data[data.target == digit], dtype=torch.float32) / 8 - 1 for digit in digits]
        self.num_tasks = num_tasks

    def __len__(self) -> int:
        return self.num_tasks

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(index)
        chosen = torch.randperm(len(self.images), generator=generator)[:WAYS].tolist()
        shown = []
        for digit in chosen:
            images = self.images[digit]
            shown.append(images[torch.randperm(len(images), generator=generator)[: SHOTS + QUERIES]])
        images = torch.stack(shown)
        classes = torch.eye(WAYS).repeat_interleave(SHOTS, 0), torch.eye(WAYS).repeat_interleave(QUERIES, 0)
        support, query = images[:, :SHOTS].flatten(0, 1), images[:, SHOTS:].flatten(0, 1)
        return {"support": support, "support_classes": classes[0], "query": query, "query_classes": classes[1]}


class MetaLearner(nn.Module):
    """Two layers; ``forward`` is the loss on the queries after one inner step on the support."""

    def __init__(self, hidden: int = 64, inner_lr: float = 0.5) -> None:
        super().__init__()
        self.first, self.first_bias = nn.Parameter(torch.randn(64, hidden) / 8), nn.Parameter(torch.zeros(1, hidden))
        self.second, self.second_bias = nn.Parameter(torch.randn(hidden, WAYS) / 8), nn.Parameter(torch.zeros(1, WAYS))
        self.inner_lr = inner_lr

    def forward(self, support: Any, support_classes: Any, query: Any, query_classes: Any) -> Sample:
        # Every task has weights of its own from here on: [tasks, inputs, outputs].
        weights = [weight.expand(len(support), *weight.shape) for weight in self.parameters()]
        inner = cross_entropy(network(support, weights), support_classes).sum()
        gradients = torch.autograd.grad(inner, weights, create_graph=True)
        adapted = [weight - self.inner_lr * gradient for weight, gradient in zip(weights, gradients)]
        logits = network(query, adapted)
        return {"loss": cross_entropy(logits, query_classes).mean(), "logits": logits}


def network(images: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    first, first_bias, second, second_bias = weights
    return torch.tanh(images @ first + first_bias) @ second + second_bias


def cross_entropy(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """For every task; classes are one-hot."""
    return (logits.logsumexp(-1) - (logits * classes).sum(-1)).mean(-1)


def correct(outputs: Any, batch: Sample) -> torch.Tensor:
    return outputs["logits"].argmax(-1) == batch["query_classes"].argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="dp=4", help="axis sizes, a cluster, or the path of a plan")
    parser.add_argument("--checkpoints", help="folder to keep checkpoints in, and to resume from")
    options = parser.parse_args()

    torch.manual_seed(0)
    trainer = planner.Trainer(
        MetaLearner(),
        options.mesh,
        metrics={"accuracy": correct},
        global_batch=16,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
        lr_schedule=warmup_cosine(10, STEPS),
        checkpoint_dir=options.checkpoints,
        eval_every=STEPS,
        log_every=40,
    )
    # Trained on seven digits, evaluated on the three that it has never seen.
    result = trainer.fit(Tasks(list(range(7)), 4000), Tasks([7, 8, 9], 96), num_steps=STEPS)
    if trainer.is_first:
        print(f"loss {result.best:.3f} (goal {GOAL})")


if __name__ == "__main__":
    main()
