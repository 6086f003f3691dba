"""Small graphs of elementwise operators written by hand, and the program of one with or without chains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import runtime.kernels  # noqa: F401
from passes.chains import OperatorChain, chain_up
from passes.emit import Program, emit
from passes.emit.emitted_program import ENTRY_POINT
from passes.ir.fingerprint import fingerprint
from passes.ir.graph import Graph, Node, Ref, State, Value, assign_keys, map_refs
from passes.ir.types import MeshShape
from passes.plan import Certificate, Costs, NodePlan, Plan, TensorPlan
from passes.plan.plan_data import FusionPlan
from passes.shard import Repeat, Section, ShardedGraph, shard
from planner.sharding_ilp.step_on_mesh import step_on_mesh
from runtime.state.weight_tree import WeightTree

MESH = MeshShape(("dp",), (1,))
NO_COSTS = Costs(0.0, 0.0, 0.0, 0.0, {})
FUSION = FusionPlan((), (), (0, 0), (0, 0))


class GraphMaker:
    """Writes a graph operator by operator; shapes and dtypes are torch's."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.states: list[State] = []
        self.nodes: list[Node] = []
        self.values: dict[str, Value] = {}

    def input(self, name: str, shape: Sequence[int], dtype: str = "float64", *, grad: bool | None = None) -> Ref:
        floating = dtype.startswith(("float", "bfloat"))
        value = Value(name, tuple(shape), dtype, "input", floating if grad is None else grad)
        self.inputs.append(value)
        self.values[name] = value
        return Ref(name)

    def weight(self, path: str, shape: Sequence[int], dtype: str = "float64") -> Ref:
        value = Value(path.replace(".", "_"), tuple(shape), dtype, "parameter", True)
        self.states.append(State(value, path))
        self.values[value.name] = value
        return Ref(value.name)

    def call(self, op: str, *args: Any, path: str = "", name: str = "", **kwargs: Any) -> Ref:
        """``op`` is ``"mul.Tensor"`` and the like."""
        packet, _, overload = op.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        argument = map_refs((args, kwargs), lambda ref: self._meta(self.values[ref.name]))
        argument = map_refs_of_dtypes(argument)
        result = operator(*argument[0], **argument[1])
        grad = result.is_floating_point() and any(self.values[ref.name].requires_grad for ref in _refs((args, kwargs)))
        name = name or f"{packet}_{len(self.nodes)}"
        value = Value(name, tuple(result.shape), str(result.dtype).removeprefix("torch."), "node", grad)
        self.values[name] = value
        self.nodes.append(Node(name, f"aten.{packet}.{overload or 'default'}", args, kwargs, (value,), path))
        return Ref(name)

    def _meta(self, value: Value) -> torch.Tensor:
        return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")

    def graph(self, *outputs: Ref) -> Graph:
        return Graph(
            "Chained",
            tuple(self.inputs),
            tuple((value.name,) for value in self.inputs),
            tuple(self.states),
            assign_keys(tuple(self.nodes)),
            {ref.name: ref.name for ref in outputs},
        )


def map_refs_of_dtypes(argument: Any) -> Any:
    """Dtypes as the graph writes them are torch's."""
    if isinstance(argument, str) and argument.startswith("dtype:"):
        return getattr(torch, argument.removeprefix("dtype:"))
    if isinstance(argument, (list, tuple)):
        return type(argument)(map_refs_of_dtypes(item) for item in argument)
    if isinstance(argument, dict):
        return {name: map_refs_of_dtypes(item) for name, item in argument.items()}
    return argument


def _refs(argument: Any) -> list[Ref]:
    drawn_inputs: list[Ref] = []
    map_refs(argument, drawn_inputs.append)
    return drawn_inputs


def sharded_of(graph: Graph) -> ShardedGraph:
    """The graph whole on one device, by a plan that fuses: on an axis of size 1 nothing is ever converted."""
    values, whole = graph.values, ("I",)
    nodes = {
        node.key: NodePlan(node.op, ("invariant" if node.output.requires_grad else "replicate",), (whole,))
        for node in graph.nodes
    }
    outputs = {path: TensorPlan(values[name].shape, values[name].dtype, whole) for path, name in graph.outputs.items()}
    plan = Plan(
        model=graph.model_name,
        fingerprint=fingerprint(graph),
        mesh=MESH,
        cluster={},
        training=True,
        inputs={value.name: TensorPlan(value.shape, value.dtype, whole) for value in graph.inputs},
        states={
            state.path: TensorPlan(state.value.shape, state.value.dtype, whole, state.value.requires_grad)
            for state in graph.states
        },
        outputs=outputs,
        nodes=nodes,
        conversions=(),
        blocks=(),
        collectives=(),
        costs=NO_COSTS,
        certificate=Certificate(0.0, 0.0, 0.0, "by hand", "none", 0, 0),
        step=step_on_mesh(graph, mesh=MESH, inputs={}, costs=NO_COSTS, cluster={}, memory_limit=None),
        fusion=FUSION,
    )
    return shard(graph, plan)


def chains_of(sharded: ShardedGraph) -> list[OperatorChain]:
    """The chains of all sections, outer ones first."""

    def of(section: Section) -> list[OperatorChain]:
        chains = [operation for operation in section.body if isinstance(operation, OperatorChain)]
        for operation in section.body:
            if isinstance(operation, Repeat):
                chains += of(operation.block.section)
        return chains

    return of(chain_up(sharded).main)


def programs_of(graph: Graph) -> tuple[Program, Program]:
    """With chains, and without."""
    sharded = sharded_of(graph)
    return emit(chain_up(sharded)), emit(sharded)


def ops_of(chain: OperatorChain) -> list[str]:
    return [member.compute.node.op.split(".")[1] for member in chain.members]


def run(
    program: Program, tensors: Mapping[str, torch.Tensor], *, around: Callable[..., Callable[..., Any]] | None = None
) -> list[torch.Tensor]:
    """Outputs, and gradients of all that have one, for fixed random gradients of the outputs; ``around`` wraps it."""
    leaves = {name: tensor.detach().clone(memory_format=torch.preserve_format) for name, tensor in tensors.items()}
    weights = WeightTree()
    for state in program.states:
        weights.put(state.path, leaves[state.path])
    trained = []
    for spec in (*program.inputs, *program.states):
        name = spec.name if hasattr(spec, "name") else spec.path
        if getattr(spec, "requires_grad", getattr(spec, "trainable", False)):
            trained.append(leaves[name].requires_grad_())
    entry = program.load()[ENTRY_POINT](weights)
    outputs = (around(entry) if around else entry)(*(leaves[spec.name] for spec in program.inputs))
    results = list(outputs.values())
    ends = [result for result in results if result.requires_grad]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(end.shape, generator=generator, dtype=torch.float64).to(end.dtype) for end in ends]
    drawn_inputs = torch.autograd.grad(ends, trained, grads, allow_unused=True) if ends and trained else ()
    zeros = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(trained, drawn_inputs)]
    return [*results, *zeros]


def random_tensors(graph: Graph, seed: int = 0) -> dict[str, torch.Tensor]:
    """A tensor for every input and state: normally distributed, truth values, or small whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    drawn_inputs = {}
    for name, value in [
        *((value.name, value) for value in graph.inputs),
        *((state.path, state.value) for state in graph.states),
    ]:
        drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        kind = getattr(torch, value.dtype)
        drawn_inputs[name] = (
            drawn > 0 if kind is torch.bool else (drawn if kind.is_floating_point else drawn * 3).to(kind)
        )
    return drawn_inputs
