"""The emitted kernels of chains against their plain form in float64: forward and every gradient, interpreted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.emit import Program
from passes.emit.emitted_program import ENTRY_POINT
from passes.ir.graph import Graph, Ref
from runtime import kernels
from runtime.kernels.dispatch import VARIABLE
from runtime.program_tools.recompute import POLICIES, recomputed
from runtime.state.weight_tree import WeightTree
from tests.chain_cases import graphs
from tests.chain_graphs import GraphMaker, programs_of, random_tensors, run
from tests.kernels_harness import DTYPES, IMPLEMENTATIONS, check_accuracy

needs_interpreter = pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="Triton cannot be interpreted here")
pytestmark = needs_interpreter


def the_chain(program: Program) -> kernels.Chain:
    (chain,) = [value for value in program.load().values() if isinstance(value, kernels.Chain)]
    return chain


def interpreted(function: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "triton")
        return function()


def check(graph: Graph, *, seed: int = 0) -> None:
    """The kernels give what the operators give."""
    chained, plain = programs_of(graph)
    tensors = random_tensors(graph, seed)
    ours, theirs = interpreted(lambda: run(chained, tensors)), run(plain, tensors)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, equal_nan=True)


@settings(max_examples=25, deadline=None)
@given(case=graphs(), seed=st.integers(0, 3))
def test_random_chains(case: tuple[GraphMaker, tuple[Ref, ...]], seed: int) -> None:
    maker, outputs = case
    check(maker.graph(*outputs), seed=seed)


def chain_over(shape: Sequence[int], others: Sequence[Sequence[int]], dtype: str = "float64") -> Graph:
    """gelu((x · a₁ + a₂ · …)) · tanh, with operands of these shapes, its row means and the whole."""
    maker = GraphMaker()
    value = maker.input("x", shape, dtype)
    for place, other in enumerate(others):
        operand = maker.input(f"a{place}", other, dtype)
        value = maker.call("mul.Tensor" if place % 2 == 0 else "add.Tensor", value, operand)
    value = maker.call("mul.Tensor", maker.call("gelu", value), maker.call("tanh", value))
    return maker.graph(value)


@pytest.mark.parametrize(
    ("shape", "others"),
    [
        ((3, 7), [(7,)]),
        ((3, 7), [(3, 1), (7,)]),
        ((2, 3, 5), [(), (5,), (2, 3, 1)]),
        ((2, 3, 5), [(3, 5), (1, 3, 1)]),
        ((2, 3, 4, 5), [(2, 1, 1, 5), (4, 5)]),
        ((2, 3, 4, 5), [(1, 3, 1, 5), (2, 1, 4, 1)]),
        ((1, 1), [(1,)]),
        ((300,), [(1,)]),
        ((5, 1, 130), [(130,), (5, 1, 1)]),
        ((0, 7), [(7,)]),
        ((40, 70), [(70,), (40, 1), ()]),
    ],
)
def test_broadcasting(shape: tuple[int, ...], others: list[tuple[int, ...]]) -> None:
    check(chain_over(shape, others))


@pytest.mark.parametrize("width", (1, 7, 33, 130))
@pytest.mark.parametrize("operator", ("sum.dim_IntList", "mean.dim", "amax", "amin"))
@pytest.mark.parametrize("keepdim", (True, False))
def test_row_reductions(operator: str, width: int, keepdim: bool) -> None:
    maker = GraphMaker()
    x, bias = maker.input("x", (3, 5, width)), maker.weight("bias", (width,))
    value = maker.call("mul.Tensor", maker.call("add.Tensor", x, bias), x)
    check(maker.graph(maker.call(operator, value, [-1], keepdim), value))


def test_equal_largest_share_a_gradient() -> None:
    maker = GraphMaker()
    value = maker.call("amax", maker.call("relu", maker.call("neg", maker.input("x", (4, 9)))), [-1])
    check(maker.graph(value))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype) -> None:
    """Rounded once: at least as exact as the operators one by one."""
    name = str(dtype).removeprefix("torch.")
    graph = chain_over((3, 17, 40), [(40,), (3, 17, 1)], name)
    chain = the_chain(programs_of(graph)[0])
    tensors = list(random_tensors(graph).values())
    check_accuracy(chain, chain.plain, tensors, dtype=dtype, implementation="triton")


def test_numbers_that_are_not() -> None:
    maker = GraphMaker()
    x, y = maker.input("x", (8,)), maker.input("y", (8,))
    values = [
        maker.call("relu", x),
        maker.call("clamp", x, -1.0, 1.0),
        maker.call("maximum", x, y),
        maker.call("minimum", x, y),
        maker.call("masked_fill.Scalar", x, maker.call("ne.Tensor", x, x), float("-inf")),
    ]
    graph = maker.graph(*values)
    tensors = {
        "x": torch.tensor([float("nan"), 1.0, float("inf"), -float("inf"), 0.0, -1.0, 1.0, 2.0], dtype=torch.float64),
        "y": torch.tensor([1.0, float("nan"), 1.0, 1.0, 0.0, -1.0, 3.0, 1.0], dtype=torch.float64),
    }
    chained, plain = programs_of(graph)
    ours, theirs = interpreted(lambda: run(chained, tensors)), run(plain, tensors)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, equal_nan=True)


def test_whole_numbers_and_casts() -> None:
    maker = GraphMaker()
    labels, x = maker.input("labels", (4, 6), "int64"), maker.input("x", (4, 6), "float32")
    valid = maker.call("ne.Scalar", labels, -1)
    shifted = maker.call("masked_fill.Scalar", maker.call("add.Tensor", labels, 3), maker.call("logical_not", valid), 0)
    masked = maker.call("mul.Tensor", maker.call("to.dtype", x, "dtype:float16"), valid)
    share = maker.call("to.dtype", maker.call("mul.Tensor", x, 2.5), "dtype:int64")
    check(maker.graph(shifted, masked, maker.call("add.Tensor", share, labels)))


def test_layouts() -> None:
    """Operands that lie otherwise give the same, in memory as torch's operators would leave it."""
    chain = the_chain(programs_of(chain_over((2, 3, 4, 5), [(5,)]))[0])
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    bias = torch.randn(10, dtype=torch.float64)[::2]
    layouts = [
        x.transpose(1, 2).contiguous().transpose(1, 2),
        x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        torch.cat([x, x], -1)[..., :5],
        x[:, :, :1].expand(2, 3, 4, 5),
    ]
    for other in layouts:
        plain = chain.plain(other, bias)
        ours = interpreted(lambda other=other: [chain(other, bias)])[0]  # type: ignore[misc]
        torch.testing.assert_close(ours, plain)
        if other is not layouts[3]:
            assert ours.transpose(1, 2).is_contiguous() == plain.transpose(1, 2).is_contiguous()


