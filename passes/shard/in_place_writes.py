"""Rows written into a buffer where it lies, in the place of a changed copy that is then stored in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from passes.shard.operations import used_by
from passes.shard.sharded_graph import Compute, Convert, Repeat, Section, ShardedGraph

#: Operator that changes a copy → the one that changes its first input.
_IN_PLACE = {"aten.index_copy.default": "aten.index_copy_.default"}


def with_in_place_writes(sharded: ShardedGraph) -> ShardedGraph:
    """``sharded`` without copies of buffers, for programs without gradients that read a buffer after they wrote it.

    ``keys = index_copy(buffer, …); store(buffer, keys)`` becomes ``keys = buffer.index_copy_(…)`` where nothing else
    reads the buffer.
    """
    return replace(sharded, main=_InPlace().section(sharded.main))


class _InPlace:
    """Rewrites sections; one that several loops run stays one."""

    def __init__(self) -> None:
        self.done: dict[int, Section] = {}

    def section(self, section: Section) -> Section:
        if id(section) not in self.done:
            self.done[id(section)] = replace(section, body=_body([self._inside(each) for each in section.body]))
        return self.done[id(section)]

    def _inside(self, operation: Compute | Convert | Repeat) -> Compute | Convert | Repeat:
        if not isinstance(operation, Repeat):
            return operation
        return replace(operation, block=replace(operation.block, section=self.section(operation.block.section)))


def _body(body: list[Compute | Convert | Repeat]) -> tuple[Compute | Convert | Repeat, ...]:
    stores = {each.inputs[1].value.name: each for each in body if isinstance(each, Compute) and each.node.writes_buffer}
    uses = Counter(local.value.name for each in body for local in used_by(each))
    replaced: set[int] = set()
    operations: list[Compute | Convert | Repeat] = []
    for each in body:
        if isinstance(each, Compute) and each.node.op in _IN_PLACE:
            store, buffer = stores.get(each.outputs[0].value.name), each.inputs[0]
            # The buffer is read by this operator and named by the store, and by nothing else.
            if store is not None and store.inputs[0] == buffer and uses[buffer.value.name] == 2:
                replaced.add(id(store))
                each = replace(each, node=replace(each.node, op=_IN_PLACE[each.node.op]))
        operations.append(each)
    return tuple(each for each in operations if id(each) not in replaced)
