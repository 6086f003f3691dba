"""What the user demands of a plan, as filters on the options of elements.

``{pattern: {axis: demand}}``. A pattern is a glob (``*`` matches dots too). It stands for the first of these kinds in
which it matches anything:

* paths of parameters and buffers: the placement they are stored in;
* ``output``, ``output:<path>`` or an output path; ``input:<path>`` or an input path: its placement;
* node keys: these operators; module paths: what these modules give to others (types) or do (cuts).

A demand is a type (``"S(0)"``; ``"S"`` is any dim; ``"R"`` and ``"I"`` both mean whole for what is stored or
returned), the label of a choice (``"cut n"``, or just ``"n"``), or a list of alternatives.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from passes.ir.graph import Graph
from passes.ir.types import I, MeshShape, Placement, R, parse_type, shard_dim
from passes.plan import NodePlan, Plan
from passes.repeats.repeated_blocks import BlockRun, grouped
from passes.rules.view_rules import is_reshape
from planner.sharding_ilp.options import Option
from planner.sharding_ilp.pins import check_pins
from planner.sharding_ilp.sharding_problem import Element, Problem

#: Says whether an option of an element is allowed.
Filter = Callable[[Option], bool]
Demands = Mapping[str, Mapping[str, Any]]


@dataclass
class Constraint:
    """One demand that can be kept or dropped as a whole: its text, and filters by element name."""

    text: str
    filters: dict[str, list[Filter]] = field(default_factory=dict)

    def add(self, element: str, allowed: Filter) -> None:
        self.filters.setdefault(element, []).append(allowed)


@dataclass(frozen=True)
class Matched:
    """What a pattern stands for, by name in the graph (unfolded)."""

    states: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    by_module: bool = False


def match(graph: Graph, pattern: str) -> Matched:
    """What ``pattern`` stands for.

    Raises:
        ValueError: if it matches nothing; the message names what comes close.
    """
    states = {name: state.value.name for state in graph.states for name in (state.path, *state.aliases)}
    inputs = {".".join(map(str, path)): value.name for path, value in zip(graph.input_paths, graph.inputs)}
    inputs.update({f"input:{path}": name for path, name in inputs.items()})
    outputs = {f"output:{path}": path for path in graph.outputs}
    outputs.update({path: path for path in graph.outputs if path and path not in inputs})
    nodes = [node for node in graph.nodes if not node.constant]
    if names_matched := _select(states, pattern):
        return Matched(states=names_matched)
    if pattern in ("output", "outputs") and pattern not in outputs:
        return Matched(outputs=tuple(graph.outputs))
    if names_matched := _select(outputs, pattern):
        return Matched(outputs=names_matched)
    if names_matched := _select(inputs, pattern):
        return Matched(inputs=names_matched)
    if keyed := tuple(node.name for node in nodes if fnmatch.fnmatchcase(node.key, pattern) and ":" in pattern):
        return Matched(nodes=keyed)
    if inside := tuple(node.name for node in nodes if node.module_path and _in_module(node.module_path, pattern)):
        return Matched(nodes=inside, by_module=True)
    names = [*states, *inputs, *outputs, *{node.module_path for node in nodes}, *(node.key for node in nodes)]
    near = difflib.get_close_matches(pattern, [name for name in names if name], n=3, cutoff=0.4)
    hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
    raise ValueError(f"constraint {pattern!r} matches no parameter, input, output, module or operator{hint}")


def dividing(graph: Graph, demands: Demands, mesh: MeshShape) -> Demands:
    """``demands`` but for those on inputs of ``graph`` that lack the dim, or that it would cut into unequal parts."""
    shapes = {value.name: value.shape for value in graph.inputs}
    keys = {value.name: ".".join(map(str, path)) for path, value in zip(graph.input_paths, graph.inputs)}
    kept: dict[str, dict[str, Any]] = {}
    for pattern, by_axis in demands.items():
        inputs = match(graph, pattern).inputs
        for axis, demand in by_axis.items():
            sizes = {name: _sizes_cut(demand, shapes[name]) for name in inputs}
            if any(some and all(size % mesh.size(axis) for size in some) for some in sizes.values()):
                continue
            lacking = [name for name in inputs if sizes[name] == []]
            others = [f"input:{keys[name]}" for name in inputs if name not in lacking]
            for one in others if lacking else [pattern]:
                kept.setdefault(one, {})[axis] = demand
    return kept


def _sizes_cut(demand: Any, shape: tuple[int, ...]) -> list[int] | None:
    """Sizes of the dims that a demand's alternatives cut, of those that there are; None if one of them cuts nothing."""
    texts = [demand] if isinstance(demand, str) else list(demand)
    dims = [shard_dim(parse_type(text)) if re.fullmatch(r"S\(\d+\)", text) else None for text in texts]
    if any(dim is None for dim in dims):
        return None
    return [shape[dim] for dim in dims if dim is not None and dim < len(shape)]


