"""Every way of running a step, on real processes, against one device in float64.

    python -m benchmarks.parity [--only llama] [--record parity.jsonl] [--markdown benchmarks/results/parity.md]

For each case a model is trained for three AdamW steps under a plan with the given axes, schedule, micro-batches,
recomputation and ZeRO stage, on gloo processes, and alone; the largest relative error of the loss, every gradient and
every weight is listed. Batches have uneven numbers of valid labels. The rest of each plan (how operators are split) is
searched, for slow devices on fast links, so that everything is really split. With ``--record`` every answer is written
down as it comes, and a later run with the same file goes on from there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cost_models.schedules import SCHEDULES
from tests import step_parity_worker

#: What must be reached.
TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
#: Seconds that the other ranks have left when one has failed.
GRACE = 5.0
Case = dict[str, Any]


def case(model: str, name: str, /, *, pp: int = 1, dp: int = 1, tp: int = 1, cp: int = 1, **more: Any) -> Case:
    """One case; ``more`` are further decisions, as in ``planner.plan(fix=…)``."""
    fix = {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "recompute": "none", "zero": 0, **more}
    deep = {"layers": pp} if pp > 4 else {}
    return {"name": name, "model": model, "fix": fix, "ranks": pp * dp * cp * tp, **deep}


def factorings(num_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Every dp × tp × pp of ``num_ranks``."""
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    for dp, tp in itertools.product(divisors, divisors):
        if num_ranks % (dp * tp) == 0:
            yield dp, tp, num_ranks // (dp * tp)


