"""What cuts of one graph share: the rows of their sharding programs, and the seconds of equal parts of operators."""

from __future__ import annotations

import itertools

from cost_models import Cluster
from planner.sharding_ilp.lattice import Lattices
from planner.sharding_ilp.sharding_program import build_ilp
from planner.whole_step.candidates.mesh_layout import MeshLayout
from planner.whole_step.costs.level_one import LevelOne, batch_prices
from planner.whole_step.costs.sharding import Cut, Shardings, ShardingSpace, Variant
from planner.whole_step.costs.unit_costs import StepUnits
from tests.exhaustive_models import of_config

CLUSTER = Cluster.uniform(8, flops=1e12, memory_bandwidth=1e11, latency=1e-6, bandwidth=1e10)


def variants(level_one: LevelOne) -> dict[Cut, Variant]:
    """Of all cuts of 8 samples on 8 devices that divide the model."""
    by_cut = {}
    for pieces, context, tensor in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2)):
        layout = MeshLayout(1, 8 // context // tensor, context, tensor)
        cut = Cut(pieces, context, tensor)
        sharded = level_one.sharded(cut, layout, level_one.links_on(layout))
        if sharded is not None:
            by_cut[cut] = sharded.variant
    return by_cut


def level_one() -> LevelOne:
    space = ShardingSpace.of(of_config("tiny-llama", num_hidden_layers=2))
    return LevelOne(CLUSTER, space, StepUnits.of(space))


def test_programs_that_share_rows_are_those_that_are_built_alone() -> None:
    together = list(variants(level_one()).values())
    for variant in together:
        ilp, alone = variant.ilp, build_ilp(variant.problem, Lattices(variant.pricing), memory_limit=None)
        lattices = {name: lattice.arcs for name, lattice in ilp.lattices.items()}
        assert ilp.program == alone.program and ilp.memory_terms == alone.memory_terms
        assert lattices == {name: lattice.arcs for name, lattice in alone.lattices.items()}
        assert ilp.x == alone.x and all(ilp.arcs(name) == alone.arcs(name) for name in lattices)
    assert len({id(variant.ilp.program.columns) for variant in together}) < len(together)


def test_operators_take_as_long_as_where_no_other_cut_was_priced() -> None:
    together = level_one()
    for cut, variant in variants(together).items():
        along = variant.along
        layout = MeshLayout(1, 8 // cut.context // cut.tensor, cut.context, cut.tensor)
        mixes = cut.pieces == layout.data
        fresh = ShardingSpace.of(together.space.graph)
        alone = Shardings(fresh, cut, batch_prices(together.links_on(layout), mixes=mixes), along=along)
        options = {name: element.options for name, element in alone.problem.elements.items()}
        assert {name: element.options for name, element in variant.problem.elements.items()} == options
