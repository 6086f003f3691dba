"""Expert tensor parallelism as rules that narrow the options of the sharding search.

``planner.sharding_ilp.role_restrictions`` has Megatron's and Redco's rules. This file adds transformers' own plans (a
class attribute of its configs: styles by module), and the rule that values outside of split layers are whole without
sequence parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from passes.ir.graph import Graph
from passes.ir.types import I, R
from planner.sharding_ilp.constraints import Constraint
from planner.sharding_ilp.role_restrictions import EMBEDDINGS, PRODUCTS, Baseline, Role, restrict, roles
from planner.sharding_ilp.sharding_prices import base_name
from planner.sharding_ilp.sharding_problem import Problem
from planner.whole_step.costs.sharding import Rules
from planner.whole_step.costs.step_prices import TENSOR

#: transformers' styles of tensor parallelism that split a matrix; modules of any other style are whole.
STYLES: Mapping[str, Role] = {
    "colwise": "column",
    "colwise_rep": "column",
    "colwise_gather_output": "column",
    "packed_colwise": "column",
    "rowwise": "row",
    "rowwise_rep": "row",
    "rowwise_split_input": "row",
    "packed_rowwise": "row",
    "embedding_rowwise": "embedding",
}
#: Styles whose output is gathered at once.
GATHERED = frozenset(("colwise_rep", "colwise_gather_output"))


@dataclass(frozen=True)
class TensorRoles:
    """Roles by node name (``named_roles``), nodes whose output is gathered at once, and the kind of baseline.

    ``sequence``: whether activations between split layers may be sharded (Korthikanti et al. 2022)
    """

    named_roles: Mapping[str, Role]
    baseline: Baseline
    sequence: bool
    gathered: frozenset[str] = field(default_factory=frozenset)

    def rules(self, graph: Graph) -> Rules:
        """The roles as rules for a ``ShardingSpace`` of ``graph``."""
        split = frozenset() if self.sequence else _split(graph, self)

        def narrow(problem: Problem) -> list[Constraint]:
            constraints = restrict(problem, self.baseline, self.named_roles)
            return (
                constraints if self.sequence else [*constraints, _whole_outside(problem, {*split, *self.named_roles})]
            )

        return narrow


def megatron_roles(graph: Graph) -> TensorRoles:
    """Column and row layers in turn, vocabulary split up to the loss, sequence parallelism (Shoeybi et al. 2019)."""
    return TensorRoles(roles(graph), Baseline(tensor=True, vocabulary=True, cut_logits=True), sequence=True)


def redco_roles(graph: Graph) -> TensorRoles:
    """Redco's two rules (Tan et al. 2023): column and row in turn, embeddings whole."""
    return TensorRoles(roles(graph), Baseline(tensor=True), sequence=False)


def transformers_roles(graph: Graph, config: Any) -> TensorRoles | None:
    """The roles of the layers of ``graph`` by ``base_model_tp_plan`` of a transformers config; None without a plan."""
    styles: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    patterns = [(_pattern(module), style) for module, style in styles.items() if style in STYLES]
    role_of_node: dict[str, Role] = {}
    gathered = set()
    for node in graph.nodes:
        style = next((style for pattern, style in patterns if pattern.fullmatch(node.module_path or "")), None)
        if style is None or base_name(node.op) not in {*PRODUCTS, *EMBEDDINGS}:
            continue
        role_of_node[node.name] = STYLES[style]
        if style in GATHERED:
            gathered.add(node.name)
    if not role_of_node:
        return None
    vocabulary = "embedding" in role_of_node.values()
    return TensorRoles(
        role_of_node, Baseline(tensor=True, vocabulary=vocabulary), sequence=False, gathered=frozenset(gathered)
    )


def whole_head_roles(graph: Graph, config: Any) -> TensorRoles | None:
    """transformers' roles of linear layers whose output stays cut; the head and embeddings are whole."""
    roles_of_plan = transformers_roles(graph, config)
    if roles_of_plan is None:
        return None
    split = {
        name: role
        for name, role in roles_of_plan.named_roles.items()
        if role != "embedding" and name not in roles_of_plan.gathered
    }
    return TensorRoles(split, Baseline(tensor=True), sequence=False)


def _pattern(module: str) -> re.Pattern[str]:
    """A path in a plan, in which ``*`` is a number, anywhere below the model."""
    return re.compile(r"(?:.*\.)?" + r"\d+".join(re.escape(part) for part in module.split("*")))


def _split(graph: Graph, tensor_roles: TensorRoles) -> frozenset[str]:
    """Nodes between a column layer and the row layer that it ends at (or the end of the graph)."""
    split: set[str] = set()
    nodes = set()
    for node in graph.nodes:
        role = tensor_roles.named_roles.get(node.name)
        if role is None and any(name in split for name in node.inputs):
            nodes.add(node.name)
        if node.name in nodes or (role == "column" and node.name not in tensor_roles.gathered):
            split.update(value.name for value in node.outputs)
    return frozenset(nodes)


def _whole_outside(problem: Problem, split: Collection[str]) -> Constraint:
    """Constrain operators outside of split layers to whole outputs on the tensor axis, where possible."""
    axis = problem.mesh.names.index(TENSOR)
    constraint = Constraint("whole outside of split layers")
    for name, element in problem.elements.items():
        if element.kind != "op" or name in split:
            continue
        if any(all(where[axis] in (I, R) for where in option.outputs) for option in element.options):
            constraint.add(name, lambda option: all(where[axis] in (I, R) for where in option.outputs))
    return constraint
