"""Cut the chain of parts into chunks: what each chunk receives, computes and sends.

Only live values cross a cut: computed before it, used behind it, and not something that every stage computes itself
(``passes.repeats.model_units.made_anywhere``) or converts of a weight that it holds, which is computed again instead. A
value used two chunks on passes through the one between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from passes.pipeline_cut.totals import Additive, Total
from passes.pipeline_cut.unit_chain import ChainPart
from passes.repeats.model_units import made_anywhere
from passes.shard import Local, Repeat, Section, ShardedGraph
from passes.shard.operations import Operation, made_by, used_by, writes_state


@dataclass(frozen=True)
class ChunkBody:
    """One chunk: what it takes from the chunk before and of the model's inputs and totals, its operations and parts.

    What the last chunk sends are the step's results. ``constants`` are those that it uses; ``constant_states`` paths
    of the states that they are made from.
    """

    received: tuple[Local, ...]
    inputs: tuple[Local, ...]
    totals: tuple[Total, ...]
    operations: tuple[Operation, ...]
    parts: tuple[ChainPart, ...]
    sent: tuple[Local, ...]
    is_last: bool
    constants: Section
    constant_states: frozenset[str]


def cut(whole: ShardedGraph, sums: Additive, parts: Sequence[ChainPart], *, num_chunks: int) -> tuple[ChunkBody, ...]:
    """The chunks of a step, in model order."""
    return _Cutter(whole, sums, parts, num_chunks).bodies()


class _Cutter:
    def __init__(self, whole: ShardedGraph, sums: Additive, parts: Sequence[ChainPart], num_chunks: int) -> None:
        self.whole = whole
        self.sums = sums
        live = _live_parts(parts, sums.results)
        self.parts: list[list[ChainPart]] = [
            [part for part in live if part.chunk == index] for index in range(num_chunks)
        ]
        self.easy = made_anywhere(whole.graph)
        # A run of copies that is cut hands values from one piece to the next that only its pieces, in the parts, make.
        pieces = (operation for part in live for operation in part.operations)
        self.makers = {local: operation for operation in (*pieces, *sums.body) for local in made_by(operation)}
        self.made_in = {
            local: index
            for index, mine in enumerate(self.parts)
            for part in mine
            for operation in part.operations
            for local in made_by(operation)
        }
        self.totals = (*sums.totals, *sums.counted)
        self.available = {*whole.main.arguments, *whole.constants.results, *(total.target for total in self.totals)}

    def bodies(self) -> tuple[ChunkBody, ...]:
        operations = [self._operations(index) for index in range(len(self.parts))]
        crossing = self._crossing(operations)
        bodies_by_chunk = []
        for index, operations_here in enumerate(operations):
            results = crossing[index + 1] if index + 1 < len(operations) else self.sums.results
            is_last = index + 1 == len(operations)
            bodies_by_chunk.append(
                self._body(operations_here, self.parts[index], crossing[index], tuple(results), is_last=is_last)
            )
        return tuple(bodies_by_chunk)

    def _operations(self, index: int) -> list[Operation]:
        """The operations of a chunk, after those that it recomputes itself."""
        own_operations = [operation for part in self.parts[index] for operation in part.operations]
        computed = {local for operation in own_operations for local in made_by(operation)}
        recomputed: dict[int, Operation] = {}
        for operation in own_operations:
            for local in used_by(operation):
                self._make(local, computed, recomputed)
        return [*recomputed.values(), *own_operations]

    def _make(self, local: Local, computed: Collection[Local], recomputed: dict[int, Operation]) -> None:
        """Add the operations that compute ``local`` to ``recomputed``, if each stage is to compute it."""
        if local in computed or local in self.available or not self._is_easy(local):
            return
        maker = self.makers[local]
        if id(maker) not in recomputed:
            for source in used_by(maker):
                self._make(source, computed, recomputed)
            recomputed[id(maker)] = maker

    def _is_easy(self, local: Local) -> bool:
        if local.state is not None or isinstance(self.makers.get(local), Repeat):
            return False
        return local.value.name in self.easy or local.value.kind == "parameter"

    def _crossing(self, operations: Sequence[Sequence[Operation]]) -> list[tuple[Local, ...]]:
        """For each chunk, the values that cross the cut before it, in the order in which they are computed."""
        last_use: dict[Local, int] = {}
        for index, chunk_operations in enumerate(operations):
            for operation in chunk_operations:
                last_use.update(dict.fromkeys(used_by(operation), index))
        last_use.update(dict.fromkeys(self.sums.results, len(operations) - 1))
        return [
            tuple(
                local
                for local, maker_index in self.made_in.items()
                if maker_index < index <= last_use.get(local, -1) and not self._made_again(local, operations[index:])
            )
            for index in range(len(operations))
        ]

    def _made_again(self, local: Local, later: Sequence[Sequence[Operation]]) -> bool:
        """Whether every later chunk that uses ``local`` recomputes it."""
        return self._is_easy(local) and local not in self.sums.results

    def _body(
        self,
        operations: Sequence[Operation],
        parts: Sequence[ChainPart],
        received: tuple[Local, ...],
        results: tuple[Local, ...],
        *,
        is_last: bool,
    ) -> ChunkBody:
        live = _live(operations, results)
        replaced = {id(before): after for before, after in live if isinstance(after, Repeat)}
        used = {local for _, operation in live for local in used_by(operation)} | set(results)
        live_parts = [
            dataclasses.replace(part, repeat=replaced[id(part.repeat)]) for part in parts if id(part.repeat) in replaced
        ]
        constants, states = constants_used(self.whole.constants, used)
        return ChunkBody(
            received=received,
            inputs=tuple(local for local in self.whole.main.arguments if local in used),
            totals=tuple(total for total in self.totals if total.target in used),
            operations=tuple(operation for _, operation in live),
            parts=tuple(live_parts),
            sent=results,
            is_last=is_last,
            constants=constants,
            constant_states=states,
        )


def _live_parts(parts: Sequence[ChainPart], results: Iterable[Local]) -> tuple[ChainPart, ...]:
    """The parts without operations that ``results`` do not need."""
    live = {id(before): after for before, after in _live([o for part in parts for o in part.operations], results)}
    pruned_parts = []
    for part in parts:
        before, behind = (
            tuple(operation for operation in side if id(operation) in live) for side in (part.before, part.behind)
        )
        repeat = live.get(id(part.repeat))
        if isinstance(repeat, Repeat):
            pruned_parts.append(dataclasses.replace(part, before=before, repeat=repeat, behind=behind))
    return tuple(pruned_parts)


def _live(operations: Sequence[Operation], results: Iterable[Local]) -> list[tuple[Operation, Operation]]:
    """The operations that ``results`` need, as they were and pruned to what is used of them."""
    needed = set(results)
    live: list[tuple[Operation, Operation]] = []
    for operation in reversed(operations):
        if not needed.intersection(made_by(operation)) and not writes_state(operation):
            continue
        pruned = _pruned(operation, needed) if isinstance(operation, Repeat) else operation
        needed.update(used_by(pruned))
        live.append((operation, pruned))
    return live[::-1]


def _pruned(repeat: Repeat, needed: Collection[Local]) -> Repeat:
    """A stretch without unused operations; repeated blocks stay as they are."""
    if repeat.carried or repeat.block.roots[0] != ("",):
        return repeat
    section = repeat.block.section
    results = tuple(local for local in section.results if local in needed)
    body: list[Operation] = [operation for _, operation in _live(section.body, results)]
    used = {local for operation in body for local in used_by(operation)} | set(results)
    arguments = tuple(local for local in section.arguments if local in used)
    block = dataclasses.replace(repeat.block, section=Section(arguments, tuple(body), results))
    return dataclasses.replace(repeat, block=block, entries=arguments, results=results)


def constants_used(section: Section, used: Collection[Local]) -> tuple[Section, frozenset[str]]:
    """The part of the constants that is used, and the states that it is made from."""
    results = tuple(local for local in section.results if local in used)
    body = tuple(operation for _, operation in _live(section.body, results))
    states: Mapping[str, None] = {
        local.state.path: None for operation in body for local in used_by(operation) if local.state is not None
    }
    return Section((), body, results), frozenset(states)
