"""Whole steps on unequal devices: what stages see, the search and its bound, the plan's figures and its program."""

from __future__ import annotations

import dataclasses
import functools

import pytest

import planner
from cost_models import Cluster
from cost_models.cluster_format import IN_ORDER, REORDER, SLOWEST
from cost_models.unequal_devices import device_kinds, in_order, kinds_of_stages, orders, view
from passes.plan import Plan
from passes.plan.text_tables import format_seconds
from planner.pipeline_ilp.stage_ilp import solve_stages
from planner.whole_step.candidates.candidates import families
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.candidates.mesh_layout import Links, MeshLayout
from planner.whole_step.costs.byte_weights import BYTE_WEIGHTS
from planner.whole_step.costs.level_one import LevelOne, batch_prices
from planner.whole_step.costs.sharding import Cut
from planner.whole_step.costs.stage_devices import level_one_of, repriced
from planner.whole_step.unequal_search import UnequalSearch, search_of
from tests.cells import cells
from tests.exhaustive_models import space
from tests.small_models import Mlp, mlp_batch, seeded, squared_error

pytestmark = pytest.mark.usefixtures("models_traced_once")

A100S_AND_V100S = "dgx-a100-80g:2+dgx-v100-32g:2"


def mixed(*, unequal: str = REORDER, memory: float = 1e9) -> Cluster:
    """Two devices three times as fast as the two behind them, which have a tenth of the memory and slower links."""

    def device(name: str, speed: float, memory_bytes: float) -> dict[str, object]:
        return {
            "name": name, "count": 2, "flops": {"float32": speed * 1e9}, "memory_bytes": memory_bytes,
            "memory_bandwidth": speed * 1e9, "launch_overhead": 0.0,
            "levels": [{"name": "bus", "size": 2, "latency": 1e-6, "bandwidth": speed * 1e8},
                       {"name": "network", "size": 2, "latency": 1e-5, "bandwidth": speed * 5e7}],
        }  # fmt: skip

    return Cluster.from_dict({
        "name": "fast and slow", "unequal": unequal,
        "devices": [device("fast", 3.0, memory), device("slow", 1.0, memory / 10)],
        "levels": [{"name": "bus", "size": 2, "latency": 1e-6, "bandwidth": 1e8},
                   {"name": "network", "size": 2, "latency": 1e-5, "bandwidth": 5e7}],
    })  # fmt: skip


@functools.cache
def mixed_plan() -> Plan:
    """A plan that a mixed cluster's first stage has most layers of."""
    return planner.plan(
        seeded(functools.partial(Mlp, layers=8, size=32)),
        mixed(),
        example_inputs=mlp_batch(batch=16, size=32),
        loss_fn=squared_error,
        fix={"pp": 2, "tp": 1},
        fuse=False,
    )


@pytest.mark.parametrize(("unequal", "fix", "is_told"), [
    (REORDER, {}, True), (REORDER, {"pp": 2, "tp": 1}, False), (IN_ORDER, {}, False), (SLOWEST, {}, False),
])  # fmt: skip
def test_a_plan_tells_of_devices_that_would_be_faster_without_the_others(
    unequal: str, fix: dict[str, int], is_told: bool
) -> None:
    """Behind a link that takes longer than all else, slow devices are not worth what it costs to reach them."""
    data = mixed(unequal=unequal).to_dict()
    data["levels"][1] |= {"latency": 1.0}
    plan = planner.plan(
        seeded(functools.partial(Mlp, layers=2, size=32)), Cluster.from_dict(data), fix=fix,
        example_inputs=mlp_batch(batch=16, size=32), loss_fn=squared_error, fuse=False, time_limit=None,
    )  # fmt: skip
    told = [line for line in plan.brief().splitlines() if line.startswith("faster alone: 2 × fast, ")]
    assert len(told) == is_told
    if is_told:
        alone = planner.plan(
            seeded(functools.partial(Mlp, layers=2, size=32)), Cluster.from_dict(fast_alone()),
            example_inputs=mlp_batch(batch=16, size=32), loss_fn=squared_error, fuse=False,
        )  # fmt: skip
        assert f"{format_seconds(alone.step.costs.simulated)} a step" in told[0]


