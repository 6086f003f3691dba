"""The operations of a sharded graph rewritten, section by section."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from passes.shard.operations import Operation
from passes.shard.sharded_graph import Repeat, Section, ShardedGraph

Body = tuple[Operation, ...]


def with_rewritten_sections(sharded: ShardedGraph, rewrite: Callable[[Body], Iterable[Operation]]) -> ShardedGraph:
    """``sharded`` with what ``rewrite`` makes of the operations of each section, those within its loops first.

    A section that several loops run stays one.
    """
    done: dict[int, Section] = {}

    def of(section: Section) -> Section:
        if id(section) not in done:
            body = tuple(map(inside, section.body))
            done[id(section)] = replace(section, body=tuple(rewrite(body)))
        return done[id(section)]

    def inside(operation: Operation) -> Operation:
        if not isinstance(operation, Repeat):
            return operation
        return replace(operation, block=replace(operation.block, section=of(operation.block.section)))

    return replace(sharded, main=of(sharded.main))
