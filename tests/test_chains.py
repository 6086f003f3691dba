"""Finding chains: what they take in, where they end, and that programs with them compute what they did."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import planner
from passes.chains import INDUCTOR, TRITON, OperatorChain, chain_up
from passes.chains.find_chains import MOST_OPERANDS
from passes.emit import emit
from passes.ir.graph import Ref
from passes.shard import Compute
from runtime.program_tools.typecheck import typecheck
from tests.chain_cases import graphs
from tests.chain_graphs import GraphMaker, chains_of, ops_of, programs_of, random_tensors, run, sharded_of

SHAPE = (3, 4, 5)


def the_chain(maker: GraphMaker, *outputs: Ref) -> OperatorChain:
    (chain,) = chains_of(sharded_of(maker.graph(*outputs)))
    return chain


def test_a_chain_goes_from_operator_to_operator() -> None:
    maker = GraphMaker()
    x, bias = maker.input("x", SHAPE), maker.weight("linear.bias", SHAPE[-1:])
    chain = the_chain(maker, maker.call("relu", maker.call("mul.Tensor", maker.call("add.Tensor", x, bias), 0.5)))
    assert ops_of(chain) == ["add", "mul", "relu"] and chain.backend == TRITON
    assert [local.value.name for local in chain.inputs] == ["x", "linear_bias"] and len(chain.outputs) == 1
    whole, row = 60 * 8, 5 * 8
    assert (chain.bytes_apart, chain.bytes_fused) == (6 * whole + row, 2 * whole + row)


def test_what_is_used_elsewhere_is_an_output_too() -> None:
    maker = GraphMaker()
    x = maker.input("x", SHAPE)
    middle = maker.call("exp", x)
    product = maker.call("matmul", middle, maker.weight("w", (5, 5)))
    chain = the_chain(maker, maker.call("mul.Tensor", middle, 2.0), product)
    assert ops_of(chain) == ["exp", "mul"]
    assert [local.value.name for local in chain.outputs] == ["exp_0", "mul_2"]


def test_one_operator_stays_what_it_is() -> None:
    maker = GraphMaker()
    x, weight = maker.input("x", (4, 5)), maker.weight("w", (5, 5))
    product = maker.call("matmul", maker.call("relu", x), weight)
    assert chains_of(sharded_of(maker.graph(maker.call("relu", product)))) == []


def test_an_operator_between_keeps_two_apart() -> None:
    """``exp(x)`` and what uses it together with a product of it cannot be one kernel."""
    maker = GraphMaker()
    start = maker.call("neg", maker.call("exp", maker.input("x", (5, 5))))
    product = maker.call("matmul", start, maker.weight("w", (5, 5)))
    end = maker.call("relu", maker.call("mul.Tensor", start, product))
    assert [ops_of(chain) for chain in chains_of(sharded_of(maker.graph(end)))] == [["exp", "neg"], ["mul", "relu"]]


def test_views_end_a_chain() -> None:
    maker = GraphMaker()
    y = maker.call("neg", maker.call("exp", maker.input("x", (4, 6))))
    z = maker.call("relu", maker.call("sin", maker.call("reshape", y, [6, 4])))
    assert [ops_of(chain) for chain in chains_of(sharded_of(maker.graph(z)))] == [["exp", "neg"], ["sin", "relu"]]


def test_random_operators_are_left_out() -> None:
    maker = GraphMaker()
    y = maker.call("dropout", maker.call("neg", maker.call("exp", maker.input("x", (4, 6)))), 0.1, True)
    z = maker.call("relu", maker.call("sin", y))
    assert [ops_of(chain) for chain in chains_of(sharded_of(maker.graph(z)))] == [["exp", "neg"], ["sin", "relu"]]


def test_a_kernel_has_as_many_tensors_as_registers_can_address() -> None:
    """An unrolled scan adds a tensor at each step."""
    maker = GraphMaker()
    total = maker.input("x", SHAPE)
    for step in range(MOST_OPERANDS + 20):
        total = maker.call("add.Tensor", total, maker.input(f"step_{step}", SHAPE))
    chains = chains_of(sharded_of(maker.graph(total)))
    assert len(chains) == 2 and sum(len(ops_of(chain)) for chain in chains) == MOST_OPERANDS + 20
    assert max(len(chain.inputs) + len(chain.outputs) for chain in chains) == MOST_OPERANDS


def test_readers_of_one_tensor_share_a_kernel() -> None:
    maker = GraphMaker()
    angles = maker.input("angles", (4, 8))
    halves = [maker.call("to.dtype", maker.call(name, angles), "dtype:float32") for name in ("cos", "sin")]
    chain = the_chain(maker, *halves)
    assert ops_of(chain) == ["cos", "to", "sin", "to"] and len(chain.inputs) == 1 and len(chain.outputs) == 2


def test_a_chain_may_end_in_a_row_reduction() -> None:
    maker = GraphMaker()
    x = maker.input("x", SHAPE)
    square = maker.call("mul.Tensor", x, x)
    chain = the_chain(maker, maker.call("mean.dim", square, [-1], True))
    assert ops_of(chain) == ["mul", "mean"] and chain.backend == TRITON


@pytest.mark.parametrize(
    ("spell", "reason"),
    [
        (lambda m, x: m.call("softmax.int", m.call("mul.Tensor", x, 0.5), -1), "softmax is a reduction"),
        (
            lambda m, x: m.call("sub.Tensor", x, m.call("mean.dim", x, [-1], True)),
            "mean is a reduction whose rows are used again",
        ),
        (lambda m, x: m.call("mul.Tensor", m.call("expm1", x), x), "expm1 has no gradient in the fuser's table"),
    ],
)
def test_what_a_compiler_does_better_is_left_to_it(spell, reason: str) -> None:  # type: ignore[no-untyped-def]
    maker = GraphMaker()
    chain = the_chain(maker, spell(maker, maker.input("x", SHAPE)))
    assert chain.backend == INDUCTOR and reason in chain.reason
    source = emit(chain_up(sharded_of(maker.graph(*map(Ref, [local.value.name for local in chain.outputs]))))).source
    assert f"# For torch.compile: {chain.reason}." in source and 'backend="inductor"' in source
    assert "@triton.jit" not in source


def test_a_plan_without_fusion_has_no_chains() -> None:
    maker = GraphMaker()
    sharded = sharded_of(maker.graph(maker.call("neg", maker.call("exp", maker.input("x", (4, 6))))))
    unfused = dataclasses.replace(sharded, plan=dataclasses.replace(sharded.plan, fusion=None))
    assert chain_up(unfused) is unfused and len(chains_of(sharded)) == 1


def test_constants_stay_apart() -> None:
    maker = GraphMaker()
    x = maker.input("x", (4, 6))
    positions = maker.call("arange", 6, dtype="dtype:float64", name="positions")
    scaled = maker.call("mul.Tensor", maker.call("add.Tensor", positions, 1.0), 2.0)
    graph = maker.graph(maker.call("mul.Tensor", x, scaled))
    nodes = tuple(dataclasses.replace(node, constant=node is not graph.nodes[-1]) for node in graph.nodes)
    assert chains_of(sharded_of(graph.replace(nodes=nodes))) == []


def test_a_program_reports_its_chains() -> None:
    maker = GraphMaker()
    x = maker.input("x", SHAPE)
    first = maker.call("relu", maker.call("exp", x, path="net.0.act"), path="net.0.act")
    product = maker.call("matmul", first, maker.weight("w", (5, 5)))
    second = maker.call("relu", maker.call("exp", product, path="net.1.act"), path="net.1.act")
    program = emit(chain_up(sharded_of(maker.graph(second))))
    (report,) = program.chains  # two places, one definition
    assert report.operators == ("aten.exp.default", "aten.relu.default")
    assert report.modules == ("net.0.act", "net.1.act") and report.backend == TRITON
    assert program.source.count("_exp_relu(") == 2 and "# of net.0.act, net.1.act" in program.source


def test_many_layers_share_one_kernel() -> None:
    maker = GraphMaker()
    x, weight, bias = maker.input("x", (8, 8)), maker.weight("w", (8, 8)), maker.weight("b", (8,))
    for _ in range(150):
        hidden = maker.call("relu", maker.call("add.Tensor", maker.call("matmul", x, weight), bias))
        x = maker.call("add.Tensor", x, hidden)
    program = emit(chain_up(sharded_of(maker.graph(x))))
    assert len(program.chains) == 1 and program.source.count("_add_relu_add(") == 150


class Capped(nn.Module):
    """A layer that no pattern knows: squared ReLU, a capped gate, a scale, and rows divided by their size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.up(x)).square() * (30 * torch.tanh(self.gate(x) / 30)).sigmoid()
        x = x + self.scale * self.down(hidden)
        return x / (x.abs().mean(-1, keepdim=True) + 1e-3)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Capped(8) for _ in range(3))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        error = x - target
        return {"loss": ((error * error).sum(-1) * 0.5).mean(), "out": x}


