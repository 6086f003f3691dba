"""Hybrid sharding: ZeRO over neighbours of the data ranks, what those reduced summed over the others once a step.

``test_step_parity``, ``test_units`` and ``test_torch_tools`` run it on processes, ``test_step_exhaustive`` searches it.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest

import planner
from cost_models.cost_model import CostModel
from cost_models.dtypes import ITEM_SIZE
from passes.plan import Plan
from planner.auditing.audit import audited
from planner.auditing.subject import subject_of
from planner.verification.verify_model import slow_devices
from tests.exhaustive_models import two_boxes
from tests.expert_models import mixture, mixture_batch
from tests.small_models import Mlp, mlp_batch, squared_error

LAYERS = 4
#: On two boxes of four devices; the neighbours that ZeRO divides over are in one box.
FIXES: tuple[dict[str, Any], ...] = (
    {"dp": 8, "zero": 1, "zero_ranks": 4},
    {"dp": 8, "zero": 3, "zero_ranks": 4, "num_microbatches": 2},
    {"dp": 4, "zero": 2, "zero_ranks": 2, "pp": 2, "schedule": "1f1b", "num_microbatches": 4},
    {"dp": 4, "zero": 3, "zero_ranks": 2, "tp": 2},
)


@functools.cache
def plan_of(text: str) -> Plan:
    fix = {"pp": 1, "cp": 1, "tp": 1, "recompute": "none", **json.loads(text)}
    return planner.plan(
        Mlp(layers=LAYERS), two_boxes(), example_inputs=mlp_batch(batch=16), loss_fn=squared_error, fix=fix
    )


def hybrid(**fix: Any) -> Plan:
    return plan_of(json.dumps(fix))


@pytest.mark.parametrize("fix", FIXES, ids=str)
def test_a_plan_is_priced_counted_and_bounded_again(fix: dict[str, Any]) -> None:
    plan = Plan.from_dict(json.loads(hybrid(**fix).to_json()))
    assert plan.step.zero_ranks == fix["zero_ranks"]
    subject = subject_of(plan, Mlp(layers=LAYERS), loss_fn=squared_error)
    report = audited(subject, prove_bound=True, time_limit=60.0)
    assert report.ok, report.table()


def test_neighbours_hold_all_state_together() -> None:
    """Eight bytes an element of AdamW's moments, a quarter on each of four, an eighth on each of eight."""
    within, everyone = (hybrid(dp=8, zero=1, zero_ranks=ranks).step.memory[0] for ranks in (4, 0))
    assert within.optimizer == pytest.approx(2 * everyone.optimizer, rel=1e-2)
    assert within.parameters == everyone.parameters


def test_a_step_gathers_over_the_box_and_sums_pieces_between_boxes() -> None:
    """A unit's gradients over the box in each micro-batch, then a quarter of them over the network once."""
    plan = hybrid(dp=8, zero=3, zero_ranks=4)
    over = {(entry.collective, entry.axis): entry for entry in plan.collectives}
    gradients, pieces = over["reduce_scatter", "dp_shard"], over["all_reduce", "dp_replicate"]
    assert gradients.num_bytes == 4 * pieces.num_bytes and gradients.count == pieces.count
    assert ("all_gather", "dp") not in over and ("reduce_scatter", "dp") not in over
    prices = CostModel(two_boxes(), {"replicas": 2, "dp": 4})
    (chunk,) = plan.step.chunks
    (block, layer) = next((g.unit, costs) for g, (costs, _) in zip(chunk.groups, chunk.costs.layers) if g.count > 1)
    states = [state for path, state in plan.states.items() if path.startswith(f"{block}.")]
    num_bytes = sum(math.prod(state.shape) for state in states) * ITEM_SIZE[states[0].dtype]
    assert layer.gather_forward == prices.collective_seconds("all_gather", num_bytes=num_bytes, axis="dp")
    assert layer.reduce_step == prices.collective_seconds("all_reduce", num_bytes=num_bytes / 4, axis="replicas")


def test_plans_without_the_field_divide_over_all() -> None:
    data = json.loads(hybrid(dp=8, zero=3, zero_ranks=0).to_json())
    del data["step"]["zero_ranks"]
    assert Plan.from_dict(data).step.zero_ranks == 0


