"""Random small graphs of elementwise operators with products, row reductions and masks between them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from passes.ir.graph import Ref
from tests.chain_graphs import GraphMaker

UNARY = ("exp", "neg", "tanh", "sigmoid", "relu", "silu", "gelu", "abs", "sin", "cos", "expm1", "square")
BINARY = ("add.Tensor", "sub.Tensor", "mul.Tensor", "maximum")
SHAPES = ((2, 3, 4), (2, 3, 1), (4,), (3, 4), (1, 1, 4), ())


def broadcast(*shapes: tuple[int, ...]) -> bool:
    """Whether shapes go together."""
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return False
    return True


@st.composite
def graphs(draw: st.DrawFn) -> tuple[GraphMaker, tuple[Ref, ...]]:
    """Up to a dozen operators on what is there, products between them; some results are outputs."""
    maker = GraphMaker()
    tensors = [maker.input(f"x{place}", shape) for place, shape in enumerate(SHAPES)]
    weight = maker.weight("w", (4, 4))
    for _ in range(draw(st.integers(2, 12))):
        chosen = draw(st.sampled_from(("unary", "unary", "binary", "binary", "mask", "product", "row")))
        one = draw(st.sampled_from(tensors[-6:]))
        shape = maker.values[one.name].shape
        others = [ref for ref in tensors if broadcast(shape, maker.values[ref.name].shape)]
        if chosen == "unary":
            tensors.append(maker.call(draw(st.sampled_from(UNARY)), one))
        elif chosen == "binary":
            tensors.append(maker.call(draw(st.sampled_from(BINARY)), one, draw(st.sampled_from(others))))
        elif chosen == "mask":
            mask = maker.call("gt.Scalar", one, 0.1)
            tensors.append(maker.call("where.self", mask, one, draw(st.sampled_from(others))))
        elif chosen == "product" and len(shape) > 1 and shape[-1] == 4:
            tensors.append(maker.call("matmul", maker.call("tanh", one), weight))
        elif chosen == "row" and shape:
            operator = draw(st.sampled_from(("sum.dim_IntList", "mean.dim", "amax")))
            tensors.append(maker.call(operator, one, [-1], draw(st.booleans())))
    computed = tensors[len(SHAPES) :] or [maker.call("exp", tensors[0])]
    outputs = draw(st.lists(st.sampled_from(computed), min_size=1, max_size=3, unique=True))
    return maker, tuple(dict.fromkeys((*outputs, computed[-1])))
