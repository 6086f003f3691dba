r"""A lower bound on plans whose copies of a repeated block may differ, from the program of one copy.

Folding gives every copy of a block the same options, and one placement to what a copy hands to the next; a plan of the
graph as it stands has no such duty (columns and rows may alternate over the copies). Averaged over the n copies of
each block, any plan is a point of this linear program, so that its optimum bounds them all::

    x[o,s]                  share of the copies of o that use option s
    a[o,s], b[o,s]          the same over the first n - 1 copies, and of the last:
                            n x[o,s] = (n - 1) a[o,s] + b[o,s]                                         (last)
    e[c,p], m[c,p]          whether the first copy takes carry c as p; the share of the others that do:
                            n x[c,p] = e[c,p] + (n - 1) m[c,p]                                         (first)

Flows (``ilp``) to the next copy begin at a and end at m; flows behind the block begin at b; flows into it end at e.
What a copy's own uses convert may be done in other copies than those that hand it on::

    Σ_g n(g) w[v,g,a] ≥ n y[u,a]        over the groups g that u is in                                 (average)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.sharding_ilp.lattice import Lattice, Lattices
from planner.sharding_ilp.sharding_problem import Problem, Scope
from planner.sharding_ilp.sharding_program import (
    ShardingIlp,
    add_choice,
    add_flow,
    add_memory_limit,
    is_free,
    stream_parts,
)
from planner.sharding_ilp.shared_rows import add_shared_rows
from planner.solvers.linear import LinearProgram

#: Columns of a variable of each option, in the order of the options.
Columns = Sequence[int]


def unfolded_relaxation(problem: Problem, lattices: Lattices, *, memory_limit: float | None) -> LinearProgram:
    """The linear program whose optimum no plan of the problem's graph, folded or not, is better than."""
    builder = _BoundBuilder(problem, lattices)
    for name in problem.elements:
        add_choice(builder.ilp, name)
    add_shared_rows(problem, builder.ilp.program, builder.ilp.x)
    builder.split_copies()
    for name, stream in problem.streams.items():
        if stream.uses and not is_free(problem, stream):
            builder.add_stream(name)
    if memory_limit is not None:
        add_memory_limit(builder.ilp, memory_limit)
    program = builder.ilp.program
    program.integers = [False] * program.num_variables
    return program


@dataclass(frozen=True)
class _Used:
    """Whether the copies of a group do an arc: the column, the uses that make them, and how often it counts."""

    column: int
    members: tuple[int, ...]
    forward: int
    backward: int


class _BoundBuilder:
    def __init__(self, problem: Problem, lattices: Lattices) -> None:
        self.problem, self.lattices = problem, lattices
        self.ilp = ShardingIlp(problem)
        self.early: dict[str, Columns] = {}
        self.last: dict[str, Columns] = {}
        self.first: dict[str, Columns] = {}
        self.later: dict[str, Columns] = {}

    def split_copies(self) -> None:
        """(last) for elements whose outputs leave their copy, (first) for carries."""
        for stream in self.problem.streams.values():
            name, copies = stream.source, stream.copies
            if copies == 1:
                continue
            if self.problem.elements[name].kind == "carry":
                self.first[name], self.later[name] = self._split(name, 1, copies - 1)
            elif name not in self.early and any(use.scope != "inner" for use in stream.uses):
                self.early[name], self.last[name] = self._split(name, copies - 1, 1)

    def _split(self, name: str, some: int, others: int) -> tuple[Columns, Columns]:
        """The choices of ``name`` as the average over two groups of copies."""
        program, whole = self.ilp.program, self.ilp.x[name]
        parts = program.variables(len(whole)), program.variables(len(whole))
        for column, one, other in zip(whole, *parts):
            terms = ((column, -float(some + others)), (one, float(some)), (other, float(others)))
            program.row(terms, lower=0.0, upper=0.0)
        for part in parts:
            program.row(((column, 1.0) for column in part), lower=1.0, upper=1.0)
        return parts

    def add_stream(self, name: str) -> None:
        stream = self.problem.streams[name]
        roots = self.problem.produced(stream)
        parts = stream_parts(self.problem, stream, self.lattices)
        lattice = parts.lattice
        flows = []
        for use, needs in parts.representatives:
            source = zip(map(lattice.index.__getitem__, roots), self._source_columns(stream.source, use.scope))
            target = zip(map(lattice.index.__getitem__, needs), self._needed(use.element, use.scope))
            flows.append(add_flow(self.ilp.program, lattice, source, target))
        scopes = [use.scope for use, _ in parts.representatives]
        self._share(lattice, flows, scopes, parts.groups)

    def _source_columns(self, source: str, scope: Scope) -> Columns:
        leaving = {"next": self.early, "exit": self.last}.get(scope, {})
        return leaving.get(source, self.ilp.x[source])

    def _needed(self, element: str, scope: Scope) -> Columns:
        if self.problem.elements[element].kind != "carry":
            return self.ilp.x[element]
        return self.later[element] if scope == "next" else self.first[element]

    def _share(
        self,
        lattice: Lattice,
        flows: Sequence[Columns],
        scopes: Sequence[Scope],
        groups: Sequence[tuple[tuple[int, ...], int, int]],
    ) -> None:
        """(share) where a use belongs to one group of copies, (average) where several groups serve it."""
        program = self.ilp.program
        for position, arc in enumerate(lattice.arcs):
            used: list[_Used] = []
            for members, forward, backward in groups:
                cost = forward * arc.forward + backward * arc.backward
                if cost == 0.0 and not arc.memory:
                    continue
                if len(members) == 1 and all(members == other or members[0] not in other for other, _, _ in groups):
                    column = flows[members[0]][position]
                    program.costs[column] += cost
                else:
                    column = program.variable(cost, upper=1.0)
                    used.append(_Used(column, members, forward, backward))
                if arc.memory and forward:
                    self.ilp.memory_terms.append((column, float(forward * arc.memory)))
            phases = [bool(arc.forward or arc.memory), bool(arc.backward)]
            for member, scope in enumerate(scopes):
                serving = [group for group in used if member in group.members]
                self._serve(flows[member][position], scope, serving, phases)

    def _serve(self, flow: int, scope: Scope, groups: Sequence[_Used], phases: Sequence[bool]) -> None:
        """``phases``: whether the arc costs something forward, and backward (else groups may be left out)."""
        program = self.ilp.program
        if scope != "inner":
            for group in groups:
                program.row(((group.column, 1.0), (flow, -1.0)), lower=0.0)
            return
        forward = [(group.column, float(group.forward)) for group in groups if group.forward]
        backward = [(group.column, float(group.backward)) for group in groups if group.backward]
        for counts, costs in zip((forward, backward), phases):
            if counts and costs and (counts is forward or not phases[0] or counts != forward):
                program.row((*counts, (flow, -sum(count for _, count in counts))), lower=0.0)
