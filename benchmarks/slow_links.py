"""DiLoCo on 2 × 2 ranks beside synchronous training on 4: loss at equal tokens, bytes between the islands.

    torchrun --nproc-per-node 4 -m benchmarks.slow_links [--seeds 0 1 2] [--markdown benchmarks/results/slow_links.md]
    torchrun --nproc-per-node 2 -m benchmarks.slow_links --runs --rate 3e-3        # the synchronous loss at this rate

Both ways start from the same weights and see the same samples; a seed draws both. The exit status is 1 if a float32 run
sent anything but 4·parameters bytes from island to island every H steps (and in each synchronous step, and behind the
last of these), or if no run is within 2% of the synchronous loss, in the mean over the seeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate
from transformers import LlamaConfig, LlamaForCausalLM

import planner
from examples.language_model import datasets
from planner.trainer import decay_groups, warmup_cosine
from runtime.agreement.ranks_together import gathered

BATCH = 32


def fresh(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def batches(train: Any, steps: int, seed: int, *, part: int, parts: int) -> Iterator[dict[str, torch.Tensor]]:
    """A part of each global batch of a shuffled dataset."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed + 1)).tolist()
    share = BATCH // parts
    for step in range(steps):
        begin = step * BATCH + part * share
        yield default_collate([train[order[index % len(order)]] for index in range(begin, begin + share)])


def optimizer_of(parallel: Any, steps: int, rate: float) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(decay_groups(parallel.parameters(), weight_decay=0.1), lr=rate)
    return optimizer, warmup_cosine(10, steps)(optimizer)


def evaluated(weights: dict[str, torch.Tensor], held_out: Any) -> float:
    """The loss of all held-out samples, by the model itself."""
    model = fresh(0)
    model.load_state_dict(weights)
    with torch.no_grad():
        return float(model(**default_collate([held_out[index] for index in range(len(held_out))])).loss)


def trained(parallel: Any, stepper: Any, schedule: Any, feed: Iterator[dict[str, torch.Tensor]]) -> None:
    for batch in feed:
        parallel.train_step(**batch)
        if isinstance(stepper, planner.DiLoCo):
            stepper.average_gradients()
        parallel.clip_grad_norm_(1.0)
        stepper.step()
        schedule.step()
        stepper.zero_grad()


@dataclass(frozen=True)
class Run:
    """A way to train by DiLoCo: steps between two exchanges, the outer SGD, how parameters are sent, and the share of
    the steps that is synchronous, at first."""

    inner_steps: int
    outer_rate: float
    outer_momentum: float
    synchronous_share: float = 0.0
    fragments: int = 1
    wire_format: str | None = None

    def outer_sgd(self, copies: list[torch.Tensor]) -> torch.optim.Optimizer:
        momentum = self.outer_momentum
        return torch.optim.SGD(copies, lr=self.outer_rate, momentum=momentum, nesterov=momentum > 0)

    def synchronous_steps(self, steps: int) -> int:
        return int(self.synchronous_share * steps)

    def times_sent(self, steps: int) -> int:
        """How often all parameters, or their gradients, are sent."""
        first = self.synchronous_steps(steps)
        return (steps - first) // self.inner_steps + (first + 1 if first else 0)


RUNS = (
    Run(10, 1.0, 0.0),
    Run(20, 1.0, 0.0),
    Run(50, 1.0, 0.0),
    Run(20, 1.0, 0.0, fragments=4),
    Run(20, 1.0, 0.0, wire_format="int8"),
    Run(10, 0.7, 0.5),
    Run(10, 0.7, 0.9),
    Run(20, 1.0, 0.0, synchronous_share=0.25),
    Run(50, 1.0, 0.0, synchronous_share=0.25),
    Run(20, 0.7, 0.9, synchronous_share=0.25),
    Run(50, 0.7, 0.9, synchronous_share=0.25),
    Run(20, 1.0, 0.0, synchronous_share=0.25, fragments=4),
    Run(20, 1.4, 0.0, synchronous_share=0.25, fragments=4),
    Run(10, 1.4, 0.0, synchronous_share=0.25),
    Run(20, 1.4, 0.0, synchronous_share=0.25),
    Run(50, 1.4, 0.0, synchronous_share=0.25),
    Run(50, 1.4, 0.0, synchronous_share=0.25, fragments=5),
    Run(10, 0.8, 0.0),
    Run(20, 0.8, 0.0),
    Run(10, 0.6, 0.3),
    Run(5, 0.8, 0.0),
    Run(5, 1.0, 0.0),
)
MOST = 0.02
ABOUT = (
    "# DiLoCo beside synchronous training",
    "",
    "`torchrun --nproc-per-node {ranks} -m benchmarks.slow_links`: the language model of `examples/`, from scratch, on",
    "{ranks} ranks and on two islands of {half}, with as many tokens; the loss of held-out samples. A seed draws the",
    "weights at first and the order of samples. Bytes a step are counted: what the first island sent to the other.",
    "",
)


