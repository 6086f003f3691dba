"""Conversions take the cheapest way over all placements, also over those that no end has."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest

from cost_models import Cluster, CostModel
from passes.ir.conversions import divides, steps_from
from passes.ir.graph import Value
from passes.ir.types import MeshShape, Placement
from planner.sharding_ilp.conversion_tree import cheapest_tree
from planner.sharding_ilp.lattice import Arc, Lattices, types_used
from planner.sharding_ilp.sharding_prices import Pricing
from tests.cells import cells
from tests.search_cases import UnitCosts


def way(value: Value, source: Placement, target: Placement, lattices: Lattices) -> list[Arc]:
    """The steps that the search takes, in order."""
    lattice = lattices.of(value, types_used(value, [source, target]))
    root, end = lattice.index[source], lattice.index[target]
    tree = cheapest_tree(lattice, root, [end], lambda arc, _: arc.forward + arc.backward)
    assert tree is not None
    arcs = []
    while end != root:
        arcs.append(tree[end][0])
        end = arcs[-1].source
    return arcs[::-1]


def cheapest(value: Value, source: Placement, target: Placement, pricing: Pricing) -> float:
    """Dijkstra's algorithm over every placement there is."""
    types = ["R", "P", *(["I"] if value.requires_grad else []), *(f"S({dim})" for dim in range(len(value.shape)))]
    best, queue, count = {source: 0.0}, [(0.0, 0, source)], itertools.count(1)
    while queue:
        seconds, _, placement = heapq.heappop(queue)
        if placement == target:
            return seconds
        if seconds > best[placement]:
            continue
        for step in steps_from(placement, pricing.mesh, [types] * len(placement)):
            total = seconds + sum(pricing.step(step, value))
            if divides(step.target, value.shape, pricing.mesh) and total < best.get(step.target, float("inf")):
                best[step.target] = total
                heapq.heappush(queue, (total, next(count), step.target))
    raise AssertionError(f"{target} cannot be reached from {source}")


def test_two_axes_that_shard_a_dim_move_to_another_in_three_all_to_alls() -> None:
    """The inner axis makes way by a third dim; before, the tensor was gathered over it (393,218 s)."""
    axes = {"x": 4, "y": 4}
    pricing = Pricing(UnitCosts(axes), MeshShape.from_dict(axes))
    value = Value("value", (64, 64, 64), "float32")
    arcs = way(value, ("S(1)", "S(1)"), ("S(0)", "S(0)"), Lattices(pricing))
    assert [arc.step.target for arc in arcs] == [("S(1)", "S(2)"), ("S(0)", "S(2)"), ("S(0)", "S(0)")]
    assert {arc.step.collectives[0] for arc in arcs} == {"all_to_all"}
    assert sum(arc.forward for arc in arcs) == 147_459


def test_ranks_with_fast_links_each_reduce_a_part_over_the_slow_ones() -> None:
    mesh = MeshShape.parse("dp=2,tp=8")
    pricing = Pricing(CostModel(Cluster.parse("dgx-h100:2"), mesh.as_dict()), mesh)
    arcs = way(Value("value", (8192, 8192), "float32"), ("P", "R"), ("R", "R"), Lattices(pricing))
    collectives = [arc.step.collectives[0] for arc in arcs]
    assert collectives == [None, "reduce_scatter", "all_to_all", "all_gather"]
    assert arcs[-1].step.is_joint  # gathered over all ranks at once
    direct = pricing.collective("all_reduce", 4 * 8192 * 8192, "dp")
    assert sum(arc.forward for arc in arcs) < 0.6 * direct


TWO_AXES = tuple(itertools.product(("x=2,y=2", "x=4,y=2"), (False, True)))


@pytest.mark.parametrize(
    ("sizes", "requires_grad"), cells([*TWO_AXES, ("x=2,y=2,z=2", False)], [("x=2,y=2,z=2", True)])
)
def test_ways_are_as_cheap_as_any(sizes: str, requires_grad: bool) -> None:
    mesh = MeshShape.parse(sizes)
    draw = random.Random(0)
    for latency, second_per_byte in ((1.0, 0.0), (1e4, 0.3), (1.0, 10.0)):
        pricing = Pricing(UnitCosts(mesh.as_dict(), latency, second_per_byte=second_per_byte), mesh)
        lattices = Lattices(pricing)
        value = Value("value", (16, 32, 8), "float32", requires_grad=requires_grad)
        types = ["R", "P", "S(0)", "S(1)", "S(2)"]
        ends = [tuple(draw.choices(types, k=len(mesh.sizes))) for _ in range(30)]
        for source, target in itertools.pairwise([end for end in ends if divides(end, value.shape, mesh)]):
            seconds = sum(arc.forward + arc.backward for arc in way(value, source, target, lattices))
            assert seconds == pytest.approx(cheapest(value, source, target, pricing), rel=1e-6)
