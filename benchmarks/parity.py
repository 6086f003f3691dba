"""Every way of running a step, on real processes, against one device in float64.

    python -m benchmarks.parity [--only llama] [--markdown benchmarks/results/parity.md]

For each case a model is trained for three AdamW steps under a plan with the given axes, schedule, micro-batches,
recomputation and ZeRO stage, on gloo processes, and alone; the largest relative error of the loss, every gradient and
every weight is listed. Batches have uneven numbers of valid labels. The rest of each plan (how operators are split) is
searched, for slow devices on fast links, so that everything is really split.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.ranks import run_on_ranks

#: What must be reached (float64).
TOLERANCE = 1e-9
Case = dict[str, Any]


def case(model: str, name: str, /, *, pp: int = 1, dp: int = 1, tp: int = 1, cp: int = 1, **more: Any) -> Case:
    """One case; ``more`` are further decisions, as in ``planner.plan(fix=…)``."""
    fix = {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "recompute": "none", "zero": 0, **more}
    return {"name": name, "model": model, "fix": fix, "ranks": pp * dp * cp * tp}


def factorings(num_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Every dp × tp × pp of ``num_ranks``."""
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    for dp, tp in itertools.product(divisors, divisors):
        if num_ranks % (dp * tp) == 0:
            yield dp, tp, num_ranks // (dp * tp)


def meshes(model: str, num_ranks: int) -> Iterator[Case]:
    """Every factoring; with as many micro-batches as leave each a sample, four at most."""
    for dp, tp, pp in factorings(num_ranks):
        count = min(4, 8 // dp)
        more = {"schedule": "1f1b"} if pp > 1 else {}
        name = f"{model} dp={dp} tp={tp} pp={pp} micro-batches={count}"
        yield case(model, name, dp=dp, tp=tp, pp=pp, num_microbatches=count, **more)


def schedules(model: str) -> Iterator[Case]:
    """Every schedule, with two chunks on a rank where it has several."""
    for schedule, chunks in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("zb_h1", 1),
        ("zbv", 2),
        ("dualpipev", 2),
    ):
        yield case(
            model,
            f"{model} {schedule} pp=2",
            pp=2,
            num_microbatches=4,
            schedule=schedule,
            chunks_per_rank=chunks,
        )


def states(model: str) -> Iterator[Case]:
    """ZeRO stages with every recompute policy, with and without a pipeline."""
    for zero, recompute in itertools.product((0, 1, 2, 3), ("none", "selective", "regather", "full")):
        name = f"{model} ZeRO {zero} recompute {recompute} dp=2 tp=2"
        yield case(model, name, dp=2, tp=2, num_microbatches=2, zero=zero, recompute=recompute)
    for zero in (1, 2, 3):
        name = f"{model} ZeRO {zero} recompute full dp=2 pp=2 1f1b"
        yield case(model, name, dp=2, pp=2, num_microbatches=2, zero=zero, recompute="full", schedule="1f1b")


def contexts(model: str) -> Iterator[Case]:
    """Context parallelism, alone and with all other axes."""
    for cp in (2, 4):
        yield case(model, f"{model} cp={cp}", cp=cp, num_microbatches=2)
    yield case(model, f"{model} cp=2 dp=2 ZeRO 3", cp=2, dp=2, num_microbatches=2, zero=3)
    yield case(model, f"{model} pp=2 dp=2 cp=2 ZeRO 2", pp=2, dp=2, cp=2, num_microbatches=2, zero=2, schedule="1f1b")


def all_cases() -> list[Case]:
    """The whole matrix."""
    found = [*meshes("tiny-llama", 8), *meshes("tiny-gpt2", 8)]
    for model, pp in itertools.product(("tiny-t5", "tiny-vit"), (2, 4)):
        found.append(case(model, f"{model} pp={pp}", pp=pp, num_microbatches=4, schedule="1f1b"))
    found += [*schedules("tiny-llama"), *schedules("tiny-gpt2"), *states("tiny-llama"), *contexts("tiny-llama")]
    return found


def run(cases: list[Case], *, timeout: float = 3600.0) -> dict[str, dict[str, Any]]:
    """Run cases of the same number of ranks in one group of processes; answers by the case's name."""
    found: dict[str, dict[str, Any]] = {}
    for num_ranks in sorted({entry["ranks"] for entry in cases}):
        mine = [entry for entry in cases if entry["ranks"] == num_ranks]
        found.update(run_on_ranks("step_parity_worker", num_ranks, mine, timeout=timeout))
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """The answers as Markdown."""
    lines = ["| case | plan | largest relative error | worst |", "|---|---|---|---|"]
    for name, entry in found.items():
        if "refused" in entry:
            lines.append(f"| {name} | refused | | {entry['refused']} |")
            continue
        axes = " ".join(f"{axis}={size}" for axis, size in entry["axes"].items() if size > 1)
        plan = f"{axes}, {entry['schedule']}, {entry['num_microbatches']} micro-batches"
        plan += f", ZeRO {entry['zero']}, recompute {', '.join(entry['recompute'])}"
        lines.append(f"| {name} | {plan} | {entry['error']:.1e} | {entry['worst']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    found = run([entry for entry in all_cases() if arguments.only in entry["name"]])
    text = table(found)
    print(text)
    wrong = [name for name, entry in found.items() if not entry.get("error", 0.0) <= TOLERANCE]
    refused = [name for name, entry in found.items() if "refused" in entry]
    print(f"{len(found)} cases, {len(wrong)} beyond {TOLERANCE:.0e}: {wrong}; refused: {refused}")
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