@pytest.mark.parametrize("ranks", [1, 3, 8, 16])
def test_a_file_with_groups_that_there_are_not_is_refused(ranks: int) -> None:
    data = json.loads(hybrid(dp=8, zero=3, zero_ranks=4).to_json())
    data["step"]["zero_ranks"] = ranks
    with pytest.raises(
        ValueError, match=rf"zero_ranks: expected 0 .all., or 2 or more that divide the 8 .*got {ranks}"
    ):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    ("fix", "message"),
    [
        ({"dp": 8, "zero": 3, "zero_ranks": 3}, r"they must divide the data ranks.*Possible: zero_ranks = 0, 2, 4, 8"),
        ({"dp": 8, "zero": 3, "zero_ranks": 1}, "2 or more neighbours.*say zero=0"),
        ({"dp": 8, "zero": 0, "zero_ranks": 2}, "zero=0, which divides nothing, and zero_ranks"),
    ],
    ids=str,
)
def test_a_wish_that_cannot_be_met_is_refused(fix: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hybrid(**fix)


def test_all_data_ranks_by_number_are_all() -> None:
    assert hybrid(dp=8, zero=3, zero_ranks=8).step.zero_ranks == 0


@pytest.mark.parametrize(
    "axes",
    [{"dp": 4, "tp": 2, "zero": 3}, {"dp": 4, "pp": 2, "schedule": "1f1b", "zero": 2}],
    ids=str,
)
def test_beside_other_axes_a_step_is_that_of_one_device(axes: dict[str, Any]) -> None:
    """Loss, gradients, their norm and weights after three steps in float64, and the collectives that the plan lists."""
    fix = {**dict.fromkeys(("pp", "cp", "tp"), 1), "recompute": "none", "num_microbatches": 2, "zero_ranks": 2, **axes}
    model, batch = Mlp(layers=2), mlp_batch(batch=16)
    report = planner.verify(model, fix=fix, cluster=slow_devices(8), batch=batch, loss_fn=squared_error)
    assert report.plan.step.zero_ranks == 2
    assert report.ok, report.table()


@pytest.mark.parametrize("fix", [{"zero": 3}, {"zero": 1, "num_microbatches": 2}], ids=str)
def test_experts_divide_over_the_neighbours_of_their_own_place(fix: dict[str, Any]) -> None:
    """Four neighbours of dp and ep hold all pieces of the rest, two of dp all pieces of each place's experts."""
    mesh = {"dp": 4, "ep": 2, "pp": 1, "cp": 1, "tp": 1, "recompute": "none", "zero_ranks": 4}
    report = planner.verify(mixture(), fix=mesh | fix, cluster=slow_devices(8), batch=mixture_batch(batch=16))
    assert report.ok, report.table()
    over = {(entry.collective, entry.axis) for entry in report.plan.collectives}
    assert {
        ("reduce_scatter", "dp_ep_shard"),
        ("reduce_scatter", "dp_shard"),
        ("all_reduce", "dp_ep_replicate"),
    } <= over
    subject = subject_of(report.plan, mixture())
    audit = audited(subject, prove_bound=True, time_limit=60.0)
    assert audit.ok, audit.table()


def test_groups_that_places_of_experts_do_not_divide_are_refused() -> None:
    mesh = {"dp": 2, "ep": 4, "pp": 1, "cp": 1, "tp": 1, "recompute": "none", "zero": 1, "zero_ranks": 2}
    with pytest.raises(ValueError, match="a multiple of ep, so that experts divide over them too"):
        planner.verify(mixture(), fix=mesh, cluster=slow_devices(8), batch=mixture_batch(batch=16))


def test_frameworks_are_told_the_groups_or_say_that_they_lack_them(tmp_path: Path) -> None:
    plan = hybrid(dp=8, zero=3, zero_ranks=4)
    told = plan.export("torchtitan").settings
    assert told["--parallelism.data_parallel_replicate_degree"] == 2
    assert told["--parallelism.data_parallel_shard_degree"] == 4
    config_file = pytest.importorskip("accelerate.commands.config.config_args")
    plan.export("accelerate-fsdp2", tmp_path / "accelerate.yaml")
    read = config_file.load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert read.parallelism_config["parallelism_config_dp_replicate_size"] == 2
    assert read.parallelism_config["parallelism_config_dp_shard_size"] == 4
    assert plan.export("megatron").settings["--num-distributed-optimizer-instances"] == 2
    assert plan.export("deepspeed").settings["zero_optimization.mics_shard_size"] == 4
    assert any("MiCS_Init" in line for line in plan.export("deepspeed").script)
    lacking = (("transformers-tp", plan, "data ranks"), ("deepspeed", hybrid(dp=8, zero=1, zero_ranks=4), "zero=3"))
    for framework, lacks, why in lacking:
        (sentence,) = (line for line in lacks.export(framework).inexpressible if line.startswith("zero_ranks=4"))
        assert sentence.endswith(why)
