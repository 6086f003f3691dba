"""Linear layers that exchange the shards of their rows themselves: priced, chosen where it pays, refused in words.

That they compute what one device does, and send what is counted: ``tests/test_step_parity.py``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import spmd_types as spmd
import torch
from torch import Tensor, nn

import planner
from cost_models import Cluster
from passes.capture import capture
from passes.ir.types import MeshShape
from passes.rules.rule import AxisChoice, pieces_of_rows
from planner.sharding_ilp.assignment import Assignment
from planner.sharding_ilp.hidden_collectives import exposed
from planner.sharding_ilp.own_collective import Collective
from planner.whole_step.candidates.mesh_layout import Links, MeshLayout
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.sharding import Cut, ShardingSpace
from planner.whole_step.costs.unit_costs import StepUnits
from runtime import ops
from runtime.mesh.virtual import virtual_mesh

GATHER, SCATTER = "cut n from b0", "cut k to b0"
OTHERS = ["cut n", "cut k", "cut b0", "replicate", "invariant", SCATTER]
CUT, LAYOUT = Cut(1, tensor=2), MeshLayout(1, 1, 1, 2)


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.relu(self.up(self.norm(x))))).square().mean()


class Siblings(nn.Module):
    """Linear layers of one input, one of them frozen, behind one whose output may be scattered."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, 2 * width, bias=bias) for bias in (True, False, False))
        self.out = nn.Linear(2 * width, width)
        self.k.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        h = self.norm(x)
        return (x + self.out(torch.tanh(self.q(h)) * self.k(h) * self.v(h))).square().mean()


BATCH = {"x": torch.randn(1, 256, 64, dtype=torch.float64)}
PINS = {"up": {"tp": GATHER}, "down": {"tp": SCATTER}}


SHARING = {**{name: {"tp": GATHER} for name in ("q", "k", "v")}, **{name: {"tp": SCATTER} for name in ("down", "out")}}


def cluster(*, bandwidth: float, slowdown: float = 0.0) -> Cluster:
    """Two devices that multiply slowly, on a link without latency."""
    data = Cluster.uniform(2, latency=0.0, bandwidth=bandwidth, flops=1e9).to_dict()
    data["device"]["overlap_slowdown"] = slowdown
    return Cluster.from_dict(data)


def planned(
    model: nn.Module | None = None,
    *,
    bandwidth: float = 1e6,
    overlap_tensor: bool = True,
    slowdown: float = 0.0,
    **options: Any,
) -> planner.Plan:
    return planner.plan(
        (model or Mlp()).double(),
        cluster(bandwidth=bandwidth, slowdown=slowdown),
        example_inputs=BATCH,
        fix={"tp": 2},
        overlap_tensor=overlap_tensor,
        **options,
    )


def strategies(plan: planner.Plan) -> list[str]:
    return [node.strategy[-1] for node in plan.nodes.values() if node.op == "aten.linear.default"]


def sent(seconds: float, *, phase: str = "forward", in_pieces: bool = True) -> Collective:
    return Collective("all_gather", "tp", phase, 8, seconds, in_pieces)


@pytest.mark.parametrize(
    ("seconds", "beside", "waited"),
    [
        (4.0, 100.0, 1.0),  # only the first of four pieces has nothing beside it
        (4.0, 2.0, 2.5),  # three quarters of the products hide as much
        (4.0, 0.0, 4.0),
    ],
)
def test_what_is_waited_for(seconds: float, beside: float, waited: float) -> None:
    exchanging = AxisChoice(GATHER, (), (), "n", rows="b0")
    pieces = [sent(seconds / 4)] * 4
    result = exposed(pieces, [exchanging], beside=(beside, 0.0), slowdown=0.0)
    assert sum(each.seconds for each in result) == pytest.approx(waited)
    slowed = exposed(pieces, [exchanging], beside=(beside, 0.0), slowdown=0.5)
    assert sum(each.seconds for each in slowed) == pytest.approx(waited + 0.5 * (seconds - waited))
    other = AxisChoice("cut e", (), (), "e")
    assert exposed(pieces, [other], beside=(beside, 0.0), slowdown=0.5) == tuple(pieces)


@pytest.mark.parametrize(("rows", "pieces"), [(8, 4), (6, 3), (2, 2), (7, 1), (1, 1)])
def test_rows_are_sent_in_as_many_equal_pieces_as_they_divide_into(rows: int, pieces: int) -> None:
    assert pieces_of_rows(rows) == pieces


def test_it_is_chosen_where_links_and_products_take_as_long_and_only_if_asked() -> None:
    alone, together = planned(overlap_tensor=False, bandwidth=2e7), planned(bandwidth=2e7)
    assert not any(" to " in label or " from " in label for label in strategies(alone))
    assert any(" to " in label or " from " in label for label in strategies(together))
    assert together.step.costs.simulated < alone.step.costs.simulated


def test_hidden_seconds_cost_what_they_slow_down() -> None:
    free, slowed = (planned(bandwidth=2e7, slowdown=slowdown, constraints=PINS) for slowdown in (0.0, 0.5))
    assert strategies(free) == strategies(slowed) == [GATHER, SCATTER]
    assert free.step.costs.simulated < slowed.step.costs.simulated


def test_rows_that_do_not_divide_are_not_exchanged() -> None:
    batch = {"x": torch.randn(1, 255, 64, dtype=torch.float64)}
    plan = planner.plan(
        Mlp().double(), cluster(bandwidth=1e6), example_inputs=batch, fix={"tp": 2}, overlap_tensor=True
    )
    assert not any(" to " in label or " from " in label for label in strategies(plan))


