"""Graphs with plans by hand, for the emitter's tests: each is a model, a mesh, and the program expected."""

from __future__ import annotations

from collections.abc import Callable

from passes.emit import Program, emit
from passes.ir.graph import Graph
from passes.ir.types import MeshShape, Placement
from passes.rules import rule_for
from passes.shard import shard
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
    return emit(shard(graph, plan))


CASES: dict[str, Callable[[], Program]] = {
    "tensor_parallel": tensor_parallel,
    "fully_sharded": fully_sharded,
    "between_copies": between_copies,
}
