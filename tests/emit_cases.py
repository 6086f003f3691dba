"""Graphs with plans by hand, for the emitter's tests: each is a model, a mesh, and the program expected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from passes.emit import Program, emit
from passes.ir.graph import Graph
from passes.ir.types import MeshShape, Placement
from passes.pipeline_cut import step_programs
from passes.plan import Plan
from passes.plan.step_plan import GroupPlan, RankMemory, StepCosts, StepPlan
from passes.rules import rule_for
from passes.shard import shard
from tests.chain_graphs import GraphMaker, programs_of
from tests.chunk_plans import chunk_plan
from tests.hand_plan import hand_plan, mlp_graph

CUT_ROWS, CUT_COLUMNS, CONTRACT = "rows", "columns", "contract"


def cut(graph: Graph, name: str, what: str) -> str:
    """The label that cuts the rows or columns of a linear's output, its contraction, or dim 0 of anything else."""
    node = next(node for node in graph.nodes if node.name == name)
    rule = rule_for(node, graph.values)
    assert rule is not None
    dims = {
        CUT_ROWS: lambda: rule.inputs[0][0],
        CUT_COLUMNS: lambda: rule.outputs[0][1],
        CONTRACT: lambda: rule.inputs[0][1],
    }[what]()
    return f"cut {dims[0]}"


def tensor_parallel() -> Program:
    """Column then row on tp: two copies fold, the first layer's input has no gradient."""
    mesh = MeshShape(("tp",), (4,))
    graph = mlp_graph(layers=3)
    strategies: dict[str, tuple[str, ...]] = {"square": ("invariant",), "loss": ("invariant",)}
    states: dict[str, Placement] = {}
    for layer in range(3):
        strategies[f"linear_up_{layer}"] = (cut(graph, f"linear_up_{layer}", CUT_COLUMNS),)
        strategies[f"gelu_{layer}"] = (cut(graph, f"gelu_{layer}", CUT_COLUMNS),)
        strategies[f"linear_down_{layer}"] = (cut(graph, f"linear_down_{layer}", CONTRACT),)
        states |= {
            f"layers.{layer}.up.weight": ("S(0)",),
            f"layers.{layer}.up.bias": ("S(0)",),
            f"layers.{layer}.down.weight": ("S(1)",),
            f"layers.{layer}.down.bias": ("I",),
        }
    plan = hand_plan(
        graph, mesh, strategies=strategies, states=states, inputs={"x": ("R",)},
        outputs={"loss": ("I",), "out": ("I",)}, carried=((("I",),),),
    )  # fmt: skip
    return emit(shard(graph, plan))


def fully_sharded() -> Program:
    """Rows on dp, weights gathered at use (fully sharded data parallel) and a sharded output."""
    mesh = MeshShape(("dp",), (2,))
    graph = mlp_graph(layers=2, dtype="bfloat16")
    names = [node.name for node in graph.nodes if node.name not in ("loss",)]
    strategies = {name: (cut(graph, name, CUT_ROWS),) for name in names} | {"loss": (cut(graph, "loss", CUT_ROWS),)}
    states: dict[str, Placement] = {state.path: ("S(0)",) for state in graph.states}
    plan = hand_plan(
        graph, mesh, strategies=strategies, states=states, inputs={"x": ("S(0)",)},
        outputs={"loss": ("I",), "out": ("S(0)",)},
    )  # fmt: skip
    return emit(shard(graph, plan))


def between_copies() -> Program:
    """What goes from copy to copy is sharded (sequence parallel), the last copy's output is needed whole."""
    return emit(shard(*between_copies_plan()))


def between_copies_plan() -> tuple[Graph, Plan]:
    """The graph and the plan of ``between_copies``."""
    mesh = MeshShape(("dp", "tp"), (2, 2))
    graph = mlp_graph(layers=4)
    strategies: dict[str, tuple[str, ...]] = {
        "square": (cut(graph, "square", CUT_ROWS), "invariant"),
        "loss": (cut(graph, "loss", CUT_ROWS), "invariant"),
    }
    states: dict[str, Placement] = {}
    for layer in range(4):
        rows = cut(graph, f"linear_up_{layer}", CUT_ROWS)
        strategies[f"linear_up_{layer}"] = (rows, cut(graph, f"linear_up_{layer}", CUT_COLUMNS))
        strategies[f"gelu_{layer}"] = (
            cut(graph, f"gelu_{layer}", CUT_ROWS),
            cut(graph, f"gelu_{layer}", CUT_COLUMNS),
        )
        strategies[f"linear_down_{layer}"] = (
            cut(graph, f"linear_down_{layer}", CUT_ROWS),
            cut(graph, f"linear_down_{layer}", CONTRACT),
        )
        states |= {
            f"layers.{layer}.up.weight": ("I", "S(0)"),
            f"layers.{layer}.up.bias": ("I", "S(0)"),
            f"layers.{layer}.down.weight": ("S(0)", "S(1)"),
            f"layers.{layer}.down.bias": ("I", "I"),
        }
    plan = hand_plan(
        graph, mesh, strategies=strategies, states=states, inputs={"x": ("S(0)", "R")},
        outputs={"loss": ("I", "I"), "out": ("S(0)", "I")}, carried=((("S(0)", "S(1)"),),),
    )  # fmt: skip
    return graph, plan


