"""Finding chains: groups of elementwise operators of a section that one kernel can compute.

Two operators belong together if one uses what the other makes, or if both read the same tensor, all of the space's
shape. What lies on a way from one to the other comes along if it computes on the same space, rows included; if not,
the two stay apart, since neither could then run before the other. Operators of one shape are one kernel of Triton,
with row reductions that nothing in the chain uses; a chain with anything else is left to a compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from passes.chains.candidates import Candidate, candidate_of, joint_space, rows_of
from passes.chains.data import Member
from passes.ir.types import MeshShape
from passes.shard import Compute, Convert, Local, Repeat, Section

Operation = Compute | Convert | Repeat


class Groups:
    """The groups of one section; ``of[i]`` is the group of operation i, and its members are in ``members``."""

    def __init__(self, body: Sequence[Operation], mesh: MeshShape) -> None:
        self.body = body
        self.candidates: dict[int, Candidate] = {}
        for index, operation in enumerate(body):
            candidate = candidate_of(operation, mesh) if isinstance(operation, Compute) else None
            if candidate is not None:
                self.candidates[index] = candidate
        self.of = list(range(len(body)))
        self.members = {index: [index] for index in range(len(body))}
        self.spaces = {index: candidate.space for index, candidate in self.candidates.items()}
        self.maker = {local: index for index, operation in enumerate(body) for local in made_by(operation)}
        self.users: list[list[int]] = [[] for _ in body]
        for index, operation in enumerate(body):
            for local in used_by(operation):
                if local in self.maker:
                    self.users[self.maker[local]].append(index)

    def found(self) -> list[list[int]]:
        """Groups of several operators, each in order."""
        for index, candidate in self.candidates.items():
            for local in candidate.member.compute.inputs:
                maker = self.maker.get(local)
                if maker in self.candidates and self._is_whole(local, maker, index):
                    self._join(maker, index)
        self._join_readers()
        return [sorted(members) for members in self.members.values() if len(members) > 1]

    def _is_whole(self, local: Local, one: int, other: int) -> bool:
        """Whether ``local`` has the shape of the space on which both groups compute."""
        return local.shape == joint_space(self.spaces[self.of[one]], self.spaces[self.of[other]])

    def _join_readers(self) -> None:
        """Groups that read the same tensor of the space's shape, if none has to wait for what the other does not."""
        readers: dict[Local, list[int]] = {}
        for index, candidate in self.candidates.items():
            for local in dict.fromkeys(candidate.member.compute.inputs):
                if local.state is None:
                    readers.setdefault(local, []).append(index)
        for local, indices in readers.items():
            for one, other in pairwise(indices):
                if self._is_whole(local, one, other) and not self._waits(one, other):
                    self._join(one, other)

    def _waits(self, one: int, other: int) -> bool:
        first, second = self.of[one], self.of[other]
        if first == second or self._reaches(first, second) or self._reaches(second, first):
            return False
        together = {*self.members[first], *self.members[second]}
        makers = {self.maker.get(local, -1) for index in together for local in used_by(self.body[index])}
        return max(makers - together, default=-1) > min(together)

    def _reaches(self, start: int, end: int) -> bool:
        return end in self._next(start) or bool(self._between(start, end))

    def _join(self, one: int, other: int) -> None:
        """Make one group of two and of what lies between them, if all of it computes on one space."""
        first, second = self.of[one], self.of[other]
        if first == second:
            return
        together = {first, second, *self._between(first, second), *self._between(second, first)}
        space: tuple[int, ...] | None = None
        for group in together:
            if group not in self.spaces:
                return
            space = self.spaces[group] if space is None else joint_space(space, self.spaces[group])
            if space is None:
                return
        assert space is not None
        if not all(self.spaces[group] in (space, rows_of(space)) for group in together):
            return
        merged = sorted(index for group in together for index in self.members[group])
        for group in together - {first}:
            del self.members[group], self.spaces[group]
        self.members[first], self.spaces[first] = merged, space
        for index in merged:
            self.of[index] = first

    def _between(self, start: int, end: int) -> set[int]:
        """Groups on a way from ``start`` to ``end``, these two left out."""
        reaches: dict[int, bool] = {end: True}
        stack: list[tuple[int, Iterator[int]]] = [(start, iter(self._next(start)))]
        reaches[start] = False
        while stack:
            group, following = stack[-1]
            for after in following:
                if after not in reaches:
                    reaches[after] = False
                    stack.append((after, iter(self._next(after))))
                    break
                if reaches[after]:
                    reaches[group] = True
            else:
                stack.pop()
                if stack and reaches[group]:
                    reaches[stack[-1][0]] = True
        return {group for group, does in reaches.items() if does} - {start, end}

    def _next(self, group: int) -> list[int]:
        return list(dict.fromkeys(self.of[user] for index in self.members[group] for user in self.users[index]))


def find_groups(section: Section, mesh: MeshShape) -> list[list[Member]]:
    """Groups of at least two operators, as large as they can be."""
    groups = Groups(section.body, mesh)
    return [[groups.candidates[index].member for index in indices] for indices in groups.found()]


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
