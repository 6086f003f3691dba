"""Find blocks that repeat (the layers of a transformer), so that they are planned once for all copies.

Copies of a block are consecutive stretches of the graph that do the same to the same shapes. Module paths say where
a stretch may begin: ``model.layers.0.…``, ``model.layers.1.…``; the comparison itself looks only at operators,
constants, shapes and wiring, so that modules of equal shape fold whatever their class, and unequal ones never do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from passes.ir.graph import Graph, Node, State

#: A block may be made of up to this many consecutive list entries (Linear, ReLU, Linear, ReLU, …).
MAX_ENTRIES_PER_COPY = 6
#: The attribute of a graph that caches its blocks.
_KEPT = "repeated blocks"


@dataclass(frozen=True)
class BlockRun:
    """Identical copies of a block, one after the other.

    Attributes:
        copies: node names of each copy, in graph order, matching position by position (no constant nodes).
        roots: module paths of each copy (several if a copy spans several list entries).
        carried: per carried slot, the value that each copy takes from outside: the entry value for copy 0, an
            output of the copy before for the others.
        carried_output: per carried slot, the value of copy 0 that copy 1 takes.
        shared: other values from outside (activations, constants, states), the same for all copies.
        states: per slot, the parameter or buffer that each copy has of its own (value names).
    """

    copies: tuple[tuple[str, ...], ...]
    roots: tuple[tuple[str, ...], ...]
    carried: tuple[tuple[str, ...], ...]
    carried_output: tuple[str, ...]
    shared: tuple[str, ...]
    states: tuple[tuple[str, ...], ...]

    @property
    def num_copies(self) -> int:
        return len(self.copies)


class FoldedBlock(Protocol):
    """What a plan says of a run that it folds."""

    @property
    def roots(self) -> tuple[tuple[str, ...], ...]: ...

    @property
    def first_node(self) -> str: ...


@dataclass(frozen=True)
class _Stretch:
    """Candidate for one copy (or a part of one): consecutive nodes and the module path they belong to."""

    root: str
    nodes: tuple[Node, ...]


def find_blocks(graph: Graph) -> tuple[BlockRun, ...]:
    """Runs of two or more identical blocks, in graph order, not overlapping.

    A run ends where a value of a copy is used other than by itself and the next copy. Cached on the graph.
    """
    cache: dict[str, tuple[BlockRun, ...]] = vars(graph)
    if _KEPT not in cache:
        cache[_KEPT] = _found_blocks(graph)
    return cache[_KEPT]


def grouped(run: BlockRun, period: int, num_copies: int | None = None) -> BlockRun | None:
    """``run`` with ``period`` copies at a time as one; those left over at the end belong to no block.

    ``num_copies`` of the result, or None for as many as there are; None if that is not two or more.
    """
    count = run.num_copies // period if num_copies is None else num_copies
    if count < 2 or count * period > run.num_copies:
        return None
    if period == 1 and count == run.num_copies:
        return run
    starts = range(0, count * period, period)
    return BlockRun(
        copies=tuple(tuple(name for copy in run.copies[i : i + period] for name in copy) for i in starts),
        roots=tuple(tuple(root for roots in run.roots[i : i + period] for root in roots) for i in starts),
        carried=tuple(tuple(names[i] for i in starts) for names in run.carried),
        carried_output=tuple(names[period] for names in run.carried),
        shared=run.shared,
        states=tuple(tuple(names[i + place] for i in starts) for names in run.states for place in range(period)),
    )


def folded_runs(graph: Graph, blocks: Sequence[FoldedBlock]) -> tuple[BlockRun, ...] | None:
    """The runs of ``graph`` that a plan folds into ``blocks``, in their order; None if it does not repeat them so."""
    keys = {node.name: node.key for node in graph.nodes}
    runs = {keys[run.copies[0][0]]: run for run in find_blocks(graph)} if blocks else {}
    folded = []
    for block in blocks:
        run = runs.get(block.first_node)
        period, remainder = divmod(len(block.roots[0]), len(run.roots[0])) if run is not None else (0, 0)
        group = grouped(run, period, len(block.roots)) if run is not None and period and not remainder else None
        if group is None or group.roots != tuple(map(tuple, block.roots)):
            return None
        folded.append(group)
    return tuple(folded)


def _found_blocks(graph: Graph) -> tuple[BlockRun, ...]:
    finder = _BlockFinder(graph)
    nodes = [node for node in graph.nodes if not node.constant]
    runs = finder.search(nodes, level=0)
    position = {node.name: index for index, node in enumerate(nodes)}
    return tuple(sorted(runs, key=lambda run: position[run.copies[0][0]]))


class _BlockFinder:
    def __init__(self, graph: Graph) -> None:
        self.values = graph.values
        self.states: dict[str, State] = {state.value.name: state for state in graph.states}
        self.constants = {value.name for node in graph.nodes if node.constant for value in node.outputs}
        self.users: dict[str, set[str]] = defaultdict(set)
        for node in graph.nodes:
            for name in node.inputs:
                self.users[name].add(node.name)
        for path, name in graph.outputs.items():
            self.users[name].add(f"output:{path}")

    def search(self, nodes: Sequence[Node], *, level: int) -> list[BlockRun]:
        """Runs among ``nodes``, whose lists are told apart by the ``level``-th number in their module paths."""
        if not any(_split_path(node.module_path, level) for node in nodes):
            return []
        runs: list[BlockRun] = []
        leftover: list[Node] = []

        def search_leftover() -> None:
            if leftover:
                runs.extend(self.search(tuple(leftover), level=level + 1))
                leftover.clear()

        for group in _groups(nodes, level):
            start = 0
            while start < len(group):
                run_and_width = self._best_run(group, start) if group[start].root else None
                if run_and_width is None:
                    leftover.extend(group[start].nodes)
                    start += 1
                    continue
                run, width = run_and_width
                search_leftover()
                runs.append(run)
                start += width * run.num_copies
        search_leftover()
        return runs

    def _best_run(self, group: Sequence[_Stretch], start: int) -> tuple[BlockRun, int] | None:
        """The run from ``group[start]`` that saves most nodes, with the number of list entries per copy."""
        best: tuple[int, BlockRun, int] | None = None
        sizes = [len(entry.nodes) for entry in group[start:]]
        for width in range(1, MAX_ENTRIES_PER_COPY + 1):
            if best is not None and best[0] >= sum(sizes[width:]):
                break  # not even a run to the end of the list would save more
            copies = []
            for begin in range(start, len(group) - width + 1, width):
                entries = group[begin : begin + width]
                copies.append(
                    (tuple(entry.root for entry in entries), tuple(n for entry in entries for n in entry.nodes))
                )
            run = self._run(copies)
            if run is not None:
                saved = (run.num_copies - 1) * len(run.copies[0])
                if best is None or saved > best[0]:
                    best = (saved, run, width)
        return None if best is None else (best[1], best[2])

    def _run(self, copies: Sequence[tuple[tuple[str, ...], tuple[Node, ...]]]) -> BlockRun | None:
        """The longest run of identical copies from the first, or None if not even the second is like it."""
        if len(copies) < 2 or not copies[0][1]:
            return None
        comparison = _Comparison(self, *copies[0])
        count = 1
        for roots, nodes in copies[1:]:
            if not comparison.extend(roots, nodes):
                break
            count += 1
        return comparison.run() if count > 1 else None


class _Comparison:
    """Compares each next copy with the first one, and gathers what they carry, share and own."""

    def __init__(self, finder: _BlockFinder, roots: tuple[str, ...], nodes: tuple[Node, ...]) -> None:
        self.finder = finder
        self.roots = [roots]
        self.copies = [nodes]
        self.first_outputs = _output_places(nodes)
        self.previous_outputs = self.first_outputs
        self.carried: dict[tuple[int, int], list[str]] = {}
        self.shared: dict[str, None] = {}
        self.states: dict[str, list[str]] = {}

    def extend(self, roots: tuple[str, ...], nodes: tuple[Node, ...]) -> bool:
        """Add a copy if it is like the first; otherwise change nothing and say False."""
        first = self.copies[0]
        if len(nodes) != len(first) or not self._uses_end_with(nodes):
            return False
        outputs = _output_places(nodes)
        carried: dict[tuple[int, int], tuple[str, str]] = {}
        shared: dict[str, None] = {}
        states: dict[str, str] = {}
        for node, model in zip(nodes, first):
            if not self._same_call(node, model):
                return False
            for name, model_name in zip(node.inputs, model.inputs):
                if name in outputs or model_name in self.first_outputs:
                    if outputs.get(name) != self.first_outputs.get(model_name):
                        return False
                elif name in self.previous_outputs:
                    if carried.setdefault(self.previous_outputs[name], (name, model_name)) != (name, model_name):
                        return False
                elif name == model_name:
                    shared[name] = None
                elif not self._own_state(name, model_name, roots) or states.setdefault(model_name, name) != name:
                    return False
        if not self._consistent(carried, shared, states):
            return False
        self._accept(roots, nodes, outputs, carried, shared, states)
        return True

    def _uses_end_with(self, nodes: tuple[Node, ...]) -> bool:
        """Whether the copy so far last is used by nothing but itself and the copy to be added."""
        inside = {node.name for node in nodes} | {node.name for node in self.copies[-1]}
        return all(self.finder.users[value.name] <= inside for node in self.copies[-1] for value in node.outputs)

    def _same_call(self, node: Node, model: Node) -> bool:
        if node.op != model.op or len(node.inputs) != len(model.inputs):
            return False
        if node.constants != model.constants:
            return False
        pairs = [
            *((self.finder.values[a], self.finder.values[b]) for a, b in zip(node.inputs, model.inputs)),
            *zip(node.outputs, model.outputs),
        ]
        return all((a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad) for a, b in pairs)

    def _own_state(self, name: str, model_name: str, roots: tuple[str, ...]) -> bool:
        """Whether two states stand at the same place under their copies' roots and are used nowhere else."""
        states = self.finder.states
        if name not in states or model_name not in states:
            return False
        state, model = states[name], states[model_name]
        if state.aliases or model.aliases or state.value.kind != model.value.kind:
            return False
        return any(
            state.path.startswith(f"{root}.") and model.path == first_root + state.path[len(root) :]
            for root, first_root in zip(roots, self.roots[0])
        )

    def _consistent(
        self,
        carried: Mapping[tuple[int, int], tuple[str, str]],
        shared: Mapping[str, None],
        states: Mapping[str, str],
    ) -> bool:
        if len(self.copies) == 1:
            return len({entry for _, entry in carried.values()}) == len(carried) and not set(states) & set(shared)
        return (
            set(carried) == set(self.carried)
            and all(entry == self.carried[slot][0] for slot, (_, entry) in carried.items())
            and set(shared) == set(self.shared)
            and set(states) == set(self.states)
        )

    def _accept(
        self,
        roots: tuple[str, ...],
        nodes: tuple[Node, ...],
        outputs: dict[str, tuple[int, int]],
        carried: Mapping[tuple[int, int], tuple[str, str]],
        shared: Mapping[str, None],
        states: Mapping[str, str],
    ) -> None:
        for slot, (name, entry) in carried.items():
            self.carried.setdefault(slot, [entry]).append(name)
        for model_name, name in states.items():
            self.states.setdefault(model_name, [model_name]).append(name)
        self.shared.update(shared)
        self.roots.append(roots)
        self.copies.append(nodes)
        self.previous_outputs = outputs

    def run(self) -> BlockRun | None:
        """The run found, or None if a copy's own state is used outside of its copy."""
        inside = [{node.name for node in nodes} for nodes in self.copies]
        for names in self.states.values():
            if not all(self.finder.users[name] <= own for name, own in zip(names, inside)):
                return None
        slots = sorted(self.carried)
        return BlockRun(
            copies=tuple(tuple(node.name for node in nodes) for nodes in self.copies),
            roots=tuple(self.roots),
            carried=tuple(tuple(self.carried[slot]) for slot in slots),
            carried_output=tuple(self.copies[0][node].outputs[output].name for node, output in slots),
            shared=tuple(self.shared),
            states=tuple(tuple(names) for names in self.states.values()),
        )


