"""What stages send each other is what a plan's price counts: activations, and of weights that several use nothing."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from cost_models import Cluster
from passes.ir.graph import Graph
from planner.auditing.repriced_step import reprice
from planner.library import load_config
from planner.planning import capture_for_planning
from planner.verification.verify_model import slow_devices
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.plan_step import plan_step
from tests.test_step_price import CLUSTERS, captured

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"pp": 2, "num_microbatches": 4, "schedule": "1f1b"},
    {"pp": 4, "num_microbatches": 4},
    {"pp": 2, "tp": 2, "num_microbatches": 2},
)


def assert_sends_as_priced(graph: Graph, cluster: Cluster, layout: dict[str, Any]) -> None:
    plan = plan_step(graph, cluster, read_demands(layout, gap=0.5))  # any plan, not the fastest
    assert plan.step is not None
    again = reprice(graph, plan, cluster)
    assert again.units is not None

    priced = dict.fromkeys(("forward", "backward"), 0.0)
    chunks = plan.step.chunks
    for before, chunk, units in zip(chunks, chunks[1:], again.unit_of_layer[1:]):
        if before.rank != chunk.rank:
            for phase, num_bytes in zip(priced, again.units.crossing_bytes(units[0])):
                priced[phase] += num_bytes * plan.step.num_microbatches
    sent = [each for each in plan.collectives if (each.collective, each.axis) == ("send", "pp")]
    assert {each.phase: each.num_bytes for each in sent} == priced


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2", "tiny-bert", "tiny-t5", "tiny-bloom"])
def test_sends_as_priced(model: str, layout: dict[str, Any]) -> None:
    assert_sends_as_priced(captured(model), CLUSTERS[0], layout)


@pytest.mark.parametrize("pp", [2, 4, 7])
def test_what_a_block_gathers_for_those_behind_it_is_sent_gathered(pp: int) -> None:
    """BART's last encoder layer hands on what every layer of the decoder takes whole, past the decoder's embedding."""
    assert_sends_as_priced(captured("bart-base"), slow_devices(4 * pp), {"pp": pp, "tp": 4})


@pytest.mark.parametrize("pp", [4, 5, 7])
def test_what_all_copies_of_a_block_take_is_gathered_before_the_first(pp: int) -> None:
    """Whisper's encoder ends with a norm outside of its layers, which every layer of the decoder takes whole."""
    graph = capture_for_planning(load_config("tiny-whisper"), batch_size=32, seq_len=32)
    assert_sends_as_priced(graph, slow_devices(4 * pp), {"pp": pp, "tp": 4})
