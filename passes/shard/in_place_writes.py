"""Rows written into a buffer where it lies, in the place of a changed copy that is then stored in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from passes.shard.operations import Operation, used_by
from passes.shard.rewritten_sections import Body, with_rewritten_sections
from passes.shard.sharded_graph import Compute, ShardedGraph

#: Operator that changes a copy → the one that changes its first input.
_IN_PLACE = {"aten.index_copy.default": "aten.index_copy_.default"}


def with_in_place_writes(sharded: ShardedGraph) -> ShardedGraph:
    """``sharded`` without copies of buffers, for programs without gradients that read a buffer after they wrote it.

    ``keys = index_copy(buffer, …); store(buffer, keys)`` becomes ``keys = buffer.index_copy_(…)`` where nothing else
    reads the buffer.
    """
    return with_rewritten_sections(sharded, _written_in_place)


def _written_in_place(body: Body) -> tuple[Operation, ...]:
    stores = {each.inputs[1].value.name: each for each in body if isinstance(each, Compute) and each.node.writes_buffer}
    uses = Counter(local.value.name for each in body for local in used_by(each))
    replaced: set[int] = set()
    operations: list[Operation] = []
    for each in body:
        if isinstance(each, Compute) and each.node.op in _IN_PLACE:
            store, buffer = stores.get(each.outputs[0].value.name), each.inputs[0]
            # The buffer is read by this operator and named by the store, and by nothing else.
            if store is not None and store.inputs[0] == buffer and uses[buffer.value.name] == 2:
                replaced.add(id(store))
                each = replace(each, node=replace(each.node, op=_IN_PLACE[each.node.op]))
        operations.append(each)
    return tuple(each for each in operations if id(each) not in replaced)
