"""Calls whose results or arguments torch's methods spell otherwise than its operators do."""

from __future__ import annotations

import torch
from torch import nn

import planner


class Spelled(nn.Module):
    """Lists of one entry, and indices into a dim that is not the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = self.linear(x).unsqueeze(1).unbind(1)
        (y,) = y.split(4, dim=-1)
        y = y + torch.gradient(y, dim=1)[0]
        padded = y.new_zeros(len(x), 6)
        padded[:, torch.tensor([0, 2, 3, 5])] = y.tanh()
        return padded.square().mean()


def test_a_list_of_one_is_unpacked_and_indices_may_skip_dims() -> None:
    batch = (torch.linspace(-1, 1, 16).reshape(4, 4),)
    assert planner.verify(Spelled(), "dp=2,tp=2", batch=batch, loss_fn=lambda loss, _: loss).ok
