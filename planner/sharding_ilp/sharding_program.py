r"""The sharding ILP.

Sets. Elements o (operators, parameters, inputs, block carries, outputs) with options S(o); an option fixes the
placement (one type per mesh axis) of each input and output of o. Streams v (a value and all its uses U(v)), each with
a lattice: nodes N(v) are placements, arcs A(v) the legal single-axis conversion steps. c(o,s) are seconds of option s,
forward and backward; c(v,a,f) seconds of arc a in phase f ∈ {forward, backward}; n(·) copies of a block.

Variables::

    x[o,s] ∈ {0,1}       element o uses option s
    y[u,a] ≥ 0           use u sends its unit of flow along arc a
    w[v,g,a] ∈ {0,1}     the uses in group g of v do arc a; if g is one use, y is w and no variable is made

    g runs over the groups of uses that make a step count together (``Problem.parts``): all uses for the forward
    collective, the ones that a gradient comes back from for the backward one, each split by whether the first n - 1
    copies or the last copy of a block does the step.

Program::

    minimise    Σ_o n(o) Σ_s c(o,s) x[o,s]  +  Σ_v Σ_g n(g) Σ_a c(v,a,phase(g)) w[v,g,a]            (objective)

    Σ_s x[o,s] = 1                                                        every o                     (choose)
    Σ_{s: source of v gives p} x[source(v),s] + Σ_{a into p} y[u,a]
        = Σ_{s: u needs p} x[element(u),s] + Σ_{a out of p} y[u,a]        every v, u ∈ U(v), p ∈ N(v) (conserve)
    w[v,g,a] ≥ y[u,a]                                                     every v, g, u ∈ g, a        (share)
    Σ_o n(o) Σ_s bytes(o,s) x[o,s] + Σ_v Σ_g n(g) Σ_a bytes(v,a) w[v,g,a] ≤ limit                      (remember)
    with g over the forward groups

Linear layers of one input that gather its rows themselves pay for that together (``planner.sharding_ilp.shared_rows``).

Bytes: parameters, gradients and AdamW state where they are stored, values that the backward pass needs, and the
copies of such values that conversions make. With x fixed, a stream with one use is a shortest path and its flow is
integral by itself; w is integer because trees with three or more ends are not always.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from passes.ir.graph import Value
from passes.ir.types import I, Placement, R, SpmdType, shard_dim
from planner.sharding_ilp.lattice import Lattice, Lattices, types_used
from planner.sharding_ilp.sharding_problem import Element, Problem, Use, ValueStream
from planner.sharding_ilp.shared_rows import add_shared_rows
from planner.solvers.linear import LinearProgram


@dataclass(frozen=True)
class Sharing:
    """The variables w[v,g,a] of one group of uses: the places of the arcs that have one, and their columns.

    ``forward`` and ``backward`` are the copies that a step of the group counts for.
    """

    forward: int
    backward: int
    places: Sequence[int]
    columns: range


@dataclass
class ShardingIlp:
    """The program and the columns of its variables.

    ``x[element]`` are the columns of its options; ``sharings[stream]`` the groups of its uses.
    """

    problem: Problem
    program: LinearProgram = field(default_factory=LinearProgram)
    x: dict[str, list[int]] = field(default_factory=dict)
    lattices: dict[str, Lattice] = field(default_factory=dict)
    sharings: dict[str, list[Sharing]] = field(default_factory=dict)
    memory_terms: list[tuple[int, float]] = field(default_factory=list)
    #: What streams ask of their lattices, where that has been worked out.
    requests: Mapping[str, LatticeRequest] = field(default_factory=dict)

    def arcs(self, stream: str) -> list[list[int]]:
        """Of each arc of a stream's lattice, the columns that say whether it is used; none if it costs nothing."""
        used: list[list[int]] = [[] for _ in self.lattices[stream].arcs]
        for sharing in self.sharings[stream]:
            for place, column in zip(sharing.places, sharing.columns):
                used[place].append(column)
        return used


def build_ilp(
    problem: Problem,
    lattices: Lattices,
    *,
    memory_limit: float | None,
    minimise_memory: bool = False,
    requests: Mapping[str, LatticeRequest] | None = None,
) -> ShardingIlp:
    """The program of ``problem``; with ``minimise_memory`` bytes are the objective and seconds do not matter.

    ``requests``: what its streams ask of their lattices, if that is there already.
    """
    ilp = ShardingIlp(problem, requests=requests or {})
    for name in problem.elements:
        add_choice(ilp, name)
    add_shared_rows(problem, ilp.program, ilp.x)
    for name in converted_streams(problem):
        add_stream(ilp, name, problem.streams[name], lattices)
    if minimise_memory:
        ilp.program.costs = [0.0] * ilp.program.num_variables
        for column, num_bytes in ilp.memory_terms:
            ilp.program.costs[column] += num_bytes
    elif memory_limit is not None:
        add_memory_limit(ilp, memory_limit)
    return ilp