def meshes(model: str, num_ranks: int) -> Iterator[Case]:
    """Every factoring; with four micro-batches, more for a longer pipeline, as many as leave each a sample."""
    for dp, tp, pp in factorings(num_ranks):
        count = min(max(4, pp), 8 // dp)
        more = {"schedule": "1f1b"} if pp > 1 else {}
        name = f"{model} dp={dp} tp={tp} pp={pp} micro-batches={count}"
        yield case(model, name, dp=dp, tp=tp, pp=pp, num_microbatches=count, **more)


def schedules(model: str) -> Iterator[Case]:
    """Every schedule, with two chunks on a rank where it has several."""
    for schedule, row in SCHEDULES.items():
        yield case(
            model,
            f"{model} {schedule} pp=2",
            pp=2,
            num_microbatches=4,
            schedule=schedule,
            chunks_per_rank=row.chunks_per_rank or 2,
        )


def states(model: str) -> Iterator[Case]:
    """ZeRO stages with every recompute policy, with and without a pipeline."""
    for zero, recompute in itertools.product((0, 1, 2, 3), ("none", "selective", "regather", "full")):
        name = f"{model} ZeRO {zero} recompute {recompute} dp=2 tp=2"
        yield case(model, name, dp=2, tp=2, num_microbatches=2, zero=zero, recompute=recompute)
    for zero in (1, 2, 3):
        name = f"{model} ZeRO {zero} recompute full dp=2 pp=2 1f1b"
        yield case(model, name, dp=2, pp=2, num_microbatches=2, zero=zero, recompute="full", schedule="1f1b")


def mixtures() -> Iterator[Case]:
    """Schedules that split the backward pass, tied weights and several chunks, with sharded state and recomputation."""
    for model in ("tiny-llama", "tiny-gpt2"):
        for schedule, chunks, zero, recompute in (
            ("zb_h1", 1, 2, "none"),
            ("zbv", 2, 3, "selective"),
            ("zbv", 2, 1, "none"),
            ("dualpipev", 2, 1, "full"),
            ("zb_h2", 1, 2, "selective"),
            ("v_half", 2, 3, "none"),
            ("v_half", 2, 1, "full"),
            ("interleaved_1f1b", 2, 3, "regather"),
            ("gpipe", 1, 3, "none"),
        ):
            more = {"schedule": schedule, "chunks_per_rank": chunks, "zero": zero, "recompute": recompute}
            name = f"{model} {schedule} pp=2 dp=2 ZeRO {zero} recompute {recompute}"
            yield case(model, name, pp=2, dp=2, num_microbatches=4, **more)
    for schedule, chunks in (("zb_h1", 1), ("interleaved_1f1b", 2)):
        more = {"schedule": schedule, "chunks_per_rank": chunks}
        yield case("tiny-t5", f"tiny-t5 {schedule} pp=2 tp=2", pp=2, tp=2, num_microbatches=4, **more)
        yield case("tiny-vit", f"tiny-vit {schedule} pp=2 tp=2", pp=2, tp=2, num_microbatches=4, **more)


def chunked_losses() -> Iterator[Case]:
    """Losses in chunks: split vocabularies, pipelines, sharded state, tied heads, beside units that are recomputed."""
    for model, more in (
        ("tiny-llama", {"tp": 4, "num_microbatches": 2}),
        ("tiny-llama", {"dp": 2, "tp": 2, "num_microbatches": 2, "zero": 3}),
        ("tiny-llama", {"pp": 2, "tp": 2, "num_microbatches": 4, "schedule": "zbv", "chunks_per_rank": 2}),
        ("tiny-llama", {"pp": 2, "dp": 2, "num_microbatches": 4, "schedule": "zb_h1", "zero": 2}),
        ("tiny-llama", {"cp": 2, "tp": 2, "num_microbatches": 2}),
        ("tiny-gpt2", {"pp": 2, "dp": 2, "num_microbatches": 4, "schedule": "1f1b", "zero": 1}),
        ("tiny-gpt2", {"dp": 2, "tp": 2, "num_microbatches": 2, "zero": 2, "recompute": ("full", "chunked_loss")}),
        ("tiny-t5", {"pp": 2, "dp": 2, "num_microbatches": 4, "schedule": "1f1b"}),
    ):
        words = " ".join(f"{key}={value}" for key, value in more.items() if key != "recompute")
        yield case(model, f"{model} loss in chunks {words}", **{"recompute": "chunked_loss", **more})


def single_precision() -> Iterator[Case]:
    """The same in float32."""
    for model, more in (
        ("tiny-llama", {"pp": 2, "dp": 2, "num_microbatches": 4, "schedule": "1f1b", "zero": 2}),
        ("tiny-llama", {"dp": 2, "tp": 2, "num_microbatches": 2, "zero": 3, "recompute": "selective"}),
        ("tiny-gpt2", {"pp": 2, "tp": 2, "num_microbatches": 4, "schedule": "zbv", "chunks_per_rank": 2}),
        ("tiny-t5", {"pp": 2, "dp": 2, "num_microbatches": 4, "schedule": "1f1b", "zero": 1}),
        ("tiny-vit", {"pp": 2, "num_microbatches": 4, "schedule": "1f1b"}),
        ("tiny-llama", {"cp": 2, "dp": 2, "num_microbatches": 2, "zero": 1}),
    ):
        words = " ".join(f"{key}={value}" for key, value in more.items())
        yield {**case(model, f"float32 {model} {words}", **more), "dtype": "float32"}


def contexts(model: str) -> Iterator[Case]:
    """Context parallelism, alone and with all other axes."""
    for cp in (2, 4):
        yield case(model, f"{model} cp={cp}", cp=cp, num_microbatches=2)
    yield case(model, f"{model} cp=2 dp=2 ZeRO 3", cp=2, dp=2, num_microbatches=2, zero=3)
    yield case(model, f"{model} pp=2 dp=2 cp=2 ZeRO 2", pp=2, dp=2, cp=2, num_microbatches=2, zero=2, schedule="1f1b")


def all_cases() -> list[Case]:
    """The whole matrix."""
    rows = [*meshes("tiny-llama", 8), *meshes("tiny-gpt2", 8)]
    for model, pp in itertools.product(("tiny-t5", "tiny-vit"), (2, 4)):
        rows.append(case(model, f"{model} pp={pp}", pp=pp, num_microbatches=4, schedule="1f1b"))
    rows += [*schedules("tiny-llama"), *schedules("tiny-gpt2"), *states("tiny-llama"), *contexts("tiny-llama")]
    rows += [*mixtures(), *chunked_losses(), *single_precision()]
    return rows


def run(cases: list[Case], record: Path) -> None:
    """Run cases, those of the same number of ranks in one group of processes; answers go to ``record``.

    A case that ends its group (an error, or a rank that waits for ever) is written down as failed, and a new group
    goes on behind it.
    """
    for num_ranks in sorted({entry["ranks"] for entry in cases}):
        left = [{**entry, "record": str(record.resolve())} for entry in cases if entry["ranks"] == num_ranks]
        while left:
            _run_group(num_ranks, left)
            done = recorded(record)
            left = [entry for entry in left if entry["name"] not in done]
            if left:
                failed, *left = left
                with record.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"name": failed["name"], "failed": "see the output"}) + "\n")


