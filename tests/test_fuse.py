"""The pattern pass: spellings that match, what blocks a match, and that a wrong pattern is found out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fuse_graphs import fused, fused_rows, graph_of, operators
from torch import nn

from passes.capture import capture
from passes.fuse import fuse
from passes.fuse.check import ROUNDED, difference
from passes.fuse.fuse import Rewriter
from passes.fuse.pattern_notation import parse
from passes.fuse.patterns import Row

EPS = 1e-6
X = (2, 3, 8)


def rms(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def rms_in_float32(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


def standardised(x: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(x, -1, unbiased=False, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + EPS)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


SPELLINGS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...], str]] = {
    "rms norm": (lambda x, w, b: w * rms(x), (X,), "rms_norm"),
    "rms norm by the root": (
        lambda x, w, b: x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * w,
        (X,),
        "rms_norm",
    ),
    "rms norm of squares": (lambda x, w, b: x * (x.square().mean(-1, True) + EPS) ** -0.5 * w, (X,), "rms_norm"),
    "rms norm without a weight": (lambda x, w, b: rms(x), (X,), "rms_norm"),
    "rms norm about one": (lambda x, w, b: rms(x) * (1.0 + w), (X,), "rms_norm"),
    "torch's rms norm": (lambda x, w, b: F.rms_norm(x, (8,), w, EPS), (X,), "rms_norm"),
    "torch's rms norm with torch's own epsilon": (lambda x, w, b: F.rms_norm(x, (8,), w), (X,), "rms_norm"),
    "torch's rms norm and then a weight": (lambda x, w, b: w * F.rms_norm(x, (8,), eps=EPS), (X,), "rms_norm"),
    "rms norm of a weighted tensor": (
        lambda x, w, b: w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS),
        (X,),
        "rms_norm",
    ),
    "rms norm by a weighted scale": (
        lambda x, w, b: x * (torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * w),
        (X,),
        "rms_norm",
    ),
    "torch's layer norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), (X,), "layer_norm"),
    "torch's layer norm without a bias": (lambda x, w, b: F.layer_norm(x, (8,), w), (X,), "layer_norm"),
    "layer norm": (
        lambda x, w, b: w * (centred(x) * torch.rsqrt(centred(x).pow(2).mean(-1, True) + EPS)) + b,
        (X,),
        "layer_norm",
    ),
    "layer norm by the variance": (
        lambda x, w, b: centred(x) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + EPS) * w + b,
        (X,),
        "layer_norm",
    ),
    "layer norm of a weighted tensor": (
        lambda x, w, b: w * centred(x) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + EPS) + b,
        (X,),
        "layer_norm",
    ),
    "layer norm by mean and variance at once": (lambda x, w, b: standardised(x) * w + b, (X,), "layer_norm"),
    "torch's layer norm, then weight and bias": (
        lambda x, w, b: F.layer_norm(x, (8,)) * w + b,
        (X,),
        "layer_norm",
    ),
    "swiglu": (lambda g, u, w, b: F.silu(g) * u, (X, X), "swiglu"),
    "swiglu by the sigmoid": (lambda g, u, w, b: u * (g * torch.sigmoid(g)), (X, X), "swiglu"),
    "swiglu with the sigmoid last": (lambda g, u, w, b: u * g * torch.sigmoid(g), (X, X), "swiglu"),
    "swiglu by exp": (lambda g, u, w, b: g / (1.0 + torch.exp(-g)) * u, (X, X), "swiglu"),
    "geglu": (lambda g, u, w, b: F.gelu(g) * u, (X, X), "geglu"),
    "geglu by tanh": (lambda g, u, w, b: tanh_gelu(g) * u, (X, X), "geglu"),
    "geglu by erf": (lambda g, u, w, b: g * 0.5 * (1.0 + torch.erf(g / math.sqrt(2.0))) * u, (X, X), "geglu"),
    "bias and gelu": (lambda x, v, w, b: F.gelu(F.linear(x, v, b)), (X, (8, 8)), "bias_gelu"),
    "bias and gelu of a product": (lambda x, v, w, b: F.gelu(b + x @ v), (X, (8, 8)), "bias_gelu"),
    "bias and gelu of rows": (lambda x, v, w, b: F.gelu(torch.addmm(b, x, v)), ((6, 8), (8, 8)), "bias_gelu"),
    "embedding": (lambda v, w, b: F.embedding(torch.arange(4), v), ((6, 8),), "embedding"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling_is_one_operator(spelling: str) -> None:
    function, shapes, operator = SPELLINGS[spelling]
    result = fused(function, *shapes)
    assert fused_rows(result) == {operator: 1}
    assert [op for op in operators(result.graph) if op.startswith("meshwright.")] == [f"meshwright.{operator}.default"]
    assert not result.near_misses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchs_own_epsilon_is_that_of_what_it_computes_in(dtype: torch.dtype) -> None:
    graph = graph_of(lambda x, w, b: F.rms_norm(x, (8,), w), X, dtype=dtype)
    (norm,) = (node for node in fuse(graph).graph.nodes if node.op == "meshwright.rms_norm.default")
    small = torch.full((1, 8), 1e-4, dtype=dtype)
    ours = torch.ops.meshwright.rms_norm(small, torch.ones(8, dtype=dtype), norm.args[2])
    # one place of the dtype: torch rounds in between
    torch.testing.assert_close(ours, F.rms_norm(small, (8,)), rtol=torch.finfo(dtype).eps, atol=0.0)


def test_gates_that_there_is_no_operator_for_stay() -> None:
    """ReGLU, and the sigmoid's."""
    for gated in (lambda g, u, w, b: F.relu(g) * u, lambda g, u, w, b: torch.sigmoid(g) * u):
        result = fused(gated, X, X)
        assert not result.matches and not result.near_misses


