"""Mixtures planned operator by operator over an axis of experts, and spellings that become experts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import nn

import planner
import runtime.kernels  # noqa: F401  (registers the fused operators)
from passes.fuse import fuse
from passes.ir.graph import Node, Value
from passes.rules import rule_for
from passes.rules.expert_rules import is_experts
from passes.rules.kinds import matmul_shape
from passes.rules.rule import ShardingRule
from planner.whole_step.costs.expert_regions import expert_regions
from tests.capture_parity import assert_parity
from tests.chain_graphs import GraphMaker
from tests.expert_families import ByHand, CapacityDispatch, MaskedLoop, family_batch
from tests.expert_regions import (
    BlockDiagonal,
    ChoiceByChoice,
    ChosenOutputs,
    ComparingSum,
    ExpertChoice,
    ScoredFirst,
    SoftStack,
    SoftSum,
)

pytestmark = pytest.mark.usefixtures("models_traced_once")


def by_hand(*layers: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return ByHand(*layers, layers=1).double()


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        (ScoredFirst, [(8, 6, 2, 16)]),  # every row of a token is one of its own
        (ChoiceByChoice, [(8, 6, 16)] * 2),
        (MaskedLoop, [(8, 6, 16)]),
        (ComparingSum, [(8, 6, 16)]),
    ],
)
def test_what_each_token_chooses_becomes_experts(layer: type[nn.Module], shapes: list[tuple[int, ...]]) -> None:
    graph = fuse(assert_parity(by_hand(layer), kwargs=family_batch())).graph
    assert [node.output.shape for node in graph.nodes if is_experts(node)] == shapes
    assert not [node.op for node in graph.nodes if "sort" in node.op or "expert_linear" in node.op]
    assert not [node.op for node in graph.nodes if "ones_like" in node.op and node.output.requires_grad]


@pytest.mark.parametrize(
    ("layers", "mesh"),
    [
        ((ChoiceByChoice, ComparingSum), "ep=2"),
        ((CapacityDispatch, SoftStack, SoftSum), "ep=2,tp=2"),
        ((ExpertChoice, ChosenOutputs), "ep=2,pp=2"),
    ],
)
def test_every_mixture_trains_over_ep_as_on_one_device(layers: tuple[type[nn.Module], ...], mesh: str) -> None:
    report = planner.verify(by_hand(*layers), mesh, batch=family_batch(), steps=1)
    assert report.ok, report.table()


def test_buffers_of_experts_travel_in_four_all_to_alls() -> None:
    """To the experts and back, forward and backward: 8 samples, 4 experts with 3 places of 16 entries each."""
    plan = planner.plan(by_hand(CapacityDispatch), mesh="ep=2", example_inputs=family_batch())
    sent = {each.phase: (each.count, each.num_bytes) for each in plan.collectives if each.collective == "all_to_all"}
    buffers = 8 * 4 * 3 * 16 * 8
    assert sent == {"forward": (2, 2 * buffers), "backward": (2, 2 * buffers)}
    experts = plan.mesh.names.index("ep")
    assert plan.states["layers.0.up"].placement[experts] == plan.states["layers.0.down"].placement[experts] == "S(0)"


def test_matrices_of_groups_that_nothing_routes_to_are_no_experts() -> None:
    with pytest.raises(ValueError, match="the model has no experts that ep could cut: such are products of tokens"):
        planner.plan(by_hand(BlockDiagonal), mesh="ep=2", example_inputs=family_batch())


@pytest.mark.parametrize(
    ("equation", "operands", "shape"),
    [
        ("bsi,eoi->ebso", [(8, 6, 16), (4, 12, 16)], (1, 48, 48, 16)),
        ("ebch,ehf->ebcf", [(4, 8, 3, 16), (4, 16, 12)], (4, 24, 12, 16)),
        ("bsec,bsh->ebch", [(8, 6, 4, 3), (8, 6, 16)], (8, 12, 16, 6)),
    ],
)
def test_an_einsum_is_priced_as_the_product_that_it_is(
    equation: str, operands: list[tuple[int, ...]], shape: tuple[int, ...]
) -> None:
    """(batch, m, n, k), from the letters."""
    node = Node("product", "aten.einsum.default", (equation,), {}, (Value("product", (), "float32"),))
    assert matmul_shape(node, operands, ()) == shape


@pytest.mark.parametrize("layer", [CapacityDispatch, SoftStack])
def test_a_region_of_experts_is_priced_by_the_audit_alike(layer: type[nn.Module]) -> None:
    """Stacked experts are cut over ep; those that are modules of their own are whole, and reduced over it."""
    model = by_hand(layer)
    plan = planner.plan(model, mesh="dp=2,ep=2", example_inputs=family_batch(), fix={"zero": 1})
    assert planner.audit(plan, model, example_inputs=family_batch()).ok


def test_rows_behind_many_residual_connections_are_looked_at_once() -> None:
    """Forty of them lead back to their input in 2⁴⁰ ways."""
    maker = GraphMaker()
    rows = maker.input("x", (4, 8, 16))
    for _ in range(40):
        rows = maker.call("add.Tensor", rows, maker.call("mul.Tensor", rows, 2.0))
    product = maker.call("bmm", rows, maker.weight("experts", (4, 16, 16)), name="product")
    asked = itertools.count()

    def counted(node: Node, values: Mapping[str, Value]) -> ShardingRule | None:
        assert next(asked) < 10_000, "every path is followed by itself"
        return rule_for(node, values)

    regions = expert_regions(maker.graph(product), {"experts"}, rules=counted)
    assert regions.demanded == {"product"} and len(regions.labels) == 1 + 2 * 40
