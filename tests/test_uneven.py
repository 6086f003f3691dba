"""Dims that a mesh axis does not divide are cut as ``torch.chunk`` and DTensor cut them, and computed with exactly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import spmd_types as spmd
import torch
from rules_harness import (
    MESH,
    RANKS,
    Sample,
    assemble,
    check_numbers,
    check_types,
    distribute,
    evaluate,
    fake_mesh,
    local_call,
    make_case,
)
from torch import nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh

import planner
from passes.emit.conversion_calls import conversion_call
from passes.emit.expressions import expression
from passes.ir.conversions import CONVERSIONS, Step
from passes.ir.graph import Value
from passes.ir.types import I, P, R, can_cut, local_shape, part_of_dim
from passes.plan import CollectivePlan
from passes.rules import rule_for
from passes.rules.rule import axis_choices
from passes.rules.uneven import can_run, cuts_of
from passes.shard import Convert, Local
from runtime.mesh.communication_counter import CommunicationCounter
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("models_traced_once")

#: By name: whether the embedding is the linear layer's too, what is fixed of the step, the first rank's part.
PLANS: dict[str, dict[str, Any]] = {
    "whole weights": {"tied": True, "fix": {"dp": 2, "tp": 2, "pp": 1, "zero": 0}, "rows": [129, 16]},
    "weights in pieces": {"tied": True, "fix": {"dp": 2, "tp": 2, "pp": 1, "zero": 3}, "rows": [129, 8]},
    "four ranks": {"tied": True, "fix": {"tp": 4, "pp": 1}},
    "tied over two stages": {"tied": True, "fix": {"pp": 2, "tp": 2, "num_microbatches": 2}, "rows": [129, 16]},
    "weights of their own": {"tied": False, "fix": {"dp": 2, "tp": 2, "pp": 1, "zero": 2}},
}


#: Operators on dims of 17 and 9, which an axis of two cuts into 9 and 8, and 5 and 4.
SAMPLES = (
    Sample("aten.linear.default", (torch.randn(2, 3, 9), torch.randn(17, 9), torch.randn(17)), {}),
    Sample("aten.matmul.default", (torch.randn(2, 17, 9), torch.randn(2, 9, 4)), {}),
    Sample("aten.embedding.default", (torch.randn(17, 4), torch.randint(0, 17, (2, 3))), {}),
    Sample("aten.gelu.default", (torch.randn(3, 17),), {}),
    Sample("aten.mean.dim", (torch.randn(3, 17, 9), [1, 2]), {}),
    Sample("aten.sum.dim_IntList", (torch.randn(3, 17), [1]), {}),
    Sample("aten.softmax.int", (torch.randn(17, 4), -1), {}),
    Sample("aten.layer_norm.default", (torch.randn(2, 17, 4), [4], torch.randn(4), torch.randn(4)), {}),
    Sample("aten.view.default", (torch.randn(2, 3, 17), [6, 17]), {}),
    Sample("aten.view.default", (torch.randn(2, 3, 17), [2, 3, 1, 17]), {}),
    Sample("aten.view.default", (torch.randn(2, 3, 17), [2, 3, 17, 1]), {}),
    Sample("aten.transpose.int", (torch.randn(3, 17), 0, 1), {}),
    Sample("aten.slice.Tensor", (torch.randn(4, 17), 0, 1, 3), {}),
    Sample("aten.cat.default", ([torch.randn(3, 17), torch.randn(2, 17)],), {}),
)
TYPES = ("S(0)", "S(1)", P, R, I)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as device_mesh:
        yield device_mesh


@pytest.mark.parametrize(
    ("extent", "counts", "possible"),
    [
        (50_257, (8,), True),
        (50_257, (2, 4), False),  # an axis alone cuts a dim unevenly
        (25, (4,), True),
        (3, (2,), False),  # a third would be padding
        (129, (16,), False),  # the last of 16 ranks would hold nothing
        (57, (8,), False),  # the last would hold one entry, which broadcasts
    ],
)
def test_where_a_dim_may_be_cut_unevenly(extent: int, counts: tuple[int, ...], possible: bool) -> None:
    assert can_cut(extent, counts) is possible


def test_parts_are_those_of_torch() -> None:
    for extent, count in itertools.product((17, 25, 50_257), (2, 3, 4, 8)):
        lengths = [part_of_dim(extent, count, index)[1] for index in range(count)]
        assert [length for length in lengths if length] == [len(part) for part in torch.zeros(extent).chunk(count)]


def virtual_ranks_multiply_unequal_parts() -> bool:
    """Whether torch's own ``matmul`` takes tensors of ``LocalTensorMode`` that are longer on one rank."""
    with LocalTensorMode(2):
        parts = LocalTensor({rank: torch.zeros(2, 2 + rank, 3) for rank in range(2)})
        try:
            torch.matmul(parts, LocalTensor({rank: torch.zeros(3, 4) for rank in range(2)}))
        except RuntimeError:
            return False
    return True


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.op)
def test_operators_compute_with_parts_of_unequal_length(mesh: DeviceMesh, sample: Sample) -> None:
    torch.manual_seed(0)
    tensors = [
        arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in sample.args
    ]
    if isinstance(tensors[0], list):
        tensors[0] = [tensor.double() for tensor in tensors[0]]
    case = make_case(Sample(sample.op, tuple(tensors), sample.kwargs))
    rule = rule_for(case.node, case.values)
    assert rule is not None
    if sample.op in ("aten.linear.default", "aten.matmul.default") and not virtual_ranks_multiply_unequal_parts():
        pytest.skip("in this torch (2.11), virtual ranks with parts of unequal length cannot compute a product")
    choices = axis_choices(rule, input_grads=case.grads, output_grads=case.out_grads)
    inputs = [case.values[name] for name in case.node.inputs]
    uneven = 0
    for choice in choices:
        pair = (choice, choices[0])
        cuts = cuts_of(rule, pair, inputs, case.node.outputs)
        if can_run(case.node.op, cuts, MESH.sizes):
            uneven += any(extent % 2 for extent, _ in cuts)
            call = local_call(case, rule, pair)
            check_types(mesh, case, call, expression(call))
            check_numbers(mesh, case, call, expression(call))
    assert uneven


