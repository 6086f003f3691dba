"""Plans that experts write by hand, as restrictions of the same search space, so that the same ILP prices them.

Each is a set of filters on options; what a baseline leaves open (where exactly a gather stands) the ILP fills in, in
the baseline's favour. A demand that an operator cannot meet (nothing divides) is left out for that operator.

* ``data_parallel``: every axis cuts the batch, parameters are whole.
* ``fully_sharded``: every axis cuts the batch, parameters are stored in shards.
* ``redco``: Redco's two rules on the tensor axis (fully-connected layers alternate between a split of the output dim
  and one of the input dim; attention's q, k, v on the output dim and o on the input dim), other axes cut the batch.
* ``megatron``: the same, and the vocabulary split in the embedding of the inputs.

The tensor axis is the one named ``tp``, else the last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from passes.ir.graph import Graph, Node
from passes.ir.types import I, MeshShape, P, R, SpmdType, shard, shard_dim
from passes.repeats.repeated_blocks import BlockRun
from planner.sharding_ilp.constraints import Constraint, Filter
from planner.sharding_ilp.options import Option
from planner.sharding_ilp.sharding_prices import base_name, is_view
from planner.sharding_ilp.sharding_problem import Element, Problem

Role = Literal["column", "row", "embedding"]

#: Operators that look rows up, and the place of the indices among their inputs.
EMBEDDINGS = {"aten.embedding": 1, "meshwright.embedding": 0}
#: Matrix products of an activation with a parameter.
PRODUCTS = frozenset(f"aten.{name}" for name in ("linear", "addmm", "mm", "matmul", "bmm", "baddbmm"))


@dataclass(frozen=True)
class Baseline:
    """``tensor``: one axis follows the roles of the layers; ``shards``: parameters are stored in shards;
    ``vocabulary``: the input's embedding is cut along it; ``cut_logits``: logits stay cut up to the loss."""

    tensor: bool = False
    shards: bool = False
    vocabulary: bool = False
    cut_logits: bool = False


BASELINES: Mapping[str, Baseline] = {
    "megatron": Baseline(tensor=True, vocabulary=True),
    "data_parallel": Baseline(),
    "fully_sharded": Baseline(shards=True),
    "redco": Baseline(tensor=True),
}


