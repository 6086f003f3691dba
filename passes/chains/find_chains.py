"""Finding chains: groups of elementwise operators of a section that one kernel can compute.

Two operators belong together if one uses the other's output, or if both read the same tensor, all of the space's
shape. What lies on a way from one to the other comes along if it computes on the same space, rows included; if not,
the two stay apart, since neither could then run before the other. Operators of one shape are one kernel of Triton,
with row reductions that nothing in the chain uses; a chain with anything else is left to a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from passes.chains.members import ChainMember, candidate_of, joint_space, rows_of
from passes.chains.operator_chain import Member
from passes.ir.types import MeshShape
from passes.shard import Compute, Local, Section
from passes.shard.operations import Operation, made_by, used_by

#: Tensors that one kernel reads and writes, forward: each has an address, a mask and a gradient in registers.
MOST_OPERANDS = 64


class Groups:
    """The groups of one section; ``of[i]`` is the group of operation i, and its members are in ``members``."""

    def __init__(self, body: Sequence[Operation], mesh: MeshShape) -> None:
        self.body = body
        self.candidates: dict[int, ChainMember] = {}
        for index, operation in enumerate(body):
            candidate = candidate_of(operation, mesh) if isinstance(operation, Compute) else None
            if candidate is not None:
                self.candidates[index] = candidate
        self.of = list(range(len(body)))
        #: Groups in an order in which they can run; the places of groups that were joined to others are empty.
        self.order: list[int | None] = list(range(len(body)))
        self.place = list(range(len(body)))
        self.members = {index: [index] for index in range(len(body))}
        self.spaces = {index: candidate.space for index, candidate in self.candidates.items()}
        self.maker = {local: index for index, operation in enumerate(body) for local in made_by(operation)}
        self.users: list[list[int]] = [[] for _ in body]
        for index, operation in enumerate(body):
            for local in used_by(operation):
                if local in self.maker:
                    self.users[self.maker[local]].append(index)

    def as_lists(self) -> list[list[int]]:
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
        first, second = sorted((self.of[one], self.of[other]), key=self.place.__getitem__)
        if first == second or second in self._next(first) or self._between(first, second):
            return False
        together = {*self.members[first], *self.members[second]}
        makers = {self.maker.get(local, -1) for index in together for local in used_by(self.body[index])}
        return max(makers - together, default=-1) > min(together)

    def _join(self, one: int, other: int) -> None:
        """Make one group of two and of what lies between them, if it computes on one space and a kernel can hold it."""
        first, second = sorted((self.of[one], self.of[other]), key=self.place.__getitem__)
        if first == second:
            return
        together = {first, second, *self._between(first, second)}
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
        if self._num_operands(merged) > MOST_OPERANDS:
            return
        self._reorder(first, second, together)
        for group in together - {first}:
            del self.members[group], self.spaces[group]
        self.members[first], self.spaces[first] = merged, space
        for index in merged:
            self.of[index] = first

    def _num_operands(self, indices: Sequence[int]) -> int:
        """How many tensors a group would read from others, and make for others or for the end of the section."""
        group = set(indices)
        read = {local for index in indices for local in used_by(self.body[index])}
        made = [local for index in indices for local in made_by(self.body[index])]
        ends = {index for index in indices if not group.issuperset(self.users[index]) or not self.users[index]}
        return len(read.difference(made)) + sum(self.maker[local] in ends for local in made)

    def _reorder(self, first: int, second: int, together: set[int]) -> None:
        """Let what needs one of a group follow it, of all that stands between its first and its last.

        As in Pearce and Kelly, "A dynamic topological sort algorithm for directed acyclic graphs", 2006.
        """
        start, end = self.place[first], self.place[second]
        window = [group for group in self.order[start : end + 1] if group is not None and group not in together]
        behind = self._after(together, end)
        ordered = [group for group in window if group not in behind]
        ordered += [first, *(group for group in window if group in behind)]
        self.order[start : end + 1] = [*ordered, *[None] * (end + 1 - start - len(ordered))]
        for offset, group in enumerate(ordered):
            self.place[group] = start + offset

    def _after(self, groups: set[int], end: int) -> set[int]:
        """Groups up to the place ``end`` that need one of ``groups``."""
        followers: set[int] = set()
        stack = list(groups)
        while stack:
            for after in self._next(stack.pop()):
                if self.place[after] <= end and after not in followers and after not in groups:
                    followers.add(after)
                    stack.append(after)
        return followers

    def _between(self, start: int, end: int) -> set[int]:
        """Groups on a way from ``start`` to ``end``, these two left out."""
        after = self._after({start}, self.place[end]) - {end}
        on_the_way: set[int] = set()
        # In the reverse of the order: whatever leads to what leads to the end.
        for group in sorted(after, key=self.place.__getitem__, reverse=True):
            if any(following == end or following in on_the_way for following in self._next(group)):
                on_the_way.add(group)
        return on_the_way

    def _next(self, group: int) -> list[int]:
        return list(dict.fromkeys(self.of[user] for index in self.members[group] for user in self.users[index]))


def find_groups(section: Section, mesh: MeshShape) -> list[list[Member]]:
    """Groups of at least two operators, as large as they can be."""
    groups = Groups(section.body, mesh)
    return [[groups.candidates[index].member for index in indices] for indices in groups.as_lists()]
