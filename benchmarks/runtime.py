"""What a training step costs: emitted plans against the same parallelism written by hand with torch's own tools.

    python -m benchmarks.runtime [--only tensor] [--rounds 9] [--markdown benchmarks/results/runtime.md]

Contestants train the same Llama in the same processes (gloo over loopback, one thread each), step by step in turn, so
that whatever else the machine does hits all of them. Measured are processor seconds of each rank (user and system, all
threads of the process), not wall time; a ratio is Meshwright over the other contestant in the same round, averaged over
ranks. Losses are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import resource
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Relative difference of losses that contestants may have (float32).
TOLERANCE = 1e-5
WARM_UP = 3


@dataclass(frozen=True)
class Size:
    """Of the model and its batch."""

    layers: int = 12
    hidden: int = 512
    intermediate: int = 1408
    heads: int = 8
    vocabulary: int = 12000
    batch: int = 4
    length: int = 512


@dataclass(frozen=True)
class Row:
    """One contestant: processor seconds of a rank, forward and backward and the optimizer, by round."""

    comparison: str
    name: str
    passes: Sequence[float]
    updates: Sequence[float]
    loss: float

    @property
    def steps(self) -> tuple[float, ...]:
        return tuple(p + u for p, u in zip(self.passes, self.updates, strict=True))


def makers_of(comparison: str, num_ranks: int, size: Size) -> list[Any]:
    """Makers of the contestants, Meshwright's first: the others take their cuts from its plan."""
    from benchmarks import runtime_contestants as by

    if comparison == "tensor":
        return [by.emitted({"tp": num_ranks}), *(by.hand_tensor_parallel(sequence=cut) for cut in (False, True))]
    if comparison == "data":
        return [by.emitted({"dp": num_ranks}, own_samples=True), by.hand_ddp]
    if comparison == "zero 3":
        return [by.emitted({"dp": num_ranks, "zero": 3}, own_samples=True), by.hand_fsdp]
    fix = {"pp": num_ranks, "num_microbatches": size.batch, "schedule": "1f1b"}
    return [by.emitted(fix), by.hand_pipeline(num_microbatches=size.batch)]


COMPARISONS = ("tensor", "data", "zero 3", "pipeline")


def measure(comparisons: Sequence[str], *, num_ranks: int, rounds: int, size: Size, keep: Path | None) -> list[Row]:
    """Run comparisons, one after the other, on ``num_ranks`` new processes."""
    import torch.multiprocessing as multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        arguments = (tuple(comparisons), num_ranks, rounds, size, Path(folder), keep)
        multiprocessing.spawn(_rank, args=arguments, nprocs=num_ranks)
        timed_rows = json.loads((Path(folder) / "rows.json").read_text(encoding="utf-8"))
    return [Row(**row) for row in timed_rows]


def _rank(
    rank: int, comparisons: Sequence[str], num_ranks: int, rounds: int, size: Size, folder: Path, keep: Path | None
) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    from benchmarks.runtime_contestants import llama, random_tokens

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    shape = dataclasses.asdict(size)
    inputs = random_tokens(shape.pop("batch"), shape.pop("length"), vocabulary=size.vocabulary)
    model = llama(**shape)
    rows: list[Row] = []
    for comparison in comparisons:
        contestants: list[Any] = []
        for make in makers_of(comparison, num_ranks, size):
            contestants.append(make(model, inputs, contestants[0].parallel.plan if contestants else None))
        timed_rows = take_turns(contestants, comparison, rounds=rounds, keep=keep)
        if rank == 0:
            print(table(timed_rows), flush=True)
        rows += timed_rows
    if rank == 0:
        text = json.dumps([dataclasses.asdict(row) for row in rows])
        (folder / "rows.json").write_text(text, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def take_turns(contestants: Sequence[Any], comparison: str, *, rounds: int, keep: Path | None = None) -> list[Row]:
    """Check that losses are equal, then time all in turn.

    Raises:
        RuntimeError: if losses differ.
    """
    import torch.distributed as dist

    losses = [_warmed_up(contestant) for contestant in contestants]
    for contestant in contestants:
        if keep is not None and contestant.parallel is not None:
            (keep / f"{comparison} {dist.get_rank()}.py").write_text(contestant.parallel.source, encoding="utf-8")
    worst = max(abs(loss - losses[0]) / abs(losses[0]) for loss in losses)
    if worst > TOLERANCE:
        raise RuntimeError(f"{comparison}: the contestants' losses differ by {worst:.1e} (relative): {losses}")
    timed: list[list[tuple[float, float]]] = [[] for _ in contestants]
    for turn in range(rounds):
        order = range(len(contestants)) if turn % 2 == 0 else reversed(range(len(contestants)))
        for place in order:
            timed[place].append(_timed(contestants[place]))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, timed)
    rows = []
    for place, contestant in enumerate(contestants):
        passes, updates = (
            tuple(statistics.fmean(ranks[place][turn][part] for ranks in everyone) for turn in range(rounds))
            for part in range(2)
        )
        rows.append(Row(comparison, contestant.name, passes, updates, losses[place]))
    return rows


