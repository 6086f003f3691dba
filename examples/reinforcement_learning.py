"""Reinforcement learning (PPO, Schulman et al., 2017): an actor and a critic learn to stop a cart at a mark.

Actors run the policy on copies of the weights; the learner is sharded.

planner run --nproc 4 examples/reinforcement_learning.py
"""

from __future__ import annotations

import argparse
import copy
import math

import torch
from torch import nn

import planner

CARTS, TIME = 64, 24
ITERATIONS, EPOCHS = 16, 4
GOAL = 0.5  # mean square of distance to the mark plus that of speed; 5.6 before training
Batch = dict[str, torch.Tensor]


class ActorCritic(nn.Module):
    """A policy over the force on a cart (normal, one spread for all states) and the value of its state [.., 2]."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.force, self.value = nn.Linear(hidden, 1), nn.Linear(hidden, 1)
        self.log_spread = nn.Parameter(torch.tensor([-0.5]))

    def act(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(states)
        return self.force(h).squeeze(-1), self.value(h).squeeze(-1)

    def log_probability(self, mean: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return -0.5 * ((action - mean) / self.log_spread.exp()) ** 2 - self.log_spread - 0.5 * math.log(2 * math.pi)

    def forward(
        self, states: torch.Tensor, actions: torch.Tensor, old: torch.Tensor, gains: torch.Tensor, returns: torch.Tensor
    ) -> Batch:
        """The clipped objective of a batch of moves, and the error of the values."""
        mean, value = self.act(states)
        ratio = (self.log_probability(mean, actions) - old).exp()
        policy = -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains)
        return {"loss": (policy + 0.5 * (value - returns) ** 2).mean()}


@torch.no_grad()
def rollout(actor: ActorCritic, generator: torch.Generator) -> tuple[Batch, float]:
    """What carts did for ``TIME`` moves, one row a move, and their mean cost."""
    state = torch.randn(CARTS, 2, generator=generator)
    rows: dict[str, list[torch.Tensor]] = {"states": [], "actions": [], "old": [], "values": [], "rewards": []}
    for _ in range(TIME):
        mean, value = actor.act(state)
        action = mean + actor.log_spread.exp() * torch.randn(CARTS, generator=generator)
        speed = 0.9 * state[:, 1] + 0.3 * action.clamp(-2, 2)
        moved = torch.stack((state[:, 0] + 0.3 * speed, speed), -1)
        reward = -0.1 * moved.square().sum(-1)
        entries = (state, action, actor.log_probability(mean, action), value, reward)
        for row, entry in zip(rows.values(), entries):
            row.append(entry)
        state = moved
    returns = [torch.zeros(CARTS)]
    for reward in reversed(rows["rewards"]):
        returns.append(reward + 0.9 * returns[-1])
    after = torch.stack(returns[:0:-1])
    gains = after - torch.stack(rows["values"])
    gains = (gains - gains.mean()) / gains.std()
    batch = {name: torch.stack(rows[name]).flatten(0, 1) for name in ("states", "actions", "old")}
    batch |= {"gains": gains.flatten(), "returns": after.flatten()}
    return batch, -10 * float(torch.stack(rows["rewards"]).mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="dp=4", help="axis sizes, a cluster, or the path of a plan")
    options = parser.parse_args()

    torch.manual_seed(0)
    actor = ActorCritic()
    generator = torch.Generator().manual_seed(0)  # the same moves on every rank
    batch, cost = rollout(actor, generator)
    learner = planner.compile(copy.deepcopy(actor), options.mesh, example_inputs=batch)
    optimizer = torch.optim.Adam(learner.parameters(), lr=1e-2)
    for _ in range(ITERATIONS):
        for _ in range(EPOCHS):
            learner.train_step(**batch)
            learner.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        actor.load_state_dict(learner.full_state_dict())
        batch, cost = rollout(actor, generator)
    if torch.distributed.get_rank() == 0:
        print(f"loss {cost:.3f} (goal {GOAL})")


if __name__ == "__main__":
    main()