def add_choice(ilp: ShardingIlp, name: str) -> None:
    """(choose): Σ_s x[o,s] = 1."""
    element = ilp.problem.elements[name]
    single = len(element.options) == 1
    columns = [
        ilp.program.variable(element.copies * option.seconds, upper=1.0, integer=not single)
        for option in element.options
    ]
    ilp.program.row(((column, 1.0) for column in columns), lower=1.0, upper=1.0)
    ilp.x[name] = columns
    ilp.memory_terms.extend(stored_bytes(element, columns))


def stored_bytes(element: Element, columns: Iterable[int]) -> Iterator[tuple[int, float]]:
    """(column, bytes) of those options of an element that keep something."""
    for column, option in zip(columns, element.options):
        if option.memory:
            yield column, float(element.copies * option.memory)


def converted_streams(problem: Problem) -> list[str]:
    """The streams whose conversions cost something."""
    return [name for name, stream in problem.streams.items() if stream.uses and not is_free(problem, stream)]


def is_free(problem: Problem, stream: ValueStream) -> bool:
    """Whether every conversion of the stream is free: it has no gradient and is (or may be) whole on every rank."""
    if stream.value.requires_grad:
        return False
    whole = [set(placement) == {R} for placement in problem.produced(stream)]
    return all(whole) or (any(whole) and problem.elements[stream.source].follows)


def stream_lattice(
    problem: Problem,
    stream: ValueStream,
    lattices: Lattices,
    *,
    request: LatticeRequest | None = None,
    detours: bool = False,
) -> Lattice:
    """The lattice of a stream, over the types that its source gives and its uses need; ``request``: its own."""
    return (request or lattice_request(problem, stream)).lattice(stream.value, lattices, detours=detours)


def _stays(types: Collection[SpmdType]) -> bool:
    """Whether a value with ``types`` at its ends on one axis is cut alike, or whole, at all of them."""
    return set(types) <= {R, I} or (len(types) == 1 and all(shard_dim(each) is not None for each in types))


def _needs(problem: Problem, stream: ValueStream) -> list[list[Placement]]:
    """What each use of a stream needs under each option of its element."""
    return [problem.needed(use) for use in stream.uses]


@dataclass(frozen=True)
class LatticeRequest:
    """What a stream asks of its lattice, whatever its steps cost (``Lattices.of``)."""

    types: tuple[tuple[SpmdType, ...], ...]
    settled: frozenset[int]
    live: bool
    saved: bool

    def lattice(self, value: Value, lattices: Lattices, *, detours: bool = False) -> Lattice:
        """The lattice, of those of one cut."""
        return lattices.of(value, self.types, settled=self.settled, live=self.live, saved=self.saved, detours=detours)


def lattice_request(problem: Problem, stream: ValueStream) -> LatticeRequest:
    """What ``stream`` asks of its lattice."""
    ends = set(problem.produced(stream)).union(*_needs(problem, stream))
    settled = problem.settled | {axis for axis in problem.sampled if _stays({where[axis] for where in ends})}
    types = types_used(stream.value, ends, settled=settled)
    return LatticeRequest(types, settled, live=any(use.live for use in stream.uses), saved=stream.saved)


@dataclass(frozen=True)
class StreamParts:
    """What the flows of a stream are made of.

    ``representatives`` are one use for each set of uses that always go together, with what it needs under each option
    of its element; ``groups`` are those that make a step count together: (uses, forward copies, backward copies).
    """

    lattice: Lattice
    representatives: list[tuple[Use, list[Placement]]]
    groups: list[tuple[tuple[int, ...], int, int]]


def stream_parts(
    problem: Problem, stream: ValueStream, lattices: Lattices, *, request: LatticeRequest | None = None
) -> StreamParts:
    """Compute the parts of ``stream``; ``request``: what it asks of its lattice."""
    needs = _needs(problem, stream)
    groups = _groups(problem, stream, needs)
    representatives = [(stream.uses[use], needs[use]) for use in groups.representatives]
    return StreamParts(stream_lattice(problem, stream, lattices, request=request), representatives, groups.parts)