def fast_alone() -> dict[str, object]:
    """The fast devices of ``mixed``, as a cluster of their own."""
    return view(mixed(), device_kinds(mixed()), {0}).subset(2).to_dict()


def test_devices_that_are_worth_their_link_are_not_told_of() -> None:
    assert not any("faster alone" in note for note in mixed_plan().notes)


def test_presets_side_by_side_are_one_cluster_in_which_each_part_has_its_own_links():
    cluster = Cluster.parse(A100S_AND_V100S)
    assert Cluster.from_dict(cluster.to_dict()) == cluster and cluster.num_devices == 32
    a100s, v100s = device_kinds(cluster)
    assert [list(kind.ranks) for kind in (a100s, v100s)] == [[range(16)], [range(16, 32)]]
    assert (a100s.levels[1].bandwidth, v100s.levels[1].bandwidth, v100s.levels[1].shared_by) == (25e9, 12.5e9, 2)
    assert cluster.levels[1].bandwidth == 12.5e9  # among all, the slowest
    assert kinds_of_stages((a100s, v100s), num_stages=4, stride=8) == ({0}, {0}, {1}, {1})
    assert kinds_of_stages((a100s, v100s), num_stages=2, stride=1) == ({0, 1}, {0, 1})
    assert view(cluster, (a100s, v100s), {0}).device == a100s.device
    with pytest.raises(ValueError, match="equally many devices a node"):
        Cluster.parse("dgx-a100-80g:1+dgx-v100-32g:1x4")


def test_the_parts_of_a_cluster_come_in_every_order_unless_ranks_have_their_devices():
    cluster = Cluster.parse(A100S_AND_V100S)
    assert [[group.count for group in each.groups] for each in orders(cluster)] == [[16, 16], [16, 16]]
    first, second = orders(cluster)
    assert second.groups == first.groups[::-1]
    assert list(orders(in_order(cluster))) == [in_order(cluster)]
    slowest = dataclasses.replace(cluster, unequal=SLOWEST)
    assert list(orders(slowest)) == [slowest] and not slowest.has_unequal_devices


def test_a_sharding_at_its_own_prices_costs_what_it_did():
    cluster, cut = mixed(unequal=SLOWEST), Cut(4, tensor=2)
    layout = MeshLayout(1, 2, 1, 2)
    sharded = LevelOne(cluster, *space("6-block mlp")).sharded(cut, layout, Links.of(cluster, layout))
    assert sharded is not None
    again = repriced(sharded, batch_prices(Links.of(cluster, layout), mixes=False))
    assert again.seconds == pytest.approx(sharded.seconds, rel=1e-12) and again.figures == sharded.figures


@pytest.mark.parametrize(("model", "recompute", "zero"), cells(
    [("6-block mlp", "none", (0, 3)), ("uneven", ("none", "full"), 3)],
    [("6-block mlp", ("none", "full"), (0, 3)), ("uneven", ("none", "full"), (0, 3))],
))  # fmt: skip
def test_the_search_finds_the_fastest_of_all_candidates_and_its_bound_holds(model, recompute, zero):
    """Every candidate is solved by itself, without a cutoff and without the bounds of the search."""
    cluster = mixed(memory=2e6)
    demands = read_demands({"recompute": recompute, "zero": zero}, gap=0.0, time_limit=600.0)
    search = search_of(level_one_of(cluster, *space(model)), cluster, demands)
    assert isinstance(search, UnequalSearch)
    outcome = search.run()
    level_one, best, unequal = search.level_one, float("inf"), 0
    every_family = families(
        cluster,
        global_batch=level_one.global_batch,
        num_units=sum(unit.count for unit in level_one.step_units.units),
        demands=demands,
        micro_batches=level_one.micro_batches,
    )
    fresh = UnequalSearch(level_one, cluster, demands)
    for candidate in (entry.candidate for family in every_family for entry in fresh._members(family)):
        for weight in BYTE_WEIGHTS:
            sharded = search.sharded(candidate, weight)
            if sharded is None:
                continue
            problem = search.problem(candidate, sharded)
            solved = solve_stages(problem, gap=0.0)
            unequal += bool(problem.rank_runs)
            best = min(best, float("inf") if solved is None else solved.objective)
            if solved is not None:
                least = search.step_bound(
                    candidate,
                    level_one.sharded(candidate.cut, candidate.layout, search.links_on(candidate.layout)).least_seconds,
                )
                assert least <= solved.objective * (1 + 1e-9)
    assert unequal > 10
    assert outcome.solutions[0].seconds == pytest.approx(best, rel=1e-9)
    assert outcome.bound == pytest.approx(best, rel=1e-6)


