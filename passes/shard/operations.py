"""What the steps of a sharded program take and give."""

from __future__ import annotations

from passes.shard.sharded_graph import Compute, Convert, Local, Repeat

Operation = Compute | Convert | Repeat


def used_by(operation: Operation) -> tuple[Local, ...]:
    """What an operation takes."""
    if isinstance(operation, Compute):
        return operation.inputs
    return (operation.source,) if isinstance(operation, Convert) else operation.entries


def made_by(operation: Operation) -> tuple[Local, ...]:
    """What an operation gives, with what is made between the copies of a block."""
    if isinstance(operation, Compute):
        return operation.outputs
    return (operation.target,) if isinstance(operation, Convert) else operation.results


def writes_state(operation: Operation) -> bool:
    """Whether an operation writes a buffer of the model: it is done though nobody needs its result."""
    if isinstance(operation, Compute):
        return operation.node.writes_buffer
    return isinstance(operation, Repeat) and any(map(writes_state, operation.block.section.body))
