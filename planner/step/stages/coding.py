"""Assignments as columns of the stage program, and back."""

from __future__ import annotations

from collections import Counter

from planner.step.stages.problem import Assignment
from planner.step.stages.program import Move, StageProgram, has_kinds


def encode(stage: StageProgram, assignment: Assignment) -> dict[int, float]:
    """The columns of an assignment."""
    kinds = has_kinds(stage.problem)
    values = {move.column: 0.0 for moves in stage.moves for move in moves}
    given: str | None = None
    for moves, groups in zip(stage.moves, assignment):
        columns = {(move.run, move.choice, move.given if kinds else None): move.column for move in moves}
        for run, choice, count in groups:
            leaves = stage.problem.runs[run].choices[choice].exit if kinds else None
            values[columns[run, choice, given]] += 1.0
            if count > 1:
                values[columns[run, choice, leaves]] += count - 1.0
            given = leaves
    return values


def decode(stage: StageProgram, values: list[float]) -> Assignment:
    """The assignment that a solution stands for."""
    given: str | None = None
    chunks = []
    opening = next((choice for choice, column in stage.first if values[column] > 0.5), None)
    for chunk, moves in enumerate(stage.moves):
        groups: list[tuple[int, int, int]] = []
        for run in sorted({move.run for move in moves}):
            counts = {move: round(values[move.column]) for move in moves if move.run == run}
            order, given = _trail({move: count for move, count in counts.items() if count}, given)
            if chunk == 0 and run == 0 and opening is not None:
                order.sort(key=lambda group: group[0] != opening)
            groups.extend((run, choice, count) for choice, count in order)
        chunks.append(tuple(groups))
    return tuple(chunks)


def _trail(counts: dict[Move, int], given: str | None) -> tuple[list[tuple[int, int]], str | None]:
    """An order of the moves in which each begins where the last one ended (Hierholzer), as (choice, count) groups."""
    if len({kind for move in counts for kind in (move.given, move.option.exit)}) <= 1:
        return [(move.choice, count) for move, count in counts.items()], next(
            (move.option.exit for move in counts), given
        )
    remaining = Counter(counts)
    stack: list[tuple[str | None, int | None]] = [(given, None)]
    backwards: list[tuple[str | None, int | None]] = []
    while stack:
        kind = stack[-1][0]
        move = next((move for move, count in remaining.items() if count and move.given == kind), None)
        if move is None:
            backwards.append(stack.pop())
        else:
            remaining[move] -= 1
            stack.append((move.option.exit, move.choice))
    groups: list[tuple[int, int]] = []
    for _, choice in reversed(backwards):
        if choice is None:
            continue
        if groups and groups[-1][0] == choice:
            groups[-1] = (choice, groups[-1][1] + 1)
        else:
            groups.append((choice, 1))
    return groups, backwards[0][0]
