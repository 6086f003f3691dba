"""Conversion between assignments and column values of the stage program."""

from __future__ import annotations

from planner.pipeline_ilp.stage_problem import Assignment
from planner.pipeline_ilp.stage_program import StageProgram


def encode(stage: StageProgram, assignment: Assignment) -> dict[int, float]:
    """The column values of an assignment."""
    values = {move.column: 0.0 for moves in stage.moves for move in moves}
    for moves, groups in zip(stage.moves, assignment):
        columns = {(move.run, move.choice): move.column for move in moves}
        for run, choice, count in groups:
            values[columns[run, choice]] += count
    return values


def decode(stage: StageProgram, values: list[float]) -> Assignment:
    """The assignment of a solution's column values."""
    chunks = []
    opening = next(((0, choice) for choice, column in stage.first if values[column] > 0.5), None)
    for chunk, moves in enumerate(stage.moves):
        groups = [(move.run, move.choice, round(values[move.column])) for move in moves if values[move.column] > 0.5]
        groups.sort(key=lambda group: (group[0], chunk == 0 and opening is not None and group[:2] != opening))
        chunks.append(tuple(groups))
    return tuple(chunks)
