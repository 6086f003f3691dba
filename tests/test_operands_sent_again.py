"""Which operands that a collective brought an operator keeps, so that they are sent again."""

from __future__ import annotations

import pytest
import torch

from passes.autograd.recompute_policies import Activations
from passes.capture import capture
from passes.ir.conversions import Step
from passes.ir.graph import Graph, Node
from passes.ir.types import P, R, shard
from passes.shard import Compute, Convert, Local
from passes.shard.operations import Operation
from planner.sharding_ilp.liveness import live_nodes
from planner.whole_step.result.unit_collectives import SavedLocals


class Product(torch.nn.Module):
    """What a linear layer makes, times a matrix, on either side."""

    def __init__(self, product: str, *, trained: bool) -> None:
        super().__init__()
        self.product = product
        self.layer = torch.nn.Linear(4, 4)
        self.matrix = torch.nn.Parameter(torch.randn(4, 4), requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.product == "matrix @ x":
            return (self.matrix @ x).mean()
        return (x @ self.matrix if self.product == "x @ matrix" else torch.einsum(self.product, x, self.matrix)).mean()


class Transposed(torch.nn.Module):
    """A linear layer of rows with gaps between them, which it copies before it multiplies; its bias is trained."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv1d(4, 4, 1)
        self.layer = torch.nn.Linear(4, 4)
        self.layer.weight.requires_grad_(trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.convolution(x).transpose(1, 2)).mean()


class TransposedTwice(torch.nn.Module):
    """Rows whose order in memory a kernel in between keeps on one device, and a collective does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.nn.functional.gelu(self.first(x).transpose(1, 2)).transpose(1, 2)).mean()


class Distances(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return torch.cdist(x, x).mean()


def summed_output_of(node: Node) -> Convert:
    """Partial sums of a node's output, summed over ranks."""
    value = node.outputs[0]
    partial, whole = (Local(value, (kind,), value.shape) for kind in (P, R))
    return Convert(Step(0, (P,), (R,)), partial, whole, "all_reduce", "all_reduce", 128)


def whole_inputs(graph: Graph, node: Node) -> list[Local]:
    return [Local(graph.values[name], (R,), graph.values[name].shape) for name in node.inputs]


def saved_of(
    graph: Graph,
    maker: Node,
    summed: Convert,
    user: Node,
    operands: list[Local],
    *more: Operation,
    names: tuple[str, ...] = (),
) -> SavedLocals:
    """What autograd saves where ``maker`` makes partial sums, and ``user`` takes ``operands``; ``names``: of others
    that its record follows."""
    (output,) = user.outputs
    partial_sums = Compute(maker, tuple(whole_inputs(graph, maker)), (summed.source,), (), None)
    used = Compute(user, tuple(operands), (Local(output, (R,), output.shape),), (), None)
    activations = Activations.of(graph, live_nodes(graph), tuple(dict.fromkeys((maker.name, *names, user.name))))
    return SavedLocals.of((partial_sums, summed, *more, used), activations)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("product", ["x @ matrix", "matrix @ x", "ab,bc->ac"])
def test_a_factor_is_kept_for_the_gradient_of_the_other_alone(product: str, trained: bool) -> None:
    graph = capture(Product(product, trained=trained), args=(torch.randn(4, 4),))
    linear, multiply = graph.nodes[:2]
    assert "linear" in linear.op and ("matmul" in multiply.op or "einsum" in multiply.op)
    summed = summed_output_of(linear)
    operands = [summed.target if one.value is linear.outputs[0] else one for one in whole_inputs(graph, multiply)]
    assert saved_of(graph, linear, summed, multiply, operands).brought == ((summed,) if trained else ())


@pytest.mark.parametrize("trained", [True, False])
def test_a_linear_layer_keeps_what_was_brought_where_it_would_copy_what_was_sent(trained: bool) -> None:
    graph = capture(Transposed(trained=trained), args=(torch.randn(3, 4, 5),))
    transpose, linear = (node for node in graph.nodes if "transpose" in node.op or "linear" in node.op)
    summed = summed_output_of(transpose)
    operands = [summed.target, *whole_inputs(graph, linear)[1:]]
    assert saved_of(graph, transpose, summed, linear, operands).brought == ((summed,) if trained else ())


def test_a_value_is_kept_in_both_types_in_which_it_comes() -> None:
    graph = capture(Distances(), args=(torch.randn(4, 4),))
    linear, distances = graph.nodes[:2]
    assert "cdist" in distances.op
    summed = summed_output_of(linear)
    rows = Local(linear.outputs[0], (shard(0),), (2, 4))
    cut = Convert(Step(0, (R,), rows.placement), summed.target, rows, None, None, 0)
    for operands in ([summed.target, rows], [rows, summed.target]):
        assert saved_of(graph, linear, summed, distances, operands, cut).brought == (summed,)


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_linear_layer_copies_what_was_brought_in_another_order_than_on_one_device(tokens: int) -> None:
    """It keeps the copy, and what was brought is not sent again; of one token there is no other order."""
    graph = capture(TransposedTwice(), args=(torch.randn(3, tokens, 4),))
    gelu, transpose, linear = graph.nodes[-4:-1]
    assert "gelu" in gelu.op and "transpose" in transpose.op and "linear" in linear.op
    summed = summed_output_of(gelu)
    rows = Local(transpose.outputs[0], (R,), transpose.outputs[0].shape)
    turned = Compute(transpose, (summed.target,), (rows,), (), None)
    operands = [rows, *whole_inputs(graph, linear)[1:]]
    names = [node.name for node in graph.nodes]
    saved = saved_of(graph, gelu, summed, linear, operands, turned, names=tuple(names))
    assert saved.brought == ((summed,) if tokens == 1 else ())
