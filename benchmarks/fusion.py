r"""What fusing does to the models of the library: operators, and bytes that autograd keeps for backward.

    python -m benchmarks.fusion --markdown benchmarks/results/fusion.md
    python -m benchmarks.fusion llama-3-8b gpt2 --seq-len 2048

Everything is counted in the captured graph of a training step on one device, with no tensor in memory, so the figures
are exact and the same on every machine. What is kept: activations that operators save for their gradients, each storage
once, without parameters; nothing is recomputed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from passes.plan import FusionPlan
from planner.fusing import fused_for_planning
from planner.planning import capture_for_planning

#: One or two of every family.
MODELS = (
    "gpt2", "llama-3-8b", "llama-3-70b", "qwen2.5-7b", "qwen3-8b", "gemma-7b", "gemma-2-9b", "gemma-3-4b", "bert-base",
    "roberta-base", "t5-base", "t5-xl", "bart-base", "vit-base", "opt-1.3b", "bloom-1b7", "gpt-j-6b", "gpt-neox-20b",
    "falcon-7b", "mistral-7b", "mixtral-8x7b", "phi-2", "phi-3-mini",
)  # fmt: skip
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One model."""

    model: str
    fusion: FusionPlan

    def cells(self) -> list[str]:
        """The row of the table."""
        matches = ", ".join(f"{entry.count} {entry.pattern}" for entry in self.fusion.matches)
        operators, operator_bytes = self.fusion.operators, self.fusion.saved_bytes
        counts, sizes = (f"{count:,}" for count in operators), (f"{size / MIB:,.1f}" for size in operator_bytes)
        return [self.model, *counts, _share(*operators), *sizes, _share(*operator_bytes), matches]


HEADINGS = ["model", "operators", "fused", "fewer", "kept, MiB", "fused, MiB", "less", "fused operators"]


def _share(before: int, after: int) -> str:
    """What is spared."""
    return f"{1.0 - after / before:.0%}" if before else ""


def measure(model: str, *, batch_size: int, seq_len: int) -> Row:
    """Capture and fuse one model."""
    graph = capture_for_planning(model, batch_size=batch_size, seq_len=seq_len)
    return Row(model, fused_for_planning(graph)[1])


def table(rows: Iterable[Row]) -> str:
    """As markdown."""
    lines = [HEADINGS, ["---", *["---:"] * 6, "---"], *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page(rows: Sequence[Row], *, batch_size: int, seq_len: int) -> str:
    """The table with what it was made of."""
    sizes = f"{batch_size} sample{'s' if batch_size > 1 else ''} of {seq_len:,} tokens (or of one image), bfloat16"
    return (
        "# What fusing saves\n\n"
        f"Operators of the forward pass, and what autograd keeps for backward: {sizes}, one device. Counted, not "
        "measured; attention is one operator in both. `python -m benchmarks.fusion` makes this page.\n\n"
        f"{table(rows)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS, help="names of the config library, or paths of configs")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--markdown", type=Path, help="where to write the page")
    options = parser.parse_args()
    sizes = {"batch_size": options.batch_size, "seq_len": options.seq_len}
    rows = [measure(model, **sizes) for model in options.models]
    print(table(rows))
    if options.markdown is not None:
        options.markdown.write_text(page(rows, **sizes), encoding="utf-8")


if __name__ == "__main__":
    main()