def _run_group(num_ranks: int, cases: list[Case]) -> None:
    """Cases one after the other on processes forked from this one, which has loaded all libraries."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task.json").write_text(json.dumps(cases), encoding="utf-8")
        ranks = [context.Process(target=_rank, args=(rank, num_ranks, folder)) for rank in range(num_ranks)]
        for process in ranks:
            process.start()
        try:
            while (alive := [each for each in ranks if each.is_alive()]) and not any(each.exitcode for each in ranks):
                multiprocessing.connection.wait([process.sentinel for process in alive])
        finally:
            for process in ranks:
                process.join(None if not any(other.exitcode for other in ranks) else GRACE)
                process.kill()
                process.join()


def _rank(rank: int, num_ranks: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MESHWRIGHT_TEST_FOLDER=folder, GLOO_SOCKET_IFNAME="lo")
    step_parity_worker.main()


def recorded(path: Path) -> dict[str, dict[str, Any]]:
    """The answers in a file of earlier runs, by the case's name."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {entry["name"]: entry for entry in map(json.loads, lines)}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The answers as Markdown."""
    lines = ["| case | plan | largest relative error | worst |", "|---|---|---|---|"]
    for name, entry in rows.items():
        for problem in ("refused", "failed"):
            if problem in entry:
                lines.append(f"| {name} | {problem} | | {entry[problem]} |")
        if "error" not in entry:
            continue
        axes = " ".join(f"{axis}={size}" for axis, size in entry["axes"].items() if size > 1)
        plan = f"{axes}, {entry['schedule']}, {entry['num_microbatches']} micro-batches"
        plan += f", ZeRO {entry['zero']}, recompute {', '.join(entry['recompute'])}"
        lines.append(f"| {name} | {plan} | {entry['error']:.1e} | {entry['worst']} |")
    return "\n".join(lines) + "\n"


def page(title: str, command: str, cases: list[Case], answers: dict[str, dict[str, Any]]) -> tuple[str, int]:
    """The table under how many cases are within which tolerance, and the number of those that are not."""
    parts, wrong = [], 0
    for dtype, tolerance in TOLERANCES.items():
        chosen = [answers[entry["name"]] for entry in cases if entry.get("dtype", "float64") == dtype]
        errors = [answer.get("error", float("inf")) for answer in chosen if "refused" not in answer]
        beyond = sum(not error <= tolerance for error in errors)
        wrong += beyond
        if chosen:
            parts.append(
                f"{len(chosen)} cases in {dtype}: {len(errors) - beyond} within {tolerance:.0e} (largest "
                f"{max(errors, default=0.0):.1e}), {beyond} not, {len(chosen) - len(errors)} refused."
            )
    return f"# {title}\n\n`{command} --markdown PATH`. {' '.join(parts)}\n\n{table(answers)}", wrong


def run_command(description: str, title: str, cases: list[Case]) -> None:
    """Run the cases that the command's options name, print their page, and exit with 1 if one is beyond tolerance.

    Args:
        description: a module's docstring; its second paragraph is the command.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--record", type=Path, help="add every answer to this file; what is in it is not run again")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    chosen = [entry for entry in cases if re.search(arguments.only, entry["name"])]
    with tempfile.TemporaryDirectory() as folder:
        record = arguments.record or Path(folder) / "parity.jsonl"
        earlier = recorded(record)
        run([entry for entry in chosen if entry["name"] not in earlier], record)
        answers = recorded(record)
    command = description.split("\n\n")[1].split("[")[0].strip()
    text, wrong = page(title, command, chosen, {entry["name"]: answers[entry["name"]] for entry in chosen})
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    run_command(__doc__, "Steps on real processes against one device", all_cases())