def test_sharded_models_with_chains_train_as_on_one_device() -> None:
    torch.manual_seed(0)
    batch = {name: torch.randn(4, 6, 8) for name in ("x", "target")}
    report = planner.verify(Stack(), "dp=2,tp=2", batch=batch, steps=1)
    assert report.ok, report.table()
    assert report.source.count("@triton.jit") > 2 and 'backend="inductor"' in report.source


def made_twice(sharded) -> list[str]:  # type: ignore[no-untyped-def]
    """Operators that are not run exactly once by the chained program."""
    before = [operation.node.name for operation in sharded.main.body if isinstance(operation, Compute)]
    after = []
    for operation in chain_up(sharded).main.body:
        parts = (
            [member.compute for member in operation.members] if isinstance(operation, OperatorChain) else [operation]
        )
        after += [part.node.name for part in parts if isinstance(part, Compute)]
    return sorted(set(before) ^ set(after)) + [name for name in after if after.count(name) > 1]


@settings(max_examples=60, deadline=None)
@given(case=graphs(), seed=st.integers(0, 3))
def test_chained_programs_compute_the_same(case: tuple[GraphMaker, tuple[Ref, ...]], seed: int) -> None:
    maker, outputs = case
    graph = maker.graph(*outputs)
    chained, plain = programs_of(graph)
    tensors = random_tensors(graph, seed)
    for one, other in zip(run(chained, tensors), run(plain, tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)
    typecheck(chained)
    assert made_twice(sharded_of(graph)) == []
