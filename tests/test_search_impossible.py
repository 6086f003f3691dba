"""What cannot be done is left out of the sharding programs: no sentinel number of seconds stands in an objective."""

from __future__ import annotations

import math

from cost_models import Cluster
from planner.whole_step.candidates.mesh_layout import Links, MeshLayout
from planner.whole_step.costs.level_one import LevelOne, batch_prices
from planner.whole_step.costs.sharding import Cut, Shardings, ShardingSpace, Variant
from planner.whole_step.costs.step_prices import SCALAR_BYTES
from planner.whole_step.costs.unit_costs import StepUnits
from tests.exhaustive_models import of_config

CLUSTER, LAYOUT = Cluster.uniform(4, flops=1e12, memory_bandwidth=1e11, latency=1e-6, bandwidth=1e10), (1, 2, 1, 2)
#: Two data ranks × two micro-batches.
CUT = Cut(pieces=4, tensor=2)


def sharded(*, logits_converted: bool) -> tuple[ShardingSpace, StepUnits, Variant]:
    """Tiny Llama on dp=2, tp=2 in two micro-batches."""
    space = ShardingSpace.of(of_config("tiny-llama", num_hidden_layers=2))
    level_one = LevelOne(CLUSTER, space, StepUnits.of(space))
    if not logits_converted:
        space.unconverted = level_one.step_units.logits
    links = Links.of(CLUSTER, MeshLayout(*LAYOUT))
    variant = Shardings(space, CUT, batch_prices(links, mixes=not level_one.micro_batches)).variant()
    assert variant is not None
    return space, level_one.step_units, variant


def test_samples_of_other_micro_batches_are_never_gathered() -> None:
    space, _, variant = sharded(logits_converted=True)
    assert max(variant.ilp.program.costs) < 1.0 and math.isfinite(sum(variant.ilp.program.costs))
    for name, lattice in variant.ilp.lattices.items():
        stream = variant.problem.streams[name]
        on_data = [arc.step for arc in lattice.arcs if arc.step.axis == 0 and any(arc.step.collectives)]
        if on_data and stream.value.name not in space.states:
            assert max(variant.pricing.step_bytes(step, stream.value) for step in on_data) <= SCALAR_BYTES


def test_logits_of_a_loss_in_chunks_are_never_converted() -> None:
    _, step_units, converted = sharded(logits_converted=True)
    assert step_units.logits and any(
        converted.ilp.lattices[name].arcs for name in step_units.logits & converted.ilp.lattices.keys()
    )
    _, step_units, variant = sharded(logits_converted=False)
    assert not any(variant.ilp.lattices[name].arcs for name in step_units.logits & variant.ilp.lattices.keys())
    assert max(variant.ilp.program.costs) < 1.0
