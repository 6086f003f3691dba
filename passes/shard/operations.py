"""Inputs and outputs of the operations of a sharded graph."""

from __future__ import annotations

from passes.shard.sharded_graph import Compute, Convert, Local, Repeat

Operation = Compute | Convert | Repeat


def used_by(operation: Operation) -> tuple[Local, ...]:
    """The inputs of an operation."""
    if isinstance(operation, Compute):
        return operation.inputs
    return (operation.source,) if isinstance(operation, Convert) else operation.entries


def made_by(operation: Operation) -> tuple[Local, ...]:
    """The outputs of an operation; of a repeated block, those of its last copy."""
    if isinstance(operation, Compute):
        return operation.outputs
    return (operation.target,) if isinstance(operation, Convert) else operation.results


def writes_state(operation: Operation) -> bool:
    """Whether an operation writes a buffer of the model: it runs even if nothing uses its result."""
    if isinstance(operation, Compute):
        return operation.node.writes_buffer
    return isinstance(operation, Repeat) and any(map(writes_state, operation.block.section.body))