def _warmed_up(contestant: Any) -> float:
    """The loss of the last untimed step: that of the first is the same for any update, and hides wrong gradients."""
    loss = 0.0
    for _ in range(WARM_UP):
        loss = float(contestant.join_loss(contestant.forward_backward()))
        contestant.optimizer.step()
        contestant.optimizer.zero_grad()
    return loss


def _timed(contestant: Any) -> tuple[float, float]:
    """Processor seconds of one step: forward and backward, optimizer."""
    import torch.distributed as dist

    dist.barrier()
    passes = _seconds_of(contestant.forward_backward)

    def update() -> None:
        contestant.optimizer.step()
        contestant.optimizer.zero_grad()

    return passes, _seconds_of(update)


def _seconds_of(call: Callable[[], Any]) -> float:
    start = _processor_seconds()
    call()
    return _processor_seconds() - start


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# -- the table ---------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Markdown: every contestant, and how Meshwright compares with it."""
    lines = [
        "| parallelism | contestant | forward + backward | optimizer | step | Meshwright / contestant, step "
        "| quartiles | forward + backward alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours = next(one for one in rows if one.comparison == row.comparison and one.name == "Meshwright")
        middle = [f"{statistics.median(times):.3f}" for times in (row.passes, row.updates, row.steps)]
        cells = [row.comparison, row.name, *middle, *_ratios(ours, row)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratios(ours: Row, other: Row) -> list[str]:
    if ours is other:
        return ["", "", ""]
    ratios = [mine / theirs for mine, theirs in zip(ours.steps, other.steps, strict=True)]
    alone = [mine / theirs for mine, theirs in zip(ours.passes, other.passes, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return [f"{middle:.3f}", f"{low:.3f}–{high:.3f}", f"{statistics.median(alone):.3f}"]


def machine() -> str:
    """What this ran on."""
    import torch
    import transformers

    name = platform.processor()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        models = [line.partition(":")[2].strip() for line in cpu_info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return (
        f"{os.cpu_count()} × {name}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=COMPARISONS, help="comparisons to run (default: all)")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of every contestant")
    parser.add_argument("--layers", type=int, default=Size.layers, help="of the model")
    parser.add_argument(
        "--batch", type=int, default=Size.batch, help="samples; a pipeline's micro-batches have one each"
    )
    parser.add_argument("--length", type=int, default=Size.length, help="tokens of a sample")
    parser.add_argument("--keep", type=Path, help="folder to write the emitted programs and plans to")
    parser.add_argument("--markdown", type=Path, help="file to write the table to")
    arguments = parser.parse_args()
    size = Size(layers=arguments.layers, batch=arguments.batch, length=arguments.length)
    rows = measure(
        arguments.only or COMPARISONS,
        num_ranks=arguments.ranks,
        rounds=arguments.rounds,
        size=size,
        keep=arguments.keep,
    )
    if arguments.markdown is not None:
        settings = f"{arguments.ranks} processes, {arguments.rounds} rounds, {size}"
        arguments.markdown.write_text(f"{machine()}; {settings}.\n\n{table(rows)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