def test_casts_around_and_inside_are_part_of_the_operator() -> None:
    result = fused(rms_in_float32, X, dtype=torch.bfloat16)
    assert operators(result.graph)[0] == "meshwright.rms_norm.default"
    (norm,) = (node for node in result.graph.nodes if node.op.startswith("meshwright."))
    assert norm.output.dtype == "bfloat16"
    assert [result.graph.values[name].dtype for name in norm.inputs] == ["bfloat16", "bfloat16"]


def test_a_result_that_is_left_in_float32_is_of_what_was_cast_to_it() -> None:
    """The fused operator of the tensor itself would round."""
    result = fused(lambda x, w, b: rms(x.float()) * w.float(), X, dtype=torch.bfloat16)
    assert fused_rows(result) == {"rms_norm": 1} and not result.near_misses
    assert operators(result.graph) == ["aten.to.dtype", "aten.to.dtype", "meshwright.rms_norm.default"]
    assert [value.dtype for node in result.graph.nodes[:3] for value in node.outputs] == ["float32"] * 3


def test_a_tensor_that_is_used_as_it_is_and_cast_is_no_match() -> None:
    """Only one of the two could be given to the fused operator."""
    result = fused(lambda x, u, w, b: x.float() * torch.sigmoid(x) * u.float(), X, X, dtype=torch.bfloat16)
    assert fused_rows(result) == {}


def test_a_value_inside_that_is_used_elsewhere_blocks() -> None:
    def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return w * (x * scale) + scale

    result = fused(norm, X)
    assert fused_rows(result) == {}
    (miss,) = result.near_misses
    assert miss.pattern == "rms_norm" and "rsqrt inside of it is used by add_1 too" in miss.reason


def test_an_inner_value_that_the_model_returns_blocks() -> None:
    class Both(nn.Module):
        def forward(self, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            activated = F.silu(gate)
            return (activated * up).sum(), activated

    tensors = tuple(torch.randn(2, 4, requires_grad=True) for _ in range(2))
    result = fuse(capture(Both(), args=tensors))
    assert fused_rows(result) == {}
    assert [miss.reason for miss in result.near_misses] == ["silu inside of it is an output of the model"]


def test_what_only_looks_like_a_weight_is_none() -> None:
    """A gate of the tensor's own shape times a norm: the norm alone is fused."""
    result = fused(lambda x, gate, w, b: gate * rms(x), X, X)
    assert fused_rows(result) == {"rms_norm": 1}
    assert operators(result.graph) == ["meshwright.rms_norm.default", "aten.mul.Tensor"]


def test_another_constant_is_a_near_miss() -> None:
    """The factor of the cubic term is not that of any GELU."""

    def almost(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.05 * torch.pow(x, 3.0))))

    result = fused(almost, X)
    assert fused_rows(result) == {}
    assert [(miss.pattern, miss.reason) for miss in result.near_misses] == [("gelu", "mul has other arguments")]


def test_a_dim_that_is_not_the_last_is_no_norm() -> None:
    result = fused(lambda x, w, b: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS) * w, X)
    assert fused_rows(result) == {}


@pytest.mark.parametrize(
    ("pattern", "wrong"),
    [
        ("silu(g) * u", "fused.geglu(g, u)"),
        ("silu(g) * u", "fused.swiglu(u, g)"),
        ("silu(g) * u", "fused.swiglu(g, g)"),
    ],
)
def test_a_wrong_pattern_is_found_out(pattern: str, wrong: str) -> None:
    """Whatever a row claims, the operator must compute what was there."""
    graph = graph_of(lambda g, u, w, b: F.silu(g) * u, X, X)
    rewriter = Rewriter(graph, [Row("wrong", pattern, wrong)], tolerance=ROUNDED)
    assert rewriter.run() is graph
    (miss,) = rewriter.near_misses.values()
    assert miss.reason.startswith("the fused operator gives something else")


