"""Federated averaging (McMahan et al., 2017): clients that see few digits each train by themselves, then are averaged.

A round is one call: every client takes some steps of its own, and the gradient that the server gets is how far the mean
of the clients has moved. The clients are split over the mesh.

planner run --nproc 4 examples/federated_averaging.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import planner

CLIENTS, LOCAL_STEPS, SAMPLES = 8, 3, 16
ROUNDS = 30
GOAL = 0.5  # nats; 2.3 before training


def federation() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Images [n, 64] and classes one-hot [n, 10] of each client, who has three digits; the last entry is held out."""
    data = load_digits()
    images, digits = torch.tensor(data.data, dtype=torch.float32) / 8 - 1, torch.tensor(data.target)
    classes = torch.eye(10)[digits]
    train = torch.arange(len(digits)) < 1437
    mine = [train & ((digits - client) % 10 < 3) for client in range(CLIENTS)] + [~train]
    return [images[who] for who in mine], [classes[who] for who in mine]


class Round(nn.Module):
    """Two layers; ``forward`` is one round of all clients: images [clients, steps, samples, 64]."""

    def __init__(self, hidden: int = 32, local_lr: float = 0.5) -> None:
        super().__init__()
        self.first, self.first_bias = nn.Parameter(torch.randn(64, hidden) / 8), nn.Parameter(torch.zeros(1, hidden))
        self.second, self.second_bias = nn.Parameter(torch.randn(hidden, 10) / 6), nn.Parameter(torch.zeros(1, 10))
        self.local_lr = local_lr

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> dict[str, torch.Tensor]:
        # Every client has weights of its own from here on: [clients, inputs, outputs].
        start = [weight.expand(len(images), *weight.shape) for weight in self.parameters()]
        local = start
        for step in range(LOCAL_STEPS):
            own = cross_entropy(network(images[:, step], local), classes[:, step]).sum()
            gradients = torch.autograd.grad(own, local, create_graph=True)
            local = [weight - self.local_lr * gradient for weight, gradient in zip(local, gradients)]
        # Its gradient is start - local, the mean over clients: a server that steps by it is at the clients' mean.
        moved = [(a * (a - b).detach()).flatten(1).sum(1) for a, b in zip(start, local)]
        return {"loss": torch.stack(moved).sum(0).mean()}


def network(images: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    first, first_bias, second, second_bias = weights
    return torch.tanh(images @ first + first_bias) @ second + second_bias


def cross_entropy(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """For every client; classes are one-hot."""
    return (logits.logsumexp(-1) - (logits * classes).sum(-1)).mean(-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="dp=4", help="axis sizes, a cluster, or the path of a plan")
    options = parser.parse_args()

    torch.manual_seed(0)
    (*images, test_images), (*classes, test_classes) = federation()
    model = Round()
    generator = torch.Generator().manual_seed(1)

    def batch() -> dict[str, torch.Tensor]:
        """Samples that every client draws of its own, the same on every rank."""
        rows = [torch.randint(len(own), (LOCAL_STEPS, SAMPLES), generator=generator) for own in images]
        return {
            "images": torch.stack([own[row] for own, row in zip(images, rows)]),
            "classes": torch.stack([own[row] for own, row in zip(classes, rows)]),
        }

    parallel = planner.compile(model, options.mesh, example_inputs=batch())
    server = torch.optim.SGD(parallel.parameters(), lr=1.0)
    for _ in range(ROUNDS):
        parallel.train_step(**batch())
        server.step()
        server.zero_grad()
    state = parallel.full_state_dict()
    names = ("first", "first_bias", "second", "second_bias")
    loss = cross_entropy(network(test_images, [state[name] for name in names]), test_classes).mean()
    if torch.distributed.get_rank() == 0:
        print(f"loss {float(loss):.3f} (goal {GOAL})")


if __name__ == "__main__":
    main()