def synchronous(train: Any, held_out: Any, steps: int, rate: float, seed: int) -> float:
    """The held-out loss after synchronous training on all ranks."""
    example = next(batches(train, 1, seed, part=0, parts=1))
    parallel = planner.compile(fresh(seed), f"dp={planner.init().world_size}", example_inputs=example)
    optimizer, schedule = optimizer_of(parallel, steps, rate)
    trained(parallel, optimizer, schedule, batches(train, steps, seed, part=0, parts=1))
    return evaluated(parallel.full_state_dict(), held_out)


def by_islands(run: Run, train: Any, held_out: Any, steps: int, rate: float, seed: int) -> tuple[float, int]:
    """The held-out loss after DiLoCo on two islands, and the bytes that the first island sent meanwhile."""
    islands = planner.Islands(2)
    example = next(batches(train, 1, seed, part=0, parts=2))
    parallel = planner.compile(fresh(seed), islands.mesh(f"dp={len(islands.ranks)}"), example_inputs=example)
    optimizer, schedule = optimizer_of(parallel, steps, rate)
    outer = planner.DiLoCo(
        parallel, optimizer, outer=run.outer_sgd, islands=islands, inner_steps=run.inner_steps,
        fragments=run.fragments, wire_format=run.wire_format, synchronous_steps=run.synchronous_steps(steps),
    )  # fmt: skip
    trained(parallel, outer, schedule, batches(train, steps, seed, part=islands.index, parts=2))
    sent = sum(gathered(outer.bytes_sent)[: len(islands.members[0])])
    outer.synchronise()
    return evaluated(parallel.full_state_dict(), held_out), sent


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400, help="of which each run has whole rounds of H")
    parser.add_argument("--rate", type=float, default=2.8e-3, help="learning rate of both ways' AdamW")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--runs", type=int, nargs="*", default=range(len(RUNS)), help="rows of RUNS, from 0 on")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    process = planner.init()
    train, held_out = datasets()
    parameters = sum(value.numel() for value in fresh(0).parameters())
    settings = train, held_out, options.steps, options.rate
    best = [synchronous(*settings, seed) for seed in options.seeds]
    lines = [
        *(line.format(ranks=process.world_size, half=process.world_size // 2) for line in ABOUT),
        f"{options.steps} steps of {BATCH} samples, {parameters:,} parameters, learning rate {options.rate:g}; seeds "
        f"{', '.join(map(str, options.seeds))}: synchronous loss {', '.join(f'{loss:.4f}' for loss in best)}",
        "",
        "| H | synchronous steps | outer rate | momentum | fragments | sent as | beside synchronous, each seed | mean |"
        " bytes a step | due |",
        f"|{'---|' * 10}",
    ]
    if process.rank == 0:
        print(lines[-4], flush=True)
    is_exact, nearest = True, 0.0 if not options.runs else math.inf
    for run in (RUNS[number] for number in options.runs):
        losses, sents = zip(*(by_islands(run, *settings, seed) for seed in options.seeds))
        more = [loss / own - 1 for loss, own in zip(losses, best)]
        due = 4 * parameters * run.times_sent(options.steps)
        is_exact = is_exact and (run.wire_format is not None or all(sent == due for sent in sents))
        nearest = min(nearest, statistics.mean(more))
        cells = [run.inner_steps, run.synchronous_steps(options.steps), run.outer_rate, run.outer_momentum,
                 run.fragments, run.wire_format or "float32", ", ".join(f"{each:+.2%}" for each in more),
                 f"{statistics.mean(more):+.2%}", f"{sents[0] / options.steps:,.1f}",
                 f"{due / options.steps:,.1f}"]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
        if process.rank == 0:
            print(lines[-1], flush=True)
    if process.rank == 0 and options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if is_exact and nearest < MOST else 1


if __name__ == "__main__":
    sys.exit(main())