def test_a_wrong_gradient_is_found_out() -> None:
    """A value that stands still for backward gives the same result."""
    graph = graph_of(lambda g, u, w, b: F.silu(g) * u, X, X)
    rewriter = Rewriter(graph, [Row("wrong", "silu(g) * u", "fused.swiglu(g, detach(u))")], tolerance=ROUNDED)
    assert rewriter.run() is graph
    (miss,) = rewriter.near_misses.values()
    assert miss.reason.startswith("the fused operator gives something else: inf")


def test_large_sizes_are_checked_on_small_tensors() -> None:
    class Wide(nn.Module):
        def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return (F.silu(gate) * up).sum()

    tensors = tuple(torch.empty(2048, 8192, 53248, device="meta", requires_grad=True) for _ in range(2))
    assert fused_rows(fuse(capture(Wide(), args=tensors))) == {"swiglu": 1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.inner(self.first(x))
        return x + self.outer(self.second(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x).sum()


def test_an_addition_folds_into_the_norm_of_its_own_layer_only() -> None:
    graph = capture(Stack(), args=(torch.randn(2, 8),))
    result = fuse(graph)
    assert fused_rows(result) == {"layer_norm": 4, "add_layer_norm": 3}
    sums = [node for node in result.graph.nodes if node.op == "meshwright.add_layer_norm.default"]
    assert [node.module_path for node in sums] == [f"layers.{layer}.second" for layer in range(3)]
    assert [len(node.outputs) for node in sums] == [2, 2, 2]


class PostNormBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x + self.inner(x))
        return self.second(x + self.outer(x))


@pytest.mark.parametrize(
    ("block", "expected"),
    [(Block, {"layer_norm": 4, "add_layer_norm": 3}), (PostNormBlock, {"layer_norm": 1, "add_layer_norm": 6})],
)
def test_calls_of_one_layer_are_told_apart(block: type[Block], expected: dict[str, int]) -> None:
    """A layer that is called three times: sums are folded within each call, and not across."""
    stack = Stack()
    stack.layers = nn.ModuleList([block()] * 3)
    result = fuse(capture(stack, args=(torch.randn(2, 8),)))
    assert fused_rows(result) == expected


def test_an_addition_folds_through_a_reshape_of_its_rows() -> None:
    class Flat(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            whole = x + self.inner(self.first(x))
            rows = whole.reshape(-1, 8)
            return (rows + self.outer(self.second(rows))).view(x.shape)

    stack = Stack()
    stack.layers = nn.ModuleList(Flat() for _ in range(3))
    result = fuse(capture(stack, args=(torch.randn(2, 3, 8),)))
    assert fused_rows(result) == {"layer_norm": 4, "add_layer_norm": 3}
    sums = [node for node in result.graph.nodes if node.op == "meshwright.add_layer_norm.default"]
    assert [value.shape for node in sums for value in node.outputs] == [(2, 3, 8)] * 6


def test_an_addition_does_not_fold_through_a_reshape_that_makes_other_rows() -> None:
    class Heads(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = (x + self.inner(x)).reshape(*x.shape[:-1], 2, 4)
            return F.layer_norm(heads, (4,)).reshape(x.shape)

    stack = Stack()
    stack.layers = nn.ModuleList(Heads() for _ in range(3))
    assert fused_rows(fuse(capture(stack, args=(torch.randn(2, 8),)))) == {"layer_norm": 4}


def test_nothing_to_fuse_leaves_the_graph_as_it_is() -> None:
    graph = graph_of(lambda x, w, b: torch.exp(x) * w, X)
    result = fuse(graph)
    assert result.graph is graph and not result.matches and not result.near_misses


def test_keys_and_names_stay_unique() -> None:
    graph = fuse(capture(Stack(), args=(torch.randn(2, 8),))).graph
    names = [value.name for node in graph.nodes for value in node.outputs]
    assert len(set(names)) == len(names) and len({node.key for node in graph.nodes}) == len(graph.nodes)
    defined: set[str] = {value.name for value in graph.inputs} | {state.value.name for state in graph.states}
    for node in graph.nodes:
        assert set(node.inputs) <= defined, f"{node.name} uses what is not there yet"
        defined.update(value.name for value in node.outputs)


def test_difference_of_what_is_alike_is_rounding() -> None:
    graph = graph_of(rms_in_float32, X, dtype=torch.bfloat16)
    nodes = [node for node in graph.nodes if node.module_path]
    assert difference(nodes, nodes, graph.values) == 0.0


@pytest.mark.parametrize("text", ["x +", "x", "x @ y", "a.b(x)", "lambda: x"])
def test_what_is_not_in_the_notation_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        parse(text)