@pytest.mark.parametrize(("source", "target"), itertools.permutations(TYPES, 2))
def test_conversions_of_parts_of_unequal_length(mesh: DeviceMesh, source: str, target: str) -> None:
    """Values and gradients, as without padding; the bytes are those of equal parts."""
    if ("S" if source[0] == "S" else source, "S" if target[0] == "S" else target) not in CONVERSIONS:
        return
    torch.manual_seed(0)
    value = Value("x", (17, 9), "float64", requires_grad=True)
    step = Step(0, (source, R), (target, R))
    ends = [Local(value, where, local_shape(value.shape, where, MESH)) for where in (step.source, step.target)]
    convert = Convert(step, *ends, *step.collectives, step.num_bytes(value.shape, 8, MESH))
    sent = 8 * (18 if "S(0)" in (source, target) else 17) * (10 if "S(1)" in (source, target) else 9)
    assert convert.num_bytes == sent
    dual = {R: P, P: R}
    whole, gradient = torch.randn(17, 9).double(), torch.randn(17, 9).double()
    with LocalTensorMode(RANKS), spmd.set_current_mesh(mesh):
        x = LocalTensor(distribute(whole, step.source)).requires_grad_()
        (y,) = evaluate(conversion_call(convert, "x", MESH), {"x": x})
        upstream = LocalTensor(distribute(gradient, (dual.get(target, target), P)))
        (input_gradient,) = torch.autograd.grad([y], [x], [upstream])
    torch.testing.assert_close(assemble(y._local_tensors, step.target, exact=True), whole)
    back = assemble(input_gradient._local_tensors, (dual.get(source, source), P), exact=True)
    torch.testing.assert_close(back, gradient)


@pytest.mark.parametrize(("collective", "target"), [("all_gather", spmd.R), ("all_to_all", spmd.S(2))])
def test_what_is_sent_beside_an_uneven_cut_is_counted_by_the_longest_part(
    mesh: DeviceMesh, collective: str, target: spmd.PerMeshAxisSpmdType
) -> None:
    x = torch.randn(17, 8, 2).double()
    with LocalTensorMode(RANKS), spmd.set_current_mesh(mesh), CommunicationCounter(mesh) as counter:
        getattr(spmd, collective)(LocalTensor(distribute(x, ("S(1)", "S(0)"))), "a", src=spmd.S(1), dst=target)
    assert counter.collectives == (CollectivePlan(collective, "a", "forward", count=1, num_bytes=8 * 9 * 8 * 2),)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("uneven")
    answer: dict[str, Any] = run_on_ranks("uneven_worker", 4, {"folder": str(folder), "plans": PLANS})
    return answer


@pytest.mark.parametrize("name", PLANS)
def test_an_odd_vocabulary_is_cut_and_trains_as_in_plain_torch(results: dict[str, Any], name: str) -> None:
    """Loss, norm, gradients, weights after three AdamW steps, weight files, and a resume from another plan."""
    assert results[name]["wrong"] == {}
    if "rows" in PLANS[name]:
        assert results[name]["shards"]["embed.weight"] == PLANS[name]["rows"]
    assert "vocabulary=257" in results[name]["source"]


class FirstColumns(nn.Module):
    """Cuts one dim where three ranks have other sizes of another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.inner(x)
        alike = (y @ y.t()).fill_diagonal_(-1e9).log_softmax(1)
        return {"loss": -alike[:, :4].mean()}


def test_a_tensor_of_uneven_parts_is_sliced_along_another_dim() -> None:
    torch.manual_seed(0)
    report = planner.verify(FirstColumns(), "tp=3", batch={"x": torch.randn(8, 8)})
    assert report.ok and "[:, :4]" in report.source