def baseline_named(name: str) -> Baseline:
    """The baseline ``name``.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in BASELINES:
        raise ValueError(f"unknown baseline {name!r}: expected one of {', '.join(BASELINES)}")
    return BASELINES[name]


def roles(graph: Graph) -> dict[str, Role]:
    """What each layer with a matrix does under tensor parallelism, by node name.

    A layer whose input is whole splits its output dim (column); one whose input comes out of a column layer, through
    whatever lies between, splits its input dim (row) and gives a whole output again.
    """
    parameters = {state.value.name for state in graph.parameters}
    inputs = {value.name for value in graph.inputs}
    split: set[str] = set()
    role_of: dict[str, Role] = {}
    for node in graph.nodes:
        if is_view(node) and node.inputs and node.inputs[0] in parameters:
            parameters.update(value.name for value in node.outputs)
            continue
        role = _role(node, parameters, inputs, split)
        if role is not None:
            role_of[node.name] = role
        if role == "column" or (role is None and any(name in split for name in node.inputs)):
            split.update(value.name for value in node.outputs)
    return role_of


def _role(node: Node, parameters: Collection[str], inputs: Collection[str], split: Collection[str]) -> Role | None:
    place = EMBEDDINGS.get(base_name(node.op))
    if place is not None and node.inputs[place] in inputs:
        return "embedding"
    if base_name(node.op) not in PRODUCTS or not any(name in parameters for name in node.inputs):
        return None
    activations = [name for name in node.inputs if name not in parameters]
    return "row" if any(name in split for name in activations) else "column"


def alike(runs: Sequence[BlockRun], role_of: Mapping[str, Role]) -> tuple[BlockRun, ...]:
    """The runs in whose copies the layers have the same roles."""
    return tuple(run for run in runs if len({tuple(role_of.get(name) for name in copy) for copy in run.copies}) == 1)


def restrict(problem: Problem, baseline: Baseline, role_of: Mapping[str, Role]) -> list[Constraint]:
    """The filters of ``baseline`` on the problem, as one constraint."""
    mesh = problem.mesh
    tensor = _tensor_axis(mesh) if baseline.tensor else None
    batch = [axis for axis, size in enumerate(mesh.sizes) if size > 1 and axis != tensor]
    constraint = Constraint("baseline")
    activations = _activations(problem.graph)
    for name, element in problem.elements.items():
        if element.kind == "op" and element.node is not None and name in activations:
            for axis in batch:
                _demand(constraint, name, element, _gives(axis, shard(0)))
            if tensor is not None and mesh.sizes[tensor] > 1:
                _demand(constraint, name, element, _plays(problem, element.node, role_of.get(name), tensor, baseline))
        elif element.kind == "parameter":
            for axis in batch:
                _demand(constraint, name, element, _stored(axis, shards=baseline.shards))
    if tensor is not None and mesh.sizes[tensor] > 1:
        if baseline.cut_logits:
            _keep_logits_cut(problem, constraint, role_of, tensor)
        _store_as_used(problem, constraint, role_of, tensor, baseline)
    return [constraint]


def _activations(graph: Graph) -> set[str]:
    """Nodes that carry a gradient and depend on the inputs, not on parameters alone."""
    reached = {value.name for value in graph.inputs}
    names = set()
    for node in graph.nodes:
        if any(name in reached for name in node.inputs):
            reached.update(value.name for value in node.outputs)
            if node.output.requires_grad:
                names.add(node.name)
    return names


def _tensor_axis(mesh: MeshShape) -> int:
    return mesh.names.index("tp") if "tp" in mesh.names else len(mesh.names) - 1


def _demand(constraint: Constraint, name: str, element: Element, allowed: Filter | None) -> None:
    """Add a filter, unless no option passes it and all earlier filters."""
    if allowed is None:
        return
    filters = [*constraint.filters.get(name, []), allowed]
    if any(all(is_allowed(option) for is_allowed in filters) for option in element.options):
        constraint.add(name, allowed)


def _gives(axis: int, spmd_type: SpmdType) -> Filter:
    return lambda option: option.outputs[0][axis] == spmd_type


def _stored(axis: int, *, shards: bool) -> Filter:
    if shards:
        return lambda option: shard_dim(option.outputs[0][axis]) is not None
    return lambda option: option.outputs[0][axis] in (I, R)


def _plays(problem: Problem, node: Node, role: Role | None, axis: int, baseline: Baseline) -> Filter | None:
    """A column layer shards the last dim of its output, a row layer gives partial sums (or, if it scatters them itself,
    a part of their rows), from a sharded weight."""
    last, rows = shard(len(node.output.shape) - 1), shard(len(node.output.shape) - 2)
    types_of_role = {"column": (last,), "row": (P, rows), "embedding": (I,) if baseline.vocabulary else (I, R)}
    if role is None:
        return None
    if role == "embedding":
        weight: int | None = 1 - EMBEDDINGS[base_name(node.op)]
    else:
        matrices = [i for i, name in enumerate(node.inputs) if len(_value_shape(problem, name)) == 2]
        weight = next((i for i in matrices if _is_parameter(problem, node, i)), None)
    if weight is None:
        return None
    cut = role != "embedding" or baseline.vocabulary

    def allowed(option: Option) -> bool:
        dim = shard_dim(option.inputs[weight][axis])
        sharded = dim == 0 if role == "embedding" else dim is not None
        return sharded == cut and (option.outputs[0][axis] in types_of_role[role] or (role == "embedding" and cut))

    return allowed


def _keep_logits_cut(problem: Problem, constraint: Constraint, role_of: Mapping[str, Role], axis: int) -> None:
    """Whatever takes the output of a column layer that no row layer ends takes it cut in its last dim."""
    logits = _logits(problem.graph, role_of)
    for name, element in problem.elements.items():
        for place, value in enumerate(element.node.inputs if element.kind == "op" and element.node else ()):
            if value in logits:
                _demand(constraint, name, element, _takes(place, axis, shard(logits[value])))


def _logits(graph: Graph, role_of: Mapping[str, Role]) -> dict[str, int]:
    """Outputs of column layers that no row layer ends, and what keeps their last dim; by name that dim's place."""
    ended: set[str] = set()
    for node in reversed(graph.nodes):
        role = role_of.get(node.name)
        if role == "row" or (role is None and any(value.name in ended for value in node.outputs)):
            ended.update(node.inputs)
    sizes: dict[str, int] = {}
    for node in graph.nodes:
        role = role_of.get(node.name)
        if role == "column" and node.output.name not in ended:
            sizes[node.output.name] = node.output.shape[-1]
        elif role is None:
            taken = {sizes[name] for name in node.inputs if name in sizes}
            kept = [value for value in node.outputs if value.shape and value.shape[-1] in taken]
            sizes.update((value.name, value.shape[-1]) for value in kept)
    return {name: len(graph.values[name].shape) - 1 for name in sizes}


