"""A choice of one option for every element, and what it costs with the best conversions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from passes.ir.conversions import Step
from passes.ir.types import I, Placement, R
from planner.sharding_ilp.conversion_tree import cheapest_tree
from planner.sharding_ilp.lattice import Arc, Lattice, Lattices
from planner.sharding_ilp.options import Option
from planner.sharding_ilp.sharding_problem import Problem, ValueStream
from planner.sharding_ilp.sharding_program import LatticeRequest, ShardingIlp, is_free, stream_lattice
from planner.sharding_ilp.shared_rows import share_rows

PHASES = ("forward", "backward")


@dataclass(frozen=True)
class Conversion:
    """One step of a stream's tree, and how often it runs forward and backward (0: never)."""

    arc: Arc
    copies: int
    backward_copies: int


@dataclass(frozen=True)
class Assignment:
    """An option for every element and a tree of conversions for every stream."""

    options: dict[str, Option]
    trees: dict[str, tuple[Conversion, ...]]
    seconds: float
    memory: float


def read_choices(ilp: ShardingIlp, values: list[float]) -> dict[str, Option]:
    """The option of each element in a solution; in a fractional one, the option with the largest share."""
    chosen = {}
    for name, columns in ilp.x.items():
        position = max(range(len(columns)), key=lambda index: (values[columns[index]], -index))
        chosen[name] = ilp.problem.elements[name].options[position]
    return chosen


def whole_choices(problem: Problem) -> dict[str, Option]:
    """The option of every element that shards least."""

    def divided(option: Option) -> int:
        places = (*option.inputs, *option.outputs)
        return sum(spmd_type not in (I, R) for where in places for spmd_type in where)

    def partial(option: Option) -> int:
        return sum(spmd_type == R for where in option.outputs for spmd_type in where)

    return {
        name: min(element.options, key=lambda option: (divided(option), partial(option)))
        for name, element in problem.elements.items()
    }


def used_steps(ilp: ShardingIlp, values: list[float]) -> dict[str, set[Step]]:
    """The conversion steps that a solution uses, by stream."""
    return {
        name: {
            arc.step
            for arc, columns in zip(lattice.arcs, ilp.arcs(name))
            if not columns or any(values[column] > 0.5 for column in columns)
        }
        for name, lattice in ilp.lattices.items()
    }


def complete(
    problem: Problem,
    options: Mapping[str, Option],
    lattices: Lattices,
    *,
    allowed: Mapping[str, set[Step]] | None = None,
    requests: Mapping[str, LatticeRequest] | None = None,
) -> Assignment | None:
    """Add the cheapest conversions to a choice of options (of ``allowed`` steps only, where it names a stream).

    Siblings share what they gather alike. ``requests``: what streams ask of their lattices (``ShardingIlp``).

    None if some conversion is not possible.
    """
    chosen = share_rows(problem, options)
    for stream in problem.streams.values():
        element = problem.elements[stream.source]
        if element.follows and stream.uses and is_free(problem, stream) and len(element.options) > 1:
            chosen[stream.source] = _following_option(problem, stream, chosen, lattices)
    trees: dict[str, tuple[Conversion, ...]] = {}
    seconds, memory = 0.0, 0.0
    for name, stream in problem.streams.items():
        steps = allowed.get(name) if allowed is not None else None
        request = None if requests is None else requests.get(name)
        tree = stream_tree(problem, stream, chosen, lattices, request=request, allowed=steps)
        if tree is None:
            return None
        trees[name] = tree
        for item in tree:
            seconds += item.copies * item.arc.forward + item.backward_copies * item.arc.backward
            memory += item.copies * item.arc.memory
    for name, element in problem.elements.items():
        seconds += element.copies * chosen[name].seconds
        memory += element.copies * chosen[name].memory
    return Assignment(chosen, trees, seconds, memory)


def _needs(stream: ValueStream, chosen: Mapping[str, Option]) -> list[Placement]:
    """What each use of a stream needs."""
    return [chosen[use.element].inputs[use.index] for use in stream.uses]


def stream_tree(
    problem: Problem,
    stream: ValueStream,
    chosen: Mapping[str, Option],
    lattices: Lattices,
    *,
    request: LatticeRequest | None = None,
    allowed: set[Step] | None = None,
) -> tuple[Conversion, ...] | None:
    """The cheapest conversions of one stream, steps nearer the root first; ``request``: what it asks of its lattice."""
    root = chosen[stream.source].outputs[stream.output]
    needs = _needs(stream, chosen)
    if all(need == root for need in needs):
        return ()
    lattice = stream_lattice(problem, stream, lattices, request=request, detours=True)
    first = lattice.index[root]
    ends = sorted({lattice.index[need] for need in needs} - {first})
    users = tuple(frozenset(i for i, need in enumerate(needs) if lattice.index[need] == end) for end in ends)
    parts = tuple(problem.parts(stream))
    if allowed is not None:
        lattice = replace(lattice, arcs=tuple(arc for arc in lattice.arcs if arc.step in allowed))
        return _tree(lattice, first, ends, _Counts(parts, users))
    key = (id(lattice), first, users, *ends, *parts)
    trees = lattices.pool.trees
    if key not in trees:
        trees[key] = lattice, _tree(lattice, first, ends, _Counts(parts, users))
    return trees[key][1]


def _tree(lattice: Lattice, root: int, ends: Sequence[int], counts: _Counts) -> tuple[Conversion, ...] | None:
    """The cheapest conversions from one placement to some, each step as often as ``counts`` says."""
    tree = cheapest_tree(
        lattice,
        root,
        ends,
        lambda arc, mask: counts[mask][0] * arc.forward + counts[mask][1] * arc.backward,
    )
    if tree is None:
        return None
    ordered = sorted(tree.values(), key=lambda item: (_depth(lattice, tree, item[0]), item[0].source, item[0].target))
    return tuple(Conversion(arc, *counts[mask]) for arc, mask in ordered)


class _Counts(dict[int, tuple[int, int]]):
    """Mask of ends → how often the step before them runs, forward and backward."""

    def __init__(self, parts: Sequence[tuple[str, int, frozenset[int]]], users: Sequence[frozenset[int]]) -> None:
        super().__init__()
        self.parts, self.users = parts, users

    def __missing__(self, mask: int) -> tuple[int, int]:
        uses = frozenset[int]().union(*(users for end, users in enumerate(self.users) if mask >> end & 1))
        counts = [sum(n for phase, n, group in self.parts if phase == name and group & uses) for name in PHASES]
        self[mask] = (counts[0], counts[1])
        return self[mask]


def _depth(lattice: Lattice, tree: dict[int, tuple[Arc, int]], arc: Arc) -> int:
    depth = 0
    while arc.source in tree:
        arc = tree[arc.source][0]
        depth += 1
    return depth


def _following_option(
    problem: Problem, stream: ValueStream, chosen: Mapping[str, Option], lattices: Lattices
) -> Option:
    """The placement of an input or frozen parameter: as divided as its uses allow at no cost, else whole.

    Every conversion of a whole one is free, so the ILP leaves it out; but a process that holds only its part is
    better off, and nothing is lost if the uses agree.
    """
    options = problem.elements[stream.source].options
    needs = _needs(stream, chosen)
    whole = next(option for option in options if set(option.outputs[0]) == {"R"})
    shared = tuple(types[0] if len(set(types)) == 1 else "R" for types in zip(*needs))
    for option in options:
        if option.outputs[0] == shared:
            tree = stream_tree(problem, stream, {**chosen, stream.source: option}, lattices)
            if tree is not None and not any(item.arc.forward for item in tree):
                return option
    return whole
