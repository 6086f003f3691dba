"""Tables of conversion steps: they price as single steps do, and their cheapest ways are those of all ways."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from passes.ir.graph import Value
from passes.ir.types import MeshShape, P, R
from planner.sharding_ilp.lattice import LatticePool, Lattices, distances
from planner.sharding_ilp.options import placements_of
from planner.sharding_ilp.sharding_prices import Pricing
from planner.sharding_ilp.step_tables import step_table
from planner.whole_step.costs.operator_facts import Fusion
from planner.whole_step.costs.step_prices import StepPricing
from tests.search_cases import UnitCosts
from tests.test_joint_axes import JointCosts

AXES = {"dp": 2, "ep": 3, "tp": 4}
MESH = MeshShape.from_dict(AXES)
DIVIDED = MeshShape.from_dict(dict.fromkeys(AXES, 2))
#: Its last dim is cut unevenly.
SHAPE = (48, 48, 50)
TYPES = ("I", "P", "R", "S(0)", "S(2)")


def step_pricing(family: str = "") -> StepPricing:
    prices: Any = UnitCosts(AXES)
    members = {name: frozenset({"value"} if name == family else ()) for name in ("states", "unconverted", "unpriced")}
    return StepPricing(
        prices,
        MESH,
        states=members["states"],
        fusion=Fusion(),
        unconverted=members["unconverted"],
        unpriced=members["unpriced"],
    )


PRICINGS = {
    "plain": Pricing(UnitCosts(AXES), MESH),
    "joint": Pricing(JointCosts(AXES), MESH),
    "bundle": Pricing(UnitCosts(AXES), MESH, bundles={"value": 2**20}),
    "activation": step_pricing(),
    "state": step_pricing("states"),
    "unconverted": step_pricing("unconverted"),
    "unpriced": step_pricing("unpriced"),
}


@pytest.mark.parametrize("name", PRICINGS)
@pytest.mark.parametrize("grad", [True, False])
def test_a_table_prices_as_single_steps_do(name: str, grad: bool) -> None:
    pricing, value = PRICINGS[name], Value("value", SHAPE, "float32", requires_grad=grad)
    table = step_table(tuple(itertools.product(TYPES, repeat=len(AXES))), DIVIDED, joint=name == "joint")
    assert len(table.steps) > 300 and bool(table.joint) == (name == "joint")
    assert list(zip(*pricing.steps(table, value))) == [pricing.step(step, value) for step in table.steps]


def test_the_cheapest_ways_from_some_placements_are_those_of_all_ways() -> None:
    value, pricing = Value("value", SHAPE, "float32", requires_grad=True), Pricing(UnitCosts({"x": 4, "y": 2}), MESH)
    pricing.mesh = MeshShape.from_dict({"x": 4, "y": 2})
    placements = tuple(placements_of(value, [TYPES, TYPES], pricing.mesh))
    arcs = Lattices(pricing)._arcs(value, placements, live=True)
    starts = [placements.index((R, R)), placements.index(("S(0)", P))]
    seconds, _ = distances(len(placements), arcs)
    assert np.isfinite(seconds).sum() > len(placements)
    np.testing.assert_allclose(arcs.least(starts), seconds[starts], rtol=1e-8)


def test_lattices_of_parameters_serve_every_size_of_the_data_axis() -> None:
    prices: Any = UnitCosts(AXES)
    shared: dict[tuple[object, ...], Any] = {}
    pricings = [
        StepPricing(
            prices,
            MeshShape.from_dict({**AXES, "dp": size}),
            states=frozenset({"w"}),
            fusion=Fusion(),
            of_states=shared,
        )
        for size in (2, 16)
    ]
    weight, row = (
        Value("w", (48, 48), "float32", requires_grad=True),
        Value("x", (48, 48), "float32", requires_grad=True),
    )
    types = (("R",), ("R",), ("I", "R", "S(0)"))
    first, second = (Lattices(pricing) for pricing in pricings)
    assert first.of(weight, types, settled=(0,)) is second.of(weight, types, settled=(0,))
    assert first.of(row, types, settled=(0,)) is not second.of(row, types, settled=(0,))
    cut = (("S(1)",), *types[1:])  # its parts on the data axis are of other sizes
    assert first.of(weight, cut, settled=(0,)) is not second.of(weight, cut, settled=(0,))


def test_values_whose_parts_cost_the_same_have_one_lattice_in_a_pool() -> None:
    pool, types = LatticePool(), (("R",), ("R",), ("I", "R", "S(0)", "P"))
    large, small = (Value("value", (rows, 48), "float32", requires_grad=True) for rows in (96, 48))
    cut = (("S(0)",), *types[1:])
    on_two, on_four = (Pricing(UnitCosts(AXES), MeshShape.from_dict({**AXES, "dp": size})) for size in (2, 4))
    first, second = Lattices(on_two, pool=pool), Lattices(on_four, pool=pool)
    again = Value("value", (192, 48), "float32", requires_grad=True)  # as many rows a rank on four as ``large`` on two
    assert first.of(large, cut, settled=(0,)) is second.of(again, cut, settled=(0,))
    assert first.of(large, cut, settled=(0,)) is not first.of(small, cut, settled=(0,))
    assert first.of(large, cut, settled=(0,)) == Lattices(on_two).of(large, cut, settled=(0,))
    saved = first.of(large, cut, settled=(0,), saved=True)  # its copies have bytes
    assert saved is not first.of(large, cut, settled=(0,)) and saved.keeps_copies