def add_stream(ilp: ShardingIlp, name: str, stream: ValueStream, lattices: Lattices) -> None:
    """Flows of all uses of a stream, shared by group."""
    parts = stream_parts(ilp.problem, stream, lattices, request=ilp.requests.get(name))
    lattice = ilp.lattices[name] = parts.lattice
    roots = ilp.problem.produced(stream)
    source = [(lattice.index[where], column) for where, column in zip(roots, ilp.x[stream.source])]
    flows = []
    for use, needs in parts.representatives:
        target = [(lattice.index[where], column) for where, column in zip(needs, ilp.x[use.element])]
        flows.append(add_flow(ilp.program, lattice, source, target))
    ilp.sharings[name] = [
        add_sharing(ilp, lattice, [flows[member] for member in members], forward, backward)
        for members, forward, backward in parts.groups
    ]


@dataclass
class _VariableGroups:
    """One use for each set of uses that always go together, and the parts over them, phases merged."""

    representatives: list[int]
    parts: list[tuple[tuple[int, ...], int, int]]


def _groups(problem: Problem, stream: ValueStream, needs: Sequence[Sequence[Placement]]) -> _VariableGroups:
    """Uses that need the same under every option of the same element, and count alike, are one."""
    alike: dict[tuple[object, ...], int] = {}
    position: list[int] = []
    representatives: list[int] = []
    for index, use in enumerate(stream.uses):
        key = (use.element, tuple(needs[index]), use.scope, use.live)
        if key not in alike:
            alike[key] = len(representatives)
            representatives.append(index)
        position.append(alike[key])
    merged: dict[tuple[int, ...], list[int]] = {}
    for phase, copies, uses in problem.parts(stream):
        members = tuple(sorted({position[use] for use in uses}))
        merged.setdefault(members, [0, 0])[phase == "backward"] += copies
    return _VariableGroups(representatives, [(members, f, b) for members, (f, b) in merged.items()])


def add_flow(
    program: LinearProgram,
    lattice: Lattice,
    source: Iterable[tuple[int, int]],
    target: Iterable[tuple[int, int]],
) -> range:
    """(conserve): one unit from the placement given to the placement needed; returns the column of each arc.

    ``source`` and ``target`` are (node of the lattice, column of the option that gives or needs it).
    """
    columns = program.variables(len(lattice.arcs))
    terms: list[tuple[list[int], list[float]]] = [([], []) for _ in lattice.placements]
    for ends, sign in ((source, 1.0), (target, -1.0)):
        for node, column in ends:
            terms[node][0].append(column)
            terms[node][1].append(sign)
    first = columns.start
    for (row, signs), (places, directions) in zip(terms, lattice.incidence):
        row += [first + place for place in places]
        signs += directions
        if row:
            program.row_of(row, signs, lower=0.0, upper=0.0)
    return columns


def add_sharing(
    ilp: ShardingIlp,
    lattice: Lattice,
    flows: Sequence[range],
    forward: int,
    backward: int,
) -> Sharing:
    """(share): w[v,g,a] ≥ y[u,a] for the uses of one group; w takes the cost, and is y itself if g is one use.

    An arc that costs a group of several uses nothing has no w.
    """
    program = ilp.program
    if len(flows) == 1:
        sharing = Sharing(forward, backward, range(len(lattice.arcs)), flows[0])
    else:
        places = [
            place
            for place, (_, _, _, there, back, memory) in enumerate(lattice.arcs)
            if forward * there + backward * back != 0.0 or memory
        ]
        first = program.num_variables
        for place in places:
            column = program.variable(upper=1.0, integer=True)
            for flow in flows:
                program.row_of((column, flow[place]), (1.0, -1.0), lower=0.0, upper=math.inf)
        sharing = Sharing(forward, backward, places, range(first, program.num_variables))
    for column, cost in zip(sharing.columns, sharing_costs(sharing, lattice)):
        program.costs[column] += cost
    ilp.memory_terms.extend(sharing_memory(sharing, lattice))
    return sharing


def sharing_costs(sharing: Sharing, lattice: Lattice) -> list[float]:
    """The seconds of its variables."""
    arcs = lattice.arcs
    return [sharing.forward * arcs[place].forward + sharing.backward * arcs[place].backward for place in sharing.places]


def sharing_memory(sharing: Sharing, lattice: Lattice) -> Iterator[tuple[int, float]]:
    """(column, bytes) of those of its variables that leave copies behind."""
    if sharing.forward and lattice.keeps_copies:
        for place, column in zip(sharing.places, sharing.columns):
            if lattice.arcs[place].memory:
                yield column, float(sharing.forward * lattice.arcs[place].memory)


def add_memory_limit(ilp: ShardingIlp, limit: float) -> None:
    """(remember): bytes on each device ≤ limit; counted in MiB to keep coefficients near one."""
    unit = float(2**20)
    ilp.program.row(((column, num_bytes / unit) for column, num_bytes in ilp.memory_terms), upper=limit / unit)