def test_saves_no_more_than_the_operators() -> None:
    """Sums are not kept where the result of what follows says enough."""
    maker = GraphMaker()
    x, y, z = (maker.input(name, (16, 8)) for name in "xyz")
    total = maker.call("add.Tensor", maker.call("add.Tensor", x, y), z)
    graph = maker.graph(maker.call("mul.Scalar", maker.call("relu", total), 2.0))
    chain = the_chain(programs_of(graph)[0])
    masked: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        masked.append(tensor)
        return tensor

    leaves = [torch.randn(16, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        interpreted(lambda: [chain(*leaves)])
    assert sum(tensor.nbytes for tensor in masked) == 16 * 8 * 8
    assert chain.shared == {"y": "x", "z": "x"}


def test_sums_alone_cost_nothing_backward() -> None:
    maker = GraphMaker()
    x, y, z = (maker.input(name, (16, 8)) for name in "xyz")
    graph = maker.graph(maker.call("add.Tensor", maker.call("add.Tensor", x, y), z))
    chain = the_chain(programs_of(graph)[0])
    assert chain.backward is None and set(chain.passed) == {"x", "y", "z"}
    check(graph)


def test_a_choice_has_no_gradient_of_what_it_is_made_by() -> None:
    maker = GraphMaker()
    x, y = maker.input("x", (4, 6)), maker.input("y", (4, 6))
    above = maker.call("gt.Scalar", maker.call("exp", x), 1.0)
    graph = maker.graph(maker.call("where.ScalarOther", above, maker.call("sin", y), 0.0))
    chain = the_chain(programs_of(graph)[0])
    assert set(chain.gradients) == {"y"}
    leaves = [torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    (result,) = interpreted(lambda: [chain(*leaves)])
    assert "_ChainRun" in type(result.grad_fn).__name__  # the kernels ran
    assert torch.autograd.grad(result.sum(), leaves[0], allow_unused=True) == (None,)
    check(graph)


def test_without_gradients_nothing_is_written_for_them() -> None:
    maker = GraphMaker()
    graph = maker.graph(maker.call("mul.Scalar", maker.call("exp", maker.input("x", (4, 6))), 2.0))
    chain = the_chain(programs_of(graph)[0])
    x = torch.randn(4, 6, dtype=torch.float64)
    with torch.no_grad():
        (ours,) = interpreted(lambda: [chain(x.requires_grad_())])
    torch.testing.assert_close(ours, x.detach().exp() * 2)


def test_other_dtypes_run_plain() -> None:
    chain = the_chain(programs_of(chain_over((3, 7), [(7,)], "float32"))[0])
    tensors = [torch.randn(3, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)]
    (ours,) = interpreted(lambda: [chain(*tensors)])
    assert ours.dtype == torch.float64 and torch.equal(ours, chain.plain(*tensors))


def test_compiles_without_breaks() -> None:
    program = programs_of(chain_over((3, 7), [(7,)], "float32"))[0]
    entry = program.load()[ENTRY_POINT](WeightTree())
    tensors = [torch.randn(3, 7), torch.randn(7)]
    compiled = torch.compile(entry.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), entry(*tensors))


def test_under_autocast_as_plain() -> None:
    chain = the_chain(programs_of(chain_over((3, 7), [(7,)], "float32"))[0])
    tensors = [torch.randn(3, 7), torch.randn(7)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (ours,) = interpreted(lambda: [chain(*tensors)])
        assert torch.equal(ours, chain.plain(*tensors))


def test_runs_without_triton() -> None:
    """The program is imported and runs where Triton is not installed."""
    program = programs_of(chain_over((3, 7), [(7,)], "float32"))[0]
    assert "@triton.jit" in program.source
    script = (
        "import importlib.util, sys, torch\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "sys.modules['triton'] = None\n"
        "names = {'__name__': 'emitted'}\n"
        "exec(sys.stdin.read(), names)\n"
        "from runtime.state.weight_tree import WeightTree\n"
        "(out,) = names['Program'](WeightTree())(torch.ones(3, 7), torch.ones(7)).values()\n"
        "assert out.shape == (3, 7)\n"
    )
    folder = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", script], input=program.source, text=True, check=True, cwd=folder)


@pytest.mark.parametrize("policy", POLICIES)
def test_runs_again_as_the_policy_says(policy: str) -> None:
    """Between matrix products, whose results a selective policy keeps, chains run again."""
    maker = GraphMaker()
    x, weight, bias = maker.input("x", (6, 8)), maker.weight("w", (8, 8)), maker.weight("b", (8,))
    hidden = maker.call("add.Tensor", maker.call("matmul", x, weight), bias)
    hidden = maker.call("mul.Tensor", maker.call("silu", hidden), hidden)
    graph = maker.graph(maker.call("matmul", hidden, weight))
    chained, plain = programs_of(graph)
    assert len(chained.chains) == 1
    tensors = random_tensors(graph)
    ours = interpreted(lambda: run(chained, tensors, around=lambda entry: recomputed(entry, policy)))
    for one, other in zip(ours, run(plain, tensors), strict=True):
        torch.testing.assert_close(one, other)