def test_a_mixed_plan_says_its_devices_is_audited_and_faster_than_all_as_the_slowest(tmp_path):
    plan = mixed_plan()
    step = plan.step
    assert {device.name: device.memory_limit for device in step.stage_devices} == pytest.approx(
        {"fast": 1e9 * (1 - step.headroom), "slow": 1e8 * (1 - step.headroom)}
    )
    units = [sum(group.count for group in chunk.groups) for chunk in step.chunks]
    fast = [device.name for device in step.stage_devices].index("fast")
    assert units[fast] > 1.5 * units[1 - fast]
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    text = plan.summary()
    assert "fast" in text and "slow" in text and "start the processes in this order" in text
    assert "stages on" in plan.brief()
    model = seeded(functools.partial(Mlp, layers=8, size=32))
    report = planner.audit(plan, model, example_inputs=mlp_batch(batch=16, size=32), loss_fn=squared_error)
    assert report.ok, report.table()
    slowest = planner.plan(
        model, mixed(unequal=SLOWEST), example_inputs=mlp_batch(batch=16, size=32), loss_fn=squared_error, fuse=False
    )
    assert not slowest.step.stage_devices and step.costs.simulated < slowest.step.costs.simulated


def test_of_two_schedules_with_one_closed_form_a_plan_has_the_one_that_plays_faster():
    def plan(**fix: object) -> Plan:
        return planner.plan(
            seeded(functools.partial(Mlp, layers=8, size=64)), mixed(), fix={"pp": 4, **fix}, fuse=False,
            example_inputs=mlp_batch(batch=32, size=64), loss_fn=squared_error,
        )  # fmt: skip

    free, gpipe = plan(schedule=("gpipe", "1f1b")), plan(schedule="gpipe")
    assert free.step.schedule == "1f1b" and free.step.num_microbatches == gpipe.step.num_microbatches
    assert free.step.costs.simulated < gpipe.step.costs.simulated


def test_an_audit_refutes_a_plan_that_claims_other_devices():
    plan = mixed_plan()
    swapped = dataclasses.replace(plan.step, stage_devices=plan.step.stage_devices[::-1])
    model = seeded(functools.partial(Mlp, layers=8, size=32))
    report = planner.audit(
        dataclasses.replace(plan, step=swapped), model, example_inputs=mlp_batch(batch=16, size=32),
        loss_fn=squared_error, prove_bound=False,
    )  # fmt: skip
    assert not report.ok and "memory limit of rank 0" in report.table()


def test_the_program_of_a_mixed_plan_computes_what_one_device_does():
    model = seeded(functools.partial(Mlp, layers=8, size=32)).double()
    batch = tuple(value.double() for value in mlp_batch(batch=16, size=32))
    plan = planner.plan(model, mixed(), example_inputs=batch, loss_fn=squared_error, fix={"pp": 2, "tp": 1})
    counts = [sum(group.count for group in chunk.groups) for chunk in plan.step.chunks]
    assert counts[0] != counts[1]
    report = planner.verify(model, plan, batch=batch, loss_fn=squared_error)
    assert report.ok and report.tolerance <= 1e-9, report.table()


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"fix": {"schedule": "zbv"}}, "schedule=zbv is for stages on equal devices.*1f1b or gpipe or zb_h1.*slowest"),
        ({"fix": {"chunks_per_rank": 2}}, "chunks_per_rank: stages on unequal devices hold one chunk"),
        ({"objective": "devices", "target_seconds": 1.0}, "objective='devices'.*are unequal.*slowest"),
        ({"framework": "torchtitan"}, "torchtitan.* is for equal devices.*are unequal"),
    ),
)
def test_options_that_are_for_equal_devices_are_refused_by_name(options, message):
    model = seeded(functools.partial(Mlp, layers=2, size=32))
    with pytest.raises(ValueError, match=message):
        planner.plan(model, mixed(), example_inputs=mlp_batch(batch=16, size=32), loss_fn=squared_error, **options)
