"""Ten random chains of plans that a model goes through live, with layers that freeze and thaw, held to one device.

    python -m benchmarks.replan_chains [--chains 10] [--length 4] [--only llama] [--markdown benchmarks/results/…]

A chain is a model, plans for two to four of four ranks (pp, dp, cp, tp, ep, ZeRO, micro-batches) and what is frozen
from each on, drawn from its number; ranks that a plan leaves out join the next one as processes that were started anew.
The ranks train three steps of AdamW in float64 under each plan, and gradients are moved in the middle of a step. A
column each: largest relative differences of losses, gradients and weights from plain PyTorch on one device; bytes moved
and the least, counted element by element; the most that a rank held over its larger shard, in parts of the largest
tensor (at most 1), whole and not as that rank holds it. The exit status is 1 if a chain differs by 1e-9, or moves or
holds more than that.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import run_on_ranks

NUM_RANKS, TOLERANCE, LIMIT = 4, 1e-9, 900.0
#: Where the layers of a model are, what is before the first of them, and its axes beside pp, dp and tp.
MODELS = {
    "tiny-gpt2": ("transformer.h.", ("transformer.wpe",), ("cp",)),
    "tiny-llama": ("model.layers.", ("model.embed_tokens",), ("cp",)),
    "deepseek-v3": ("model.layers.", ("model.embed_tokens",), ("ep",)),
}
NUM_LAYERS = 2
#: The ranks that may be at work.
RANKS = ((0, 1, 2, 3), (1, 2, 3), (0, 2), (0, 1, 2))


@dataclass(frozen=True)
class Chain:
    number: int
    model: str
    plans: tuple[dict[str, Any], ...]
    frozen: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        steps = [
            ", ".join(f"{name}={size}" for name, size in plan.items() if name != "ranks" and size > (name != "zero"))
            + f" on {','.join(map(str, plan['ranks']))}"
            for plan in self.plans
        ]
        return " → ".join(steps)


def chain(number: int, length: int) -> Chain:
    """The chain of that number: the same every time."""
    draw = random.Random(number)
    model = sorted(MODELS)[number % len(MODELS)]
    layers, first, more = MODELS[model]
    plans: list[dict[str, Any]] = []
    while len(plans) < length:
        # At first all compile, and at last all look at the weights.
        plan = _plan(draw, more, draw.choice(RANKS) if 0 < len(plans) < length - 1 else RANKS[0])
        if not plans or plan != plans[-1]:
            plans.append(plan)
    # As many layers frozen as the draw says, from the first on; less than before thaws.
    counts = [draw.randint(0, NUM_LAYERS - 1) for _ in plans[1:]]
    frozen = tuple((*first, *(f"{layers}{layer}." for layer in range(count))) if count else () for count in counts)
    return Chain(number, model, tuple(plans), frozen)


def _plan(draw: random.Random, more: Sequence[str], ranks: Sequence[int]) -> dict[str, Any]:
    """Sizes of axes whose product is the number of ranks, a ZeRO stage, micro-batches, and the ranks."""
    axes = ["pp", "dp", "tp", *more]
    sizes = dict.fromkeys(axes, 1)
    if len(ranks) == 3:
        sizes["dp"] = 3
    else:
        for _ in range(len(ranks) // 2):
            sizes[draw.choice(axes)] *= 2
    if any(sizes[axis] > 2 for axis in ("cp", "ep") if axis in sizes) or sizes["pp"] > NUM_LAYERS:
        return _plan(draw, more, ranks)
    return {
        **sizes,
        "zero": draw.choice([0, 1, 2, 3]),
        "num_microbatches": 2 if sizes["pp"] > 1 else 1,
        "ranks": list(ranks),
    }


def row(one: Chain) -> tuple[str, bool]:
    """A row of the table, and whether all held."""
    payload = {"model": one.model, "layers": NUM_LAYERS, "plans": one.plans, "frozen": one.frozen}
    result = run_on_ranks("replan_worker", NUM_RANKS, payload, timeout=LIMIT)
    errors, moves = result["errors"], result["moves"]
    moved, least = (sum(move[key] for move in moves) for key in ("moved", "minimum"))
    most = max(move["over the larger shard, in whole tensors"] for move in moves)
    held = max(errors.values()) < TOLERANCE and moved == least and most <= 1 and not result["optimizer state"]
    differences = " | ".join(f"{errors[what]:.1e}" for what in ("loss", "gradients", "weights"))
    counts = [str(sum("." in name for name in names)) if names else "0" for names in one.frozen]
    cells = [one.number, one.model, one, ", ".join(counts), differences, f"{moved:,}", f"{least:,}", f"{most:.2f}"]
    return f"| {' | '.join(map(str, cells))} |", held


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chains", type=int, default=10)
    parser.add_argument("--length", type=int, default=4, help="plans of a chain")
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    lines = [
        "| chain | model | plans | names frozen | loss | gradients | weights | bytes moved | least | over the shard |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    all_held = True
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MESHWRIGHT_TEST_RUN"] = folder
        for number in range(options.chains):
            one = chain(number, options.length)
            if options.only not in one.model:
                continue
            try:
                line, held = row(one)
            except AssertionError as error:  # what the ranks wrote
                line, held = f"| {number} | {one.model} | {one} | failed: {str(error)[-2000:]} |", False
            all_held = all_held and held
            lines.append(line)
            print(line, flush=True)
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if all_held else 1


if __name__ == "__main__":
    sys.exit(main())
