"""Batches of fifty lengths: captures, programs, and processor seconds of a step beside static shapes and one process.

    python -m benchmarks.lengths [--markdown benchmarks/results/lengths.md]

Two gloo ranks train with ``dp=2``, captured once for any size (``dynamic=True``). A small Llama is padded to buckets,
and its steps are compared with steps over the same padded batches sorted by length. A small T5 keeps its own padding
(no bucket at all), and a rank's step is compared with that of the whole batch in one process. Figures are processor
seconds of this thread's process, taken by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import planner
from tests.ranks import free_port

BATCH, NUM_BATCHES, ROUNDS = 16, 50, 4
VOCABULARY = 512


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
                    num_attention_heads=4, num_key_value_heads=4)
    )  # fmt: skip


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=128, d_kv=32, d_ff=256, num_layers=3, num_heads=4, dropout_rate=0.0,
                 decoder_start_token_id=0)
    )  # fmt: skip


def llama_samples() -> list[dict[str, torch.Tensor]]:
    """Samples whose batches have fifty lengths, of a skewed distribution."""
    torch.manual_seed(1)
    lengths = torch.distributions.LogNormal(4.0, 0.5).sample((NUM_BATCHES * BATCH,)).long().clamp(8, 256).tolist()
    rows = []
    for length in lengths:
        tokens = torch.randint(1, VOCABULARY, (length,))
        rows.append({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens})
    return rows


def t5_batches() -> list[dict[str, torch.Tensor]]:
    """Fifty batches, each as long as its longest source and target: no two alike."""
    torch.manual_seed(2)
    batches = []
    for number in range(NUM_BATCHES):
        source, target = 30 + (number * 37) % 83, 10 + (number * 17) % 31
        tokens = torch.randint(1, VOCABULARY, (BATCH, source))
        mask = (torch.arange(source) < torch.randint(source // 2, source + 1, (BATCH, 1))).long()
        labels = torch.randint(1, VOCABULARY, (BATCH, target))
        batches.append({"input_ids": tokens * mask, "attention_mask": mask, "labels": labels})
    return batches


def seconds_of(step: Callable[..., Any], batches: Iterable[dict[str, Any]]) -> float:
    """Processor seconds of a pass over ``batches``."""
    begun = time.process_time()
    for batch in batches:
        step(batch)
    return time.process_time() - begun


def counted(parallel: Any) -> dict[str, int]:
    maker = parallel._engine._maker
    return {"captures": maker.captures.count, "programs": len(maker.all_made)}


def padded_llama() -> dict[str, Any]:
    """Buckets beside the same batches, sorted."""
    rows = llama_samples()
    lengths = planner.sample_lengths(rows)
    longest = Counter(max(lengths[start : start + BATCH]) for start in range(0, len(rows), BATCH))
    buckets = planner.length_buckets(longest, waste=0.12, multiple_of=8, max_buckets=4)
    example = {name: torch.ones(BATCH, max(buckets), dtype=torch.int64) for name in rows[0]}
    parallel = planner.compile(llama(), "dp=2", example_inputs=example, dynamic=True)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)

    def step(batch: dict[str, torch.Tensor], local_inputs: bool = False) -> None:
        parallel.train_step(**batch, local_inputs=local_inputs)
        optimizer.step()
        optimizer.zero_grad()

    def loader() -> Any:
        return planner.DataLoader(rows, batch_size=BATCH, pad_to=buckets, shuffle=False)

    static = sorted(loader(), key=lambda batch: int(batch["input_ids"].shape[1]))
    first = seconds_of(step, loader())
    mixed, alone = [], []
    for _ in range(ROUNDS):
        mixed.append(seconds_of(step, loader()))
        alone.append(seconds_of(step, static))
    return {"lengths": len(longest), "buckets": list(buckets), **counted(parallel), "first": first / len(static),
            "mixed": min(mixed) / len(static), "static": min(alone) / len(static)}  # fmt: skip


def own_padding_t5() -> dict[str, Any]:
    """Every length as it comes, beside one process with the whole batch."""
    batches = t5_batches()
    alone, parallel = t5(), planner.compile(t5(), "dp=2", example_inputs=batches[0], dynamic=True)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (alone, parallel)]

    def step_alone(batch: dict[str, torch.Tensor]) -> None:
        alone(**batch).loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()

    def step(batch: dict[str, torch.Tensor]) -> None:
        parallel.train_step(**batch)
        optimizers[1].step()
        optimizers[1].zero_grad()

    seconds_of(step_alone, batches[:2])
    first = seconds_of(step, batches)
    again, single = [], []
    for _ in range(ROUNDS):
        single.append(seconds_of(step_alone, batches))
        again.append(seconds_of(step, batches))
    shapes = {(batch["input_ids"].shape[1], batch["labels"].shape[1]) for batch in batches}
    return {"lengths": len(shapes), **counted(parallel), "first": first / NUM_BATCHES,
            "again": min(again) / NUM_BATCHES, "alone": min(single) / NUM_BATCHES}  # fmt: skip


def run_rank(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    results = {"llama": padded_llama(), "t5": own_padding_t5()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(everyone), encoding="utf-8")
    dist.barrier()


def slowest(results: list[dict[str, Any]], case: str, figure: str) -> float:
    return max(float(one[case][figure]) for one in results)


def page(results: list[dict[str, Any]]) -> tuple[str, bool]:
    """The results' page, and whether the goals are met."""
    padded, own = results[0]["llama"], results[0]["t5"]
    llama_ratio = max(one["llama"]["mixed"] / one["llama"]["static"] for one in results)
    t5_ratio = max(one["t5"]["again"] / one["t5"]["alone"] for one in results)
    first_ratio = max(one["t5"]["first"] / one["t5"]["alone"] for one in results)
    rows = [
        f"| Llama, padded to {', '.join(map(str, padded['buckets']))} | {padded['lengths']} | {padded['captures']} | "
        f"{padded['programs']} | {slowest(results, 'llama', 'first'):.3f} | {slowest(results, 'llama', 'mixed'):.3f} | "
        f"{slowest(results, 'llama', 'static'):.3f} (static shapes) | {llama_ratio:.2f} |",
        f"| T5, its own padding | {own['lengths']} | {own['captures']} | {own['programs']} | "
        f"{slowest(results, 't5', 'first'):.3f} | {slowest(results, 't5', 'again'):.3f} | "
        f"{slowest(results, 't5', 'alone'):.3f} (one process, whole batch) | {t5_ratio:.2f} |",
    ]
    text = "\n".join([
        "# Batches of fifty lengths", "",
        "`python -m benchmarks.lengths --markdown PATH`: two gloo ranks, `dp=2`, `dynamic=True`; processor seconds of",
        f"a step on the slower rank, the least of {ROUNDS} passes by turns. `first pass` makes the programs.", "",
        "| model | lengths | captures | programs | first pass | later passes | beside | ratio |",
        "|---|---|---|---|---|---|---|---|", *rows, "",
        f"In the first pass, where every length is new, a step of T5 costs {first_ratio:.1f} of one process's.",
        "",
    ])  # fmt: skip
    captures = padded["captures"] == own["captures"] == 1
    held = captures and padded["programs"] <= 4 and llama_ratio <= 1.05 and t5_ratio <= 1.2
    return text, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.folder is not None:
        run_rank(options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                  "OMP_NUM_THREADS": "1", "MESHWRIGHT_CACHE": ""}  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.lengths", "--folder", folder]
        ranks = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError("a rank failed")
        results = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
    text, held = page(results)
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    sys.exit(not held)


if __name__ == "__main__":
    main()
