"""DiLoCo on 2 × 2 ranks beside synchronous training on 4: loss at equal tokens, bytes between the islands.

torchrun --nproc-per-node 4 -m benchmarks.slow_links
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import default_collate
from transformers import LlamaConfig, LlamaForCausalLM

import planner
from examples.language_model import datasets
from planner.trainer import decay_groups, warmup_cosine
from runtime.agreement.ranks_together import gathered

BATCH = 32


def fresh() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def batches(train: Any, steps: int, *, part: int, parts: int) -> Iterator[dict[str, torch.Tensor]]:
    """A part of each global batch of a shuffled dataset."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1)).tolist()
    share = BATCH // parts
    for step in range(steps):
        begin = step * BATCH + part * share
        yield default_collate([train[order[index % len(order)]] for index in range(begin, begin + share)])


def optimizer_of(parallel: Any, steps: int, rate: float) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(decay_groups(parallel.parameters(), weight_decay=0.1), lr=rate)
    return optimizer, warmup_cosine(10, steps)(optimizer)


def evaluated(weights: dict[str, torch.Tensor], held_out: Any) -> float:
    """The loss of all held-out samples, by the model itself."""
    model = fresh()
    model.load_state_dict(weights)
    with torch.no_grad():
        return float(model(**default_collate([held_out[index] for index in range(len(held_out))])).loss)


def trained(parallel: Any, stepper: Any, schedule: Any, feed: Iterator[dict[str, torch.Tensor]]) -> None:
    for batch in feed:
        parallel.train_step(**batch)
        parallel.clip_grad_norm_(1.0)
        stepper.step()
        schedule.step()
        stepper.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--wire-format")
    parser.add_argument("--rate", type=float, default=5e-3, help="learning rate of both ways' AdamW")
    parser.add_argument("--outer-rate", type=float, default=0.7, help="of the outer SGD; the paper's")
    parser.add_argument(
        "--outer-momentum", type=float, default=0.9, help="of Nesterov, the paper's; 0: plain averaging"
    )
    options = parser.parse_args()
    process = planner.init()
    train, held_out = datasets()
    example = next(batches(train, 1, part=0, parts=1))

    parallel = planner.compile(fresh(), "dp=4", example_inputs=example)
    optimizer, schedule = optimizer_of(parallel, options.steps, options.rate)
    trained(parallel, optimizer, schedule, batches(train, options.steps, part=0, parts=1))
    synchronous = evaluated(parallel.full_state_dict(), held_out)

    islands = planner.Islands(2)
    example = next(batches(train, 1, part=0, parts=2))
    parallel = planner.compile(fresh(), islands.mesh("dp=2"), example_inputs=example)
    optimizer, schedule = optimizer_of(parallel, options.steps, options.rate)

    def outer_sgd(copies: list[torch.Tensor]) -> torch.optim.Optimizer:
        momentum = options.outer_momentum
        return torch.optim.SGD(copies, lr=options.outer_rate, momentum=momentum, nesterov=momentum > 0)

    outer = planner.DiLoCo(
        parallel,
        optimizer,
        outer=outer_sgd,
        islands=islands,
        inner_steps=options.inner_steps,
        fragments=options.fragments,
        wire_format=options.wire_format,
    )
    trained(parallel, outer, schedule, batches(train, options.steps, part=islands.index, parts=2))
    sent = sum(gathered(outer.bytes_sent)[: len(islands.members[0])])
    outer.synchronise()
    diloco = evaluated(parallel.full_state_dict(), held_out)
    parameters = sum(value.numel() for value in fresh().parameters())
    if process.rank == 0:
        print(f"loss after {options.steps} steps: synchronous {synchronous:.4f}, DiLoCo {diloco:.4f} "
              f"({diloco / synchronous - 1:+.2%})")  # fmt: skip
        print(f"bytes from island to island a step: {sent / options.steps:.0f}, 4·parameters/H is "
              f"{4 * parameters / options.inner_steps:.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