def step_plan(graph: Graph, *, num_chunks: int = 2, num_microbatches: int = 2) -> Plan:
    """Four layers on dp=2, tp=2: column then row, cut into chunks; one layer recomputed, two under ZeRO 3."""
    mesh = MeshShape(("dp", "cp", "tp"), (2, 1, 2))
    strategies: dict[str, tuple[str, ...]] = {
        name: (cut(graph, name, CUT_ROWS), "invariant", "invariant") for name in ("square", "loss")
    }
    states: dict[str, Placement] = {}
    for layer in range(4):
        for name, what in (("linear_up", CUT_COLUMNS), ("gelu", CUT_COLUMNS), ("linear_down", CONTRACT)):
            node = f"{name}_{layer}"
            strategies[node] = (cut(graph, node, CUT_ROWS), "invariant", cut(graph, node, what))
        states |= {
            f"layers.{layer}.up.weight": ("I", "I", "S(0)"),
            f"layers.{layer}.up.bias": ("I", "I", "S(0)"),
            f"layers.{layer}.down.weight": ("I", "I", "S(1)"),
            f"layers.{layer}.down.bias": ("I", "I", "I"),
        }
    plan = hand_plan(
        graph, mesh, strategies=strategies, states=states, inputs={"x": ("S(0)", "R", "R")},
        outputs={"loss": ("I", "I", "I"), "out": ("S(0)", "I", "I")}, carried=((("S(0)", "I", "I"),),),
    )  # fmt: skip
    groups = (
        GroupPlan("layers.0.up", 0, 1, "none", 0),
        GroupPlan("layers.0 … layers.0.down", 0, 1, "none", 0),
        GroupPlan("layers.1", 0, 1, "selective", 1),
        GroupPlan("layers.2", 1, 2, "none", 3),
        GroupPlan(":aten.mul.Tensor:0", 0, 1, "none", 0),
    )
    by_chunk = {1: (groups,), 2: (groups[:3], groups[3:])}[num_chunks]
    step = StepPlan(
        axes={"pp": num_chunks, "dp": 2, "cp": 1, "tp": 2},
        global_batch=8,
        local_batch=4 // num_microbatches,
        num_microbatches=num_microbatches,
        schedule="1f1b" if num_chunks > 1 else "none",
        chunks_per_rank=1,
        chunks=tuple(chunk_plan(rank, mine) for rank, mine in enumerate(by_chunk)),
        optimizer="adamw",
        gradient_dtype="",
        compiled=False,
        costs=StepCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        memory=(RankMemory(0.0, 0.0, 0.0, 0.0, 0.0),) * num_chunks,
        memory_limit=0.0,
    )
    return dataclasses.replace(plan, step=step)


def first_chunk() -> Program:
    """The first of two chunks for one of two micro-batches: gradients stay partial on dp, units are blocks."""
    graph = mlp_graph(layers=4, batch=8)
    return emit(step_programs(graph, step_plan(graph)).stages[0].sharded)


def last_chunk() -> Program:
    """The last of two chunks: its loss is a part of the batch's, not reduced over dp."""
    graph = mlp_graph(layers=4, batch=8)
    return emit(step_programs(graph, step_plan(graph)).stages[1].sharded)


def chained() -> Program:
    """A gate with a bias, a mask and the means of its rows, as one kernel; and a softmax for a compiler."""
    maker = GraphMaker()
    hidden, mask = maker.input("hidden", (4, 6, 8), "bfloat16"), maker.input("mask", (6, 8), "bool", grad=False)
    bias = maker.weight("gate.bias", (8,), "bfloat16")
    gate = maker.call("sigmoid", maker.call("add.Tensor", hidden, bias, path="gate"), path="gate")
    gated = maker.call("mul.Tensor", gate, hidden, path="gate")
    masked = maker.call("masked_fill.Scalar", gated, mask, 0.0, name="masked", path="gate")
    means = maker.call("mean.dim", masked, [-1], path="pool")
    scores = maker.call("matmul", masked, maker.weight("scores.weight", (8, 8), "bfloat16"), path="scores")
    scaled = maker.call("mul.Tensor", scores, 0.125, path="scores")
    return programs_of(maker.graph(means, maker.call("softmax.int", scaled, -1, path="scores")))[0]


CASES: dict[str, Callable[[], Program]] = {
    "first_chunk": first_chunk,
    "last_chunk": last_chunk,
    "tensor_parallel": tensor_parallel,
    "fully_sharded": fully_sharded,
    "between_copies": between_copies,
    "chained": chained,
}
