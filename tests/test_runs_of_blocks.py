"""Runs of repeated blocks one behind the other: each hands on what it makes in the placement that the next takes."""

from __future__ import annotations

from passes.emit import emit
from passes.ir.graph import Graph
from passes.ir.types import MeshShape, Placement
from passes.shard import Repeat, shard
from runtime.program_tools.typecheck import typecheck
from tests.chain_graphs import GraphMaker
from tests.emit_cases import CONTRACT, CUT_COLUMNS, cut
from tests.hand_plan import hand_plan

COPIES = 3


def two_kinds() -> Graph:
    """Column-row layers with gelu, then others with relu."""
    maker = GraphMaker()
    current = maker.input("x", (4, 8), grad=False)
    for kind in ("gelu", "relu"):
        for copy in range(COPIES):
            root = f"{kind}s.{copy}"
            up = maker.weight(f"{root}.up.weight", (16, 8))
            down = maker.weight(f"{root}.down.weight", (8, 16))
            current = maker.call("linear", current, up, name=f"{kind}_up_{copy}", path=f"{root}.up")
            current = maker.call(kind, current, name=f"{kind}_{copy}", path=root)
            current = maker.call("linear", current, down, name=f"{kind}_down_{copy}", path=f"{root}.down")
    return maker.graph(maker.call("mul.Tensor", current, current, name="square"))


def test_the_entry_of_a_run_may_differ_from_what_its_operators_and_the_run_before_carry() -> None:
    """The first run carries whole values, the second partial sums, which its own operators take whole."""
    graph = two_kinds()
    strategies: dict[str, tuple[str, ...]] = {"square": ("invariant",)}
    states: dict[str, Placement] = {}
    for kind in ("gelu", "relu"):
        for copy in range(COPIES):
            strategies[f"{kind}_up_{copy}"] = (cut(graph, f"{kind}_up_{copy}", CUT_COLUMNS),)
            strategies[f"{kind}_{copy}"] = (cut(graph, f"{kind}_{copy}", CUT_COLUMNS),)
            strategies[f"{kind}_down_{copy}"] = (cut(graph, f"{kind}_down_{copy}", CONTRACT),)
            states |= {f"{kind}s.{copy}.up.weight": ("S(0)",), f"{kind}s.{copy}.down.weight": ("S(1)",)}
    plan = hand_plan(
        graph, MeshShape(("tp",), (2,)), strategies=strategies, states=states, inputs={"x": ("R",)},
        outputs={"square": ("I",)}, carried=((("I",),), (("P",),)),
    )  # fmt: skip
    sharded = shard(graph, plan)
    first, second = (operation for operation in sharded.main.body if isinstance(operation, Repeat))
    assert [local.placement for local in first.block.section.arguments] == [("I",)]
    assert [local.placement for local in second.entries] == [("P",)]
    typecheck(emit(sharded))
