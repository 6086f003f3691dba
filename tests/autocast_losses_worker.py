"""One rank of the tests of losses in float32 under a narrower precision."""

from __future__ import annotations

from torch import nn

import planner
from tests.autocast_models import LOSSES, Perceptron, batch_of, under_autocast
from tests.ranks import answer, task
from tests.small_models import seeded


def perceptron() -> nn.Module:
    return seeded(Perceptron).float()


def losses_under(fix: dict[str, int]) -> dict[str, list[float]]:
    """By name: the loss of a step, and the one of autocast on one device."""
    losses = {}
    for name in ("mse", "squares by hand", "weighted"):
        options = {"example_inputs": batch_of(), "loss_fn": LOSSES[name], "precision": "bfloat16", "fix": fix}
        loss = planner.compile(perceptron(), **options).train_step(**batch_of())
        losses[name] = [float(loss), float(under_autocast(perceptron(), LOSSES[name], batch_of()).detach())]
    return losses


if __name__ == "__main__":
    answer([losses_under(fix) for fix in task()])
