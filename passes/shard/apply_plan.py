"""Apply a plan to a graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from passes.ir.graph import Graph
from passes.ir.types import Placement, R
from passes.plan import Plan
from passes.rules.rule import REPLICATE, AxisChoice
from passes.shard.context import Context, PlanMismatch, RuleFor, Tree
from passes.shard.deferred import DeferredTree
from passes.shard.loop import Loop
from passes.shard.section import Body
from passes.shard.sharded_graph import Compute, Convert, Local, Repeat, Section, ShardedGraph, StateRef


def shard(
    graph: Graph, plan: Plan, *, rule_for: RuleFor | None = None, deferred: Mapping[str, Collection[str]] | None = None
) -> ShardedGraph:
    """Apply ``plan`` to ``graph``, which may have other shapes than the one that it was made for.

    Args:
        deferred: by path of a parameter, the axes on which its gradient is left partial (it is R there, whatever the
            plan says), to be reduced by whoever runs the program.

    Raises:
        PlanMismatch: if the plan lacks a node of this graph (search again with ``pinned=plan``).
        ValueError: if the plan was made for another model, or an input cannot be divided as it says.
    """

    def wrap(tree: Tree, value: str, path: str) -> Tree:
        places = frozenset(plan.mesh.names.index(axis) for axis in (deferred or {}).get(path, ()))
        return DeferredTree(tree, places, plan.mesh, value) if places else tree

    context = Context(graph, plan, rule_for or _known_rules(), wrap=wrap)
    folded = {name for run, _ in context.runs for copy in run.copies for name in copy}
    own = [node for node in graph.nodes if not node.constant and node.name not in folded]
    main = _Main(context, own).section()
    return ShardedGraph(
        graph=graph,
        plan=plan,
        constants=_constants(context),
        main=main,
        input_placements={value.name: context.trees[value.name].root for value in graph.inputs},
        state_placements={state.value.name: context.trees[state.value.name].root for state in graph.states},
        output_placements={path: local.placement for path, local in zip(graph.outputs, main.results)},
        runs=tuple(run for run, _ in context.runs),
    )


def _known_rules() -> RuleFor:
    from passes.rules import rule_for

    return rule_for


def _constants(context: Context) -> Section:
    """Constant operators; their results are the constants that something else uses."""
    graph = context.graph
    body: list[Compute | Convert | Repeat] = []
    used = {name for node in graph.nodes if not node.constant for name in node.inputs} | set(graph.outputs.values())
    results: list[Local] = []
    for node in graph.nodes:
        if not node.constant:
            continue
        inputs = tuple(_whole(context, name) for name in node.inputs)
        outputs = tuple(Local(value, context.whole, value.shape) for value in node.outputs)
        choice = AxisChoice(REPLICATE, (R,) * len(inputs), (R,) * len(outputs))
        body.append(Compute(node, inputs, outputs, (choice,) * len(context.mesh.names), None))
        results.extend(output for output in outputs if output.value.name in used)
    return Section((), tuple(body), tuple(results))


def _whole(context: Context, name: str) -> Local:
    state = context.states.get(name)
    ref = StateRef(None, state.path) if state is not None else None
    return Local(context.values[name], context.whole, context.values[name].shape, ref)


class _Main(Body):
    """The section around everything: computes inputs to outputs, with loops for the repeated blocks."""

    def origin(self, name: str, placement: Placement) -> Local | None:
        context = self.context
        state = context.states.get(name)
        if state is not None:
            return context.local(state.value, self.tree(name).root, StateRef(None, state.path))
        if self.there.get(name):
            return None
        return context.local(context.values[name], self.tree(name).root)

    def section(self) -> Section:
        context = self.context
        arguments = tuple(context.local(value, self.tree(value.name).root) for value in context.graph.inputs)
        first = {run.copies[0][0]: index for index, (run, _) in enumerate(context.runs)}
        own = {node.name for node in self.makers.values()}
        for node in context.graph.nodes:
            if node.name in first:
                self._repeat(first[node.name])
            elif node.name in own:
                self.compute(node)
        results = []
        for path, name in context.graph.outputs.items():
            planned = context.plan.outputs.get(path)
            if planned is None:
                raise PlanMismatch(f"the plan has no output {path!r}")
            results.append(self.get(name, planned.placement))
        return Section(arguments, tuple(self.body), tuple(results))

    def _repeat(self, index: int) -> None:
        run, carry = self.context.runs[index]
        loop = Loop(self, index, run, carry)
        self.body.append(loop.build())
        self.there.update(loop.exits())
