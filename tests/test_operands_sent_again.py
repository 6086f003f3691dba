"""A product keeps an operand that a collective brought only if the other operand has a gradient."""

from __future__ import annotations

import pytest
import torch

from passes.autograd.recompute_policies import Activations
from passes.capture import capture
from passes.ir.conversions import Step
from passes.ir.types import P, R
from passes.shard import Compute, Convert, Local
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


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("product", ["x @ matrix", "matrix @ x", "ab,bc->ac"])
def test_a_sum_is_sent_again_only_for_a_gradient(product: str, trained: bool) -> None:
    graph = capture(Product(product, trained=trained), args=(torch.randn(4, 4),))
    linear, multiply = graph.nodes[:2]
    assert "linear" in linear.op and ("matmul" in multiply.op or "einsum" in multiply.op)
    partial, whole = (Local(linear.outputs[0], (kind,), (4, 4)) for kind in (P, R))
    by_name = {**{name: Local(value, (R,), value.shape) for name, value in graph.values.items()}}
    operands = {name: whole if name == linear.outputs[0].name else by_name[name] for name in multiply.inputs}
    summed = Convert(Step(0, (P,), (R,)), partial, whole, "all_reduce", "all_reduce", 128)
    layer = Compute(linear, tuple(by_name[name] for name in linear.inputs), (partial,), (), None)
    product_of = Compute(multiply, tuple(operands.values()), (by_name[multiply.outputs[0].name],), (), None)
    names = (linear.name, multiply.name)
    saved = SavedLocals.of((layer, summed, product_of), Activations.of(graph, live_nodes(graph), names))
    assert saved.brought == ((summed,) if trained else ())