def _select(names: Mapping[str, str], pattern: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(target for name, target in names.items() if fnmatch.fnmatchcase(name, pattern)))


def _in_module(path: str, pattern: str) -> bool:
    """Whether a module or one that it is part of matches."""
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


def foldable_runs(graph: Graph, runs: Sequence[BlockRun], patterns: Collection[str]) -> tuple[BlockRun, ...]:
    """The runs whose copies all have the same constraints; copies of other runs are planned one by one."""
    matched = [match(graph, pattern) for pattern in patterns]
    foldable = []
    for run in runs:
        signatures = set()
        for copy in range(run.num_copies):
            names = [*run.copies[copy], *(names[copy] for names in run.states)]
            signatures.add(tuple(tuple(n in (*m.nodes, *m.states) for n in names) for m in matched))
        if len(signatures) == 1:
            foldable.append(run)
    return tuple(foldable)


def folded_as(runs: tuple[BlockRun, ...], graph: Graph, plan: Plan) -> tuple[BlockRun, ...]:
    """``runs`` folded to the shortest group of copies that ``plan`` repeats; runs without such a group are dropped."""
    keys = {node.name: node.key for node in graph.nodes}
    paths = {state.value.name: state.path for state in graph.states}
    strategies = planned_strategies(plan)

    def placed(run: BlockRun, copy: int) -> tuple[object, ...]:
        states = (plan.states.get(paths[names[copy]]) for names in run.states)
        return (*(s and s.placement for s in states), *(strategies.get(keys[name]) for name in run.copies[copy]))

    groups = []
    for run in runs:
        copies = [placed(run, copy) for copy in range(run.num_copies)]
        periods = range(1, run.num_copies // 2 + 1)
        alike = (k for k in periods if all(copies[i] == copies[i % k] for i in range(run.num_copies // k * k)))
        period = next(alike, None)
        group = grouped(run, period) if period is not None else None
        if group is not None:
            groups.append(group)
    return tuple(groups)


def user_constraints(problem: Problem, mesh: MeshShape, demands: Demands) -> list[Constraint]:
    """One constraint for each pattern and axis.

    Raises:
        ValueError: if a pattern matches nothing, an axis is unknown, or a demand cannot be read.
    """
    check_pins(demands, mesh.names, what=f"mesh {mesh}")
    constraints = []
    for pattern, by_axis in demands.items():
        matched = match(problem.graph, pattern)
        for axis, demand in by_axis.items():
            if mesh.size(axis) > 1:
                constraints.append(_constraint(problem, pattern, matched, axis, mesh.names.index(axis), demand))
    return constraints


def _constraint(problem: Problem, pattern: str, matched: Matched, name: str, axis: int, demand: Any) -> Constraint:
    alternatives = [demand] if isinstance(demand, str) else list(demand)
    constraint = Constraint(f"{{{pattern!r}: {{{name!r}: {demand!r}}}}}")
    for source in (*matched.states, *matched.inputs):
        if source in problem.elements:
            constraint.add(source, lambda option: _fits_type(option.outputs[0], axis, alternatives))
    for path in matched.outputs:
        constraint.add(f"output:{path}", lambda option: _fits_type(option.inputs[0], axis, alternatives))
    labels = {f"cut {item}" for item in alternatives} | set(alternatives)
    nodes = [problem.elements[node] for node in matched.nodes if node in problem.elements]
    names = [node for node in matched.nodes if node in problem.elements]
    labelled = {n for n, e in zip(names, nodes) if any(option.labels[axis] in labels for option in e.options)}
    if labelled:
        for node in labelled:
            constraint.add(node, lambda option: option.labels[axis] in labels)
    else:
        for node in _givers(problem, names) if matched.by_module else names:
            constraint.add(node, lambda option: any(_is_type(where[axis], alternatives) for where in option.outputs))
    _check_known(constraint, problem, pattern, name)
    return constraint


def _check_known(constraint: Constraint, problem: Problem, pattern: str, axis: str) -> None:
    """A demand that no option of an element can ever meet is an error of the demand, not a conflict."""
    for name, filters in constraint.filters.items():
        options = problem.elements[name].options
        if options and not any(all(allowed(option) for allowed in filters) for option in options):
            key, can_be = problem.elements[name].key, axis_types(problem, name, axis)
            raise ValueError(
                f"constraint {constraint.text} cannot be met by {key!r}: on axis {axis!r} it can be {can_be}"
            )


def axis_types(problem: Problem, name: str, axis: str) -> str:
    """The labels and types that an element can have on an axis, for messages."""
    element = problem.elements[name]
    position = problem.mesh.names.index(axis)
    places = {where[position] for option in element.options for where in (option.outputs or option.inputs)}
    labels = {option.labels[position] for option in element.options} if element.kind == "op" else set()
    return ", ".join([*sorted(labels), *sorted(places)])


def _givers(problem: Problem, names: Sequence[str]) -> list[str]:
    """Of the operators ``names``, those whose values others use."""
    inside = set(names)
    givers = []
    for name in names:
        streams = [stream for stream in problem.streams.values() if stream.source == name]
        if any(use.element not in inside for stream in streams for use in stream.uses):
            givers.append(name)
    return givers or list(names)


def _is_type(spmd_type: str, alternatives: Iterable[str]) -> bool:
    sharded = shard_dim(spmd_type) is not None
    return any(spmd_type == item.replace(" ", "") or (item == "S" and sharded) for item in alternatives)


def _fits_type(where: Placement, axis: int, alternatives: Sequence[str]) -> bool:
    whole = where[axis] in (R, I) and any(item in (R, I) for item in alternatives)
    return whole or _is_type(where[axis], alternatives)


def cut_every_matmul(problem: Problem, mesh: MeshShape) -> Constraint:
    """No matmul is computed twice: each is cut by every axis."""
    constraint = Constraint("forbid_replicated_matmul")
    for name, element in problem.elements.items():
        if element.kind == "op" and element.matmul:
            constraint.add(name, lambda option: all(option.cut_axes))
    return constraint


def keep_plan(problem: Problem, plan: Plan) -> Constraint:
    """Keep the plan's placements of parameters and buffers, and its strategies for operators that still offer them.

    Of others as much as they offer, axis by axis: a sequence that ``tp`` does not divide is still cut by samples.
    """
    constraint = Constraint("pinned plan")
    nodes = planned_nodes(plan)
    for name, element in problem.elements.items():
        planned = _planned_choice(element, plan, nodes)
        if planned is None:
            continue
        options = element.options
        is_offered = any(_choice(option, element) == planned for option in options)
        if not is_offered and element.kind in ("parameter", "buffer"):
            raise ValueError(f"pinned plan: {element.kind} {element.key.removeprefix('state:')!r} cannot be {planned}")
        for axis, wanted in enumerate(planned):
            cut = _reshaped_cut(element, nodes, axis)
            options = [
                option
                for option in options
                if (
                    _choice(option, element)[axis] == wanted
                    if cut is None
                    else shard_dim(option.outputs[0][axis]) == cut
                )
            ] or options
        pinned = frozenset(_choice(option, element) for option in options)
        constraint.add(name, lambda option, e=element, p=pinned: _choice(option, e) in p)  # type: ignore[misc]
    return constraint


def _reshaped_cut(element: Element, nodes: Mapping[str, NodePlan], axis: int) -> int | None:
    """Of a reshape, the dim of its output that ``axis`` cuts in the plan; None of others, and where it cuts none.

    Its factors are numbered past dims of size 1: what is the second factor of one token is another of many.
    """
    if element.node is None or not is_reshape(element.node.op):
        return None
    outputs = nodes[element.key].outputs
    return shard_dim(outputs[0][axis]) if outputs else None


def planned_nodes(plan: Plan) -> dict[str, NodePlan]:
    """Plans of operators by node key, for every copy of the blocks (a later graph may fold others)."""
    nodes = dict(plan.nodes)
    for block in plan.blocks:
        for roots in block.roots[1:]:
            for first, other in zip(block.roots[0], roots):
                inside = {key: node for key, node in nodes.items() if key.startswith((f"{first}.", f"{first}:"))}
                nodes.update((other + key[len(first) :], node) for key, node in inside.items())
    return nodes


def planned_strategies(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Strategies by node key, for every copy of the blocks."""
    return {key: node.strategy for key, node in planned_nodes(plan).items()}


def _planned_choice(element: Element, plan: Plan, nodes: Mapping[str, NodePlan]) -> tuple[str, ...] | None:
    path = element.key.partition(":")[2]
    if element.kind == "op":
        return nodes[element.key].strategy if element.key in nodes else None
    tensors = {"parameter": plan.states, "buffer": plan.states, "input": plan.inputs}.get(element.kind, {})
    return tensors[path].placement if path in tensors else None


def _choice(option: Option, element: Element) -> tuple[str, ...]:
    """What a plan says of an option: strategies of an operator, or the placement of a tensor."""
    return option.labels if element.kind == "op" else option.outputs[0]


def apply_constraints(problem: Problem, constraints: Iterable[Constraint]) -> dict[str, list[Option]]:
    """The options of every element that satisfy ``constraints``; the problem itself is unchanged."""
    options = {name: list(element.options) for name, element in problem.elements.items()}
    for constraint in constraints:
        for name, filters in constraint.filters.items():
            options[name] = [option for option in options[name] if all(allowed(option) for allowed in filters)]
    return options