def test_pinned_without_it_the_refusal_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=f"'{GATHER}'.* cannot be met by 'up:aten.linear.default:0'"):
        planned(overlap_tensor=False, constraints=PINS)


def test_the_plan_is_audited_and_read_back(tmp_path: Any) -> None:
    plan = planned(constraints=PINS)
    plan.save(tmp_path / "plan.json")
    again = planner.Plan.load(tmp_path / "plan.json")
    assert again.step.overlap_tensor and strategies(again) == [GATHER, SCATTER]
    assert planner.audit(again, Mlp().double(), example_inputs=BATCH).ok
    assert planner.verify(Mlp().double(), again, batch=BATCH).ok


def collectives(plan: planner.Plan) -> dict[tuple[str, str], int]:
    return {(item.collective, item.phase): item.count for item in plan.collectives if item.axis == "tp"}


def test_layers_of_one_input_gather_its_rows_once() -> None:
    """Forward in four pieces, backward whole for the weights; the sum of the input's gradients is scattered in four.

    The layers before and behind them scatter their outputs in four pieces, and gather the gradients in as many.
    """
    plan = planned(Siblings(), constraints=SHARING)
    (group,) = plan.shared_gathers
    assert [key.partition(":")[0] for key in group] == ["q", "k", "v"]
    counts = collectives(plan)
    assert (counts["all_gather", "forward"], counts["all_gather", "backward"]) == (4, 1 + 2 * 4)
    assert (counts["reduce_scatter", "forward"], counts["reduce_scatter", "backward"]) == (2 * 4, 4)
    assert planner.audit(plan, Siblings().double(), example_inputs=BATCH).ok
    alone = replace(plan, shared_gathers=())
    assert not planner.audit(alone, Siblings().double(), example_inputs=BATCH).ok


@pytest.mark.parametrize("group", [["up"], ["up", "none"], ["up", "down"], ["up", "up"]])
def test_a_plan_file_with_layers_that_cannot_gather_together_is_refused(group: list[str]) -> None:
    data = json.loads(planned(constraints=PINS).to_json())
    data["shared_gathers"] = [[f"{name}:aten.linear.default:0" for name in group]]
    with pytest.raises(ValueError, match="shared_gathers: expected"):
        planner.Plan.from_dict(data)


def test_layers_of_two_inputs_that_a_plan_lets_gather_together_are_refused() -> None:
    """What ``up`` takes is not what ``q`` takes."""
    plan = planned(Siblings(), constraints={**SHARING, "up": {"tp": GATHER}})
    wrong = replace(plan, shared_gathers=(("up:aten.linear.default:0", "q:aten.linear.default:0"),))
    with pytest.raises(ValueError, match="cannot share a gather"):
        planner.verify(Siblings().double(), wrong, batch=BATCH)


@pytest.mark.parametrize(("bandwidth", "gathering"), [(1e6, 0), (2e7, 3)])
def test_no_choice_of_layers_to_gather_for_beats_the_search(bandwidth: float, gathering: int) -> None:
    """Every subset of the layers is tried; where all of them gather together, none of them would for itself alone."""
    space = ShardingSpace.of(capture(Siblings().double(), kwargs=BATCH), overlap_tensor=True)
    (siblings,) = space.structure.siblings
    keys = [space.structure.elements[name].key for name in siblings]

    def best(space: ShardingSpace, **changes: Any) -> Assignment | None:
        changed, devices = replace(space, **changes), cluster(bandwidth=bandwidth)
        level_one = LevelOne(devices, changed, StepUnits.of(changed))
        sharded = level_one.sharded(CUT, LAYOUT, Links.of(devices, LAYOUT))
        return None if sharded is None else sharded.variant.assignment

    def num_gathering(assignment: Assignment) -> int:
        return sum(assignment.options[name].labels[-1] == GATHER for name in siblings)

    forced = [
        best(space, pins={key: {"tp": [GATHER] if gathers else OTHERS} for key, gathers in zip(keys, subset)})
        for subset in itertools.product((False, True), repeat=len(keys))
    ]
    found, alone = best(space), best(space, structure=replace(space.structure, siblings=()))
    assert found is not None and alone is not None
    assert found.seconds == pytest.approx(min(each.seconds for each in forced if each))
    assert (num_gathering(found), num_gathering(alone)) == (gathering, 0)


@pytest.mark.parametrize(("frozen", "again"), [((), 1), (("q", "k"), 1), (("q", "k", "v"), 0)])
def test_rows_are_gathered_again_if_some_weight_has_a_gradient(frozen: tuple[str, ...], again: int) -> None:
    model = Siblings()
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.partition(".")[0] not in frozen)
    plan = planned(model, constraints=SHARING)
    assert collectives(plan)["all_gather", "backward"] == again + 2 * 4
    assert planner.verify(model, plan, batch=BATCH).ok


@pytest.mark.parametrize("product", [ops.gathered_linear, ops.scattered_linear])
def test_a_second_derivative_is_refused_in_words(product: Callable[..., Tensor]) -> None:
    x, weight = torch.randn(8, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    with virtual_mesh(MeshShape.parse("tp=2")) as mesh, spmd.set_current_mesh(mesh):
        result = product(x, weight, axis="tp")
        with pytest.raises(NotImplementedError, match="plan without overlap_tensor=True"):
            torch.autograd.grad(result.sum(), x, create_graph=True)