def _output_places(nodes: Iterable[Node]) -> dict[str, tuple[int, int]]:
    """Value name → (position of its node in the copy, which output)."""
    return {
        value.name: (position, index) for position, node in enumerate(nodes) for index, value in enumerate(node.outputs)
    }


def _split_path(path: str, level: int) -> tuple[str, str] | None:
    """``("model.layers", "0")``: a path cut at its ``level``-th number, or None if it has not so many."""
    parts = path.split(".")
    numbers = [position for position, part in enumerate(parts) if part.isdigit()]
    if len(numbers) <= level:
        return None
    return ".".join(parts[: numbers[level]]), parts[numbers[level]]


def _groups(nodes: Sequence[Node], level: int) -> list[list[_Stretch]]:
    """Nodes as groups of stretches: one group per list, one stretch per visit of a list entry.

    Nodes between two entries of one list (made by the parent module) go with the entry before them.
    """
    places = [_split_path(node.module_path, level) for node in nodes]
    groups: list[list[_Stretch]] = []
    position = 0
    while position < len(nodes):
        place = places[position]
        if place is None:
            groups.append([_Stretch("", (nodes[position],))])
            position += 1
            continue
        same_list = [index for index in range(position, len(nodes)) if _list_of(places[index]) == place[0]]
        end = _end_of_visit(places, position, same_list)
        groups.append(_entries(nodes[position:end], places[position:end], place[0]))
        position = end
    return groups


def _list_of(place: tuple[str, str] | None) -> str | None:
    return None if place is None else place[0]


def _end_of_visit(places: Sequence[tuple[str, str] | None], start: int, same_list: Sequence[int]) -> int:
    """One past the last node of a list that is not interrupted by another list of its own."""
    last = start
    for index in same_list:
        between = {_list_of(place) for place in places[last + 1 : index]}
        if between - {None, _list_of(places[start])}:
            break
        last = index
    return last + 1


def _entries(nodes: Sequence[Node], places: Sequence[tuple[str, str] | None], list_path: str) -> list[_Stretch]:
    stretches: list[_Stretch] = []
    current: list[Node] = []
    entry = places[0][1] if places[0] else ""
    for node, place in zip(nodes, places):
        if place is not None and place[1] != entry:
            stretches.append(_Stretch(f"{list_path}.{entry}", tuple(current)))
            current, entry = [], place[1]
        current.append(node)
    stretches.append(_Stretch(f"{list_path}.{entry}", tuple(current)))
    return stretches
