"""What ``planner demo`` runs on every process: train a small Llama, sharded, beside the same model on one process.

The text is Python's own standard library, read as bytes. Rank 0 prints the plan in short and writes its report, trains
the unsharded model on the same batches too, and prints both losses side by side; at the end the sharded model writes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

import planner
from cost_models.text import counted
from planner.cli.shared_options import count

BATCH_SIZE = 16
SEQ_LEN = 128
CORPUS_BYTES = 2_000_000
#: What the trained model goes on with, and for how many bytes.
PROMPT, NEW_TOKENS = "    def __init__(self", 60

CONFIG: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": SEQ_LEN,
}


def read_corpus() -> torch.Tensor:
    """Bytes of the standard library's sources, as int64 token ids; shape [CORPUS_BYTES] or less."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8).long()


def batches(corpus: torch.Tensor, *, steps: int) -> Iterator[torch.Tensor]:
    """Random windows of the corpus, the same on every rank; each [BATCH_SIZE, SEQ_LEN]."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(corpus) - SEQ_LEN, (BATCH_SIZE,), generator=generator).tolist()
        yield torch.stack([corpus[start : start + SEQ_LEN] for start in starts])


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """One step of any causal language model; returns the loss."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=count, default=40)
    parser.add_argument("--solver")
    parser.add_argument("--report", default="demo.html")
    options = parser.parse_args()
    steps = options.steps

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank != 0)
    axes = (2, world_size // 2) if world_size % 2 == 0 else (1, world_size)
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    reference = copy.deepcopy(model) if rank == 0 else None
    parallel = planner.compile(model, mesh, batch_size=BATCH_SIZE, seq_len=SEQ_LEN, solver=options.solver)
    if rank == 0:
        console.print(parallel.plan.brief(), markup=False, highlight=False, soft_wrap=True)
        parallel.plan.report(options.report)
        console.print(f"all of it, with charts: {options.report}\n", markup=False, highlight=False, soft_wrap=True)

    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3) if reference is not None else None
    losses: list[tuple[float, float]] = []
    with _progress(console) as progress:
        task = progress.add_task("training", total=steps, loss="")
        for tokens in batches(read_corpus(), steps=steps):
            sharded = train_step(parallel, optimizer, tokens)
            if reference is not None and reference_optimizer is not None:
                losses.append((sharded, train_step(reference, reference_optimizer, tokens)))
            progress.update(task, advance=1, loss=f"loss {sharded:.4f}")
    if rank == 0:
        _print_losses(console, losses, world_size=world_size)
    _print_sentence(console, parallel)
    dist.destroy_process_group()


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.fields[loss]}"), console=console, disable=console.quiet)


def _print_losses(console: Console, losses: list[tuple[float, float]], *, world_size: int) -> None:
    table = Table("step", f"{counted(world_size, 'process')}", "one process", "difference", title="Training loss")
    shown = range(0, len(losses), max(1, len(losses) // 10))
    for step in sorted({*shown, len(losses) - 1}):
        sharded, single = losses[step]
        table.add_row(str(step + 1), f"{sharded:.6f}", f"{single:.6f}", f"{abs(sharded - single):.1e}")
    console.print(table)
    largest = max(abs(sharded - single) for sharded, single in losses)
    console.print(f"largest difference over {counted(len(losses), 'step')}: {largest:.2e}")


def _print_sentence(console: Console, parallel: Any) -> None:
    """What the trained model makes of ``PROMPT``; every rank takes part."""
    prompt = torch.tensor([list(PROMPT.encode())])
    tokens = parallel.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        repetition_penalty=1.3,
        pad_token_id=0,
    )
    text = bytes(tokens[0].tolist()).decode("ascii", "replace")
    console.print("what it writes now:", text, sep="\n", markup=False, highlight=False)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
