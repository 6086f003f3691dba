"""The stages of a planned step as a table: equal neighbours in one line, copies of a block as a range of paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from passes.plan.plan_data import BlockPlan
from passes.plan.step_plan import ChunkPlan, GroupPlan, RankMemory, StepPlan
from passes.plan.text_tables import format_bytes, format_seconds, format_table

#: Ranges of numbers that are all written out.
MAX_RUNS = 4
NOTHING = GroupPlan("(nothing)", 0, 0, "none", 0)


@dataclass(frozen=True)
class _Line:
    """``chunks`` consecutive chunks of one group each that are alike but for their place, or one group of one chunk."""

    ranks: tuple[int, ...]
    chunks: int
    group: GroupPlan
    forward: str
    backward: str


def stage_table(step: StepPlan, blocks: Sequence[BlockPlan]) -> str:
    """One line for every group of units, in model order; what is alike from chunk to chunk is told once."""
    lines = _merged(_lines(step.chunks))
    rows = [
        [
            format_numbers(line.ranks),
            _units(line, blocks),
            line.group.recompute,
            str(line.group.zero),
            line.forward,
            line.backward,
        ]
        for line in lines
    ]
    header = ["rank", "units", "recompute", "ZeRO", "forward", "backward"]
    if step.stage_devices:
        header.append("device")
        for row, line in zip(rows, lines):
            row.append(", ".join(dict.fromkeys(step.stage_devices[rank].name for rank in line.ranks)))
    return format_table("Stages, in model order (seconds of one micro-batch)", header, rows)


def _lines(chunks: Sequence[ChunkPlan]) -> Iterator[_Line]:
    for chunk in chunks:
        seconds = format_seconds(chunk.forward), format_seconds(chunk.backward)
        for index, group in enumerate(chunk.groups or (NOTHING,)):
            first = index == 0
            # Seconds are of the chunk: they stand in the line of its first group.
            yield _Line((chunk.rank,) if first else (), int(first), group, *(seconds if first else ("", "")))


def _merged(lines: Iterator[_Line]) -> list[_Line]:
    """Chunks of one group that go on where the one before stopped, in one line."""
    listed = list(lines)
    alone = [
        line.chunks == 1 and (index + 1 == len(listed) or listed[index + 1].chunks == 1)
        for index, line in enumerate(listed)
    ]
    merged: list[_Line] = []
    mergeable = False
    for line, single in zip(listed, alone):
        if mergeable and single and _continues(merged[-1], line):
            last = merged[-1]
            merged[-1] = _Line((*last.ranks, *line.ranks), last.chunks + 1, last.group, last.forward, last.backward)
        else:
            merged.append(line)
        mergeable = single
    return merged


def _continues(last: _Line, line: _Line) -> bool:
    one, other = last.group, line.group
    alike = (one.count, one.recompute, one.zero) == (other.count, other.recompute, other.zero)
    follows = one.count > 0 and other.first == one.first + one.count * last.chunks
    return alike and follows and (last.forward, last.backward) == (line.forward, line.backward)


def _units(line: _Line, blocks: Sequence[BlockPlan]) -> str:
    total = line.group.count * max(1, line.chunks)
    text = unit_range(line.group.unit, total, blocks)
    each = f", {line.group.count} each" if line.chunks > 1 else ""
    return f"{text} ({total}{each})" if total > 1 else text


def unit_range(unit: str, count: int, blocks: Sequence[BlockPlan]) -> str:
    """``count`` copies of a block from ``unit`` on: ``model.layers.{0..7}``; ``unit`` itself for a stretch."""
    for block in blocks:
        names = [" ".join(roots) for roots in block.roots]
        if unit in names:
            return path_range(unit, names[min(names.index(unit) + count, len(names)) - 1])
    return unit


def path_range(first: str, last: str) -> str:
    """Two paths as one, with a range wherever their parts are different numbers: ``model.layers.{0..7}``."""
    if first == last:
        return first
    ours, theirs = first.split("."), last.split(".")
    fits = len(ours) == len(theirs) and all(a == b or (a.isdigit() and b.isdigit()) for a, b in zip(ours, theirs))
    if not fits:
        return f"{first} … {last}"
    return ".".join(a if a == b else f"{{{a}..{b}}}" for a, b in zip(ours, theirs))


def format_numbers(numbers: Sequence[int]) -> str:
    """``0–3, 7``; runs up or down by one as ranges, what is repeated at once only once, the middle of many left out."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1]:
            continue
        if runs and abs(number - runs[-1][-1]) == 1 and (len(runs[-1]) == 1 or _goes_on(runs[-1], number)):
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(texts if len(texts) <= MAX_RUNS else [*texts[:2], "…", texts[-1]])


def _goes_on(run: Sequence[int], number: int) -> bool:
    return number - run[-1] == run[-1] - run[-2]


def memory_table(step: StepPlan) -> str:
    """Bytes of every rank by part; ranks whose parts read the same in one line."""
    lines: dict[tuple[str, ...], list[int]] = {}
    for rank, memory in enumerate(step.memory):
        lines.setdefault(_memory_cells(memory, step.memory_limit_of(rank)), []).append(rank)
    rows = [[format_numbers(ranks), *cells] for cells, ranks in lines.items()]
    header = ("rank", "parameters", "gradients", "optimizer", "activations", "transient", "total", "full")
    kept_free = f", beside {step.headroom:.1%} for the allocator, communicators, CUDA graphs" if step.headroom else ""
    limits = dict.fromkeys(format_bytes(device.memory_limit) for device in step.stage_devices)
    limit = f"limit {' or '.join(limits) or format_bytes(step.memory_limit)}{kept_free}"
    return format_table(f"Memory of one device of each rank ({limit})", header, rows)


def _memory_cells(memory: RankMemory, limit: float) -> tuple[str, ...]:
    parts = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.transient, memory.total)
    return (*map(format_bytes, parts), f"{memory.total / limit:.1%}" if limit else "")
