"""Generation on meshes beside transformers' own ``generate`` on one process: tokens, bytes of cache, processor time.

    python -m benchmarks.generation [--only llama] [--record generation.jsonl] [--rounds 9]
        [--markdown benchmarks/results/generation.md]

Every model with random weights on every mesh: greedy from prompts of two lengths, and four beams. All ranks' tokens are
those of the model on one process, or not; bytes of each rank's cache are counted and beside what ``cache_bytes`` said
before. On one rank both generate by turns: processor seconds of a token of theirs and ours, at their quickest, and the
median of the ratios of neighbours. An interrupted run goes on from the file of ``--record``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from tests.ranks import run_on_ranks

MODELS = ("gpt2", "llama", "t5", "bart", "mixtral", "whisper")
#: With decoders deeper than their encoders, which a pipeline cuts.
DEEP = ("bart-deep", "whisper-deep")
#: Mesh → ranks.
MESHES = {"tp=2": 2, "tp=4": 4, "dp=2,tp=2": 4, "pp=2": 2}
#: With adapters of PEFT, on and off.
ADAPTED = ("llama-lora", "t5-lora")
DTYPES = ("float32", "float64")
WAYS = ("greedy", "beams")
#: Goal: processor seconds of a token over transformers' on one process.
GOAL = 1.1
#: New tokens of a sample where time is taken.
TIMED_TOKENS = 24
Row = dict[str, Any]


def cell(model: str, mesh: str, dtype: str) -> Row:
    """What a model gives on a mesh: ``equal`` by way, bytes of cache by rank, or an ``error``."""
    padded = "" if model.startswith("whisper") else "!padded"  # which hears
    ways = [*(["greedy!base", "beams!base"] if model in ADAPTED else []), f"greedy{padded}", "beams"]
    try:
        answers = run_on_ranks("generation_worker", MESHES[mesh], [[model, mesh, ways, dtype]], timeout=1200)
    except AssertionError as error:
        return {"error": str(error)[-1000:]}
    return dict(answers[f"{model} {mesh}"])


def timed(model: str, way: str, rounds: int) -> Row:
    """Processor seconds of a token on one rank, ours and transformers' by turns."""
    import torch

    import planner
    from tests.generation_cases import generated, model_named, training_batch

    torch.set_num_threads(1)
    alone = model_named(model)
    parallel = planner.compile(model_named(model), "dp=1", example_inputs=training_batch(model))

    def seconds(contestant: Any) -> float:
        start = time.process_time()
        generated(contestant, model, way, new_tokens=TIMED_TOKENS, eos_token_id=None)
        return (time.process_time() - start) / TIMED_TOKENS

    for contestant in (parallel, alone):
        seconds(contestant)
    turns = [(seconds(parallel), seconds(alone)) for _ in range(rounds)]
    return {
        "ours": min(ours for ours, _ in turns),
        "theirs": min(theirs for _, theirs in turns),
        "ratio": median(ours / theirs for ours, theirs in turns),
    }


def run(only: str, record: Path, rounds: int) -> dict[str, Row]:
    """Every row whose name matches, those in ``record`` not again."""
    rows = _recorded(record)
    pairs = [(model, mesh) for mesh in MESHES for model in (*MODELS, *ADAPTED)] + [(model, "pp=2") for model in DEEP]
    cells = {f"{model} {mesh} {dtype}": (model, mesh, dtype) for dtype in DTYPES for model, mesh in pairs}
    times = {f"{model} {way} time": (model, way) for model in MODELS for way in WAYS}
    for name in filter(re.compile(only).search, [*times, *cells]):
        if name not in rows:
            rows[name] = timed(*times[name], rounds) if name in times else cell(*cells[name])
            with record.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"name": name, **rows[name]}) + "\n")
    return rows


def _recorded(record: Path) -> dict[str, Row]:
    if not record.exists():
        return {}
    rows = map(json.loads, record.read_text(encoding="utf-8").splitlines())
    return {row.pop("name"): row for row in rows}


def page(rows: dict[str, Row]) -> str:
    """The rows as Markdown."""
    cells = {name: row for name, row in rows.items() if "ratio" not in row}
    times = {name: row for name, row in rows.items() if "ratio" in row}
    lines = [
        "# Generation on meshes beside Hugging Face's on one process",
        "",
        "`python -m benchmarks.generation --markdown PATH`. "
        f"{sum(map(_is_equal, cells.values()))} of {len(cells)} cells have the tokens of transformers' `generate` on "
        "one process, on every rank and in both ways, and the bytes of cache that were predicted. Greedy is from "
        "prompts of two lengths (Whisper: from sound). `-lora`: with adapters that are not merged, on and off.",
        "",
        "| model, mesh, dtype | greedy | beam 4 | bytes of cache by rank | predicted |",
        "|---|---|---|---|---|",
    ]
    for name, row in cells.items():
        found = [_found(row, way) for way in WAYS]
        counted, planned = ([f"{size:,}" for size in sorted(set(row.get(key, ())))] for key in ("bytes", "planned"))
        lines.append(f"| {name} | {' | '.join(found)} | {' or '.join(counted)} | {' or '.join(planned)} |")
    return "\n".join([*lines, *(_times(times) if times else ())]) + "\n"


def _times(times: dict[str, Row]) -> list[str]:
    return [
        "",
        f"Processor milliseconds of a token on one rank, {TIMED_TOKENS} tokens of two samples, by turns with "
        f"transformers'; the ratio is the median over neighbours, the goal {GOAL}. The models are tiny: nearly all of "
        "it is what the host does, and what a generation costs before its first token is in it.",
        "",
        "| model, way | ours | transformers | ratio |",
        "|---|---|---|---|",
        *(
            f"| {name.removesuffix(' time')} | {1e3 * row['ours']:.2f} | {1e3 * row['theirs']:.2f} "
            f"| {row['ratio']:.2f} |"
            for name, row in times.items()
        ),
    ]


def _found(row: Row, way: str) -> str:
    answers = [answer for key, answer in row.items() if key.partition("!")[0] == way]
    answers.sort(key="equal".__eq__)  # what differs comes first
    return answers[0] if answers else f"failed: {row.get('error', '')[-200:]}".replace("\n", " ").replace("|", "/")


def _is_equal(row: Row) -> bool:
    return all(_found(row, way) == "equal" for way in WAYS) and row["bytes"] == row["planned"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name matches this regular expression")
    parser.add_argument("--record", type=Path, help="add every row to this file; what is in it is not run again")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant where time is taken")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MESHWRIGHT_TEST_RUN"] = folder  # where ``tests.ranks`` keeps answers
        rows = run(options.only, options.record or Path(folder) / "rows.jsonl", options.rounds)
    text = page(rows)
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    sys.exit(not all(_is_equal(row) if "ratio" not in row else row["ratio"] <= GOAL for row in rows.values()))


if __name__ == "__main__":
    main()