def _takes(place: int, axis: int, spmd_type: SpmdType) -> Filter:
    return lambda option: option.inputs[place][axis] == spmd_type


def _value_shape(problem: Problem, name: str) -> tuple[int, ...]:
    stream = problem.streams.get(name)
    return stream.value.shape if stream is not None else ()


def _is_parameter(problem: Problem, node: Node, index: int) -> bool:
    source = problem.streams[problem.elements[node.name].streams[index]].source
    return problem.elements[source].kind == "parameter" or _is_view_of_parameter(problem, source)


def _is_view_of_parameter(problem: Problem, name: str) -> bool:
    node = problem.elements[name].node
    if node is None or not is_view(node):
        return False
    source = problem.streams[problem.elements[name].streams[0]].source
    return problem.elements[source].kind == "parameter"


def _store_as_used(
    problem: Problem, constraint: Constraint, role_of: Mapping[str, Role], axis: int, baseline: Baseline
) -> None:
    """On the tensor axis, store a parameter as its first layer uses it; all other parameters are whole."""
    types_used: dict[str, set[SpmdType]] = {}
    for name in role_of:
        if name not in problem.elements or (role_of[name] == "embedding" and not baseline.vocabulary):
            continue
        for index, stream in enumerate(problem.elements[name].streams):
            source = problem.streams[stream].source
            types = {option.inputs[index][axis] for option in _allowed_options(problem, constraint, name)}
            if _is_view_of_parameter(problem, source):
                _demand(constraint, source, problem.elements[source], _gives_one_of(axis, types))
                types = {option.inputs[0][axis] for option in _allowed_options(problem, constraint, source)}
                source = problem.streams[problem.elements[source].streams[0]].source
            if problem.elements[source].kind == "parameter":
                types_used.setdefault(source, types)
    for name, element in problem.elements.items():
        if element.kind == "parameter":
            shards = {spmd_type for spmd_type in types_used.get(name, ()) if shard_dim(spmd_type) is not None}
            _demand(constraint, name, element, _gives_one_of(axis, shards or {I, R}))


def _allowed_options(problem: Problem, constraint: Constraint, name: str) -> list[Option]:
    """The options of an element that the filters so far allow."""
    filters = constraint.filters.get(name, [])
    return [option for option in problem.elements[name].options if all(allowed(option) for allowed in filters)]


def _gives_one_of(axis: int, types: Collection[SpmdType]) -> Filter:
    return lambda option: option.outputs[0][axis] in types
