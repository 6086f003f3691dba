"""Chains that ``torch.compile`` makes kernels of: one operator to recomputation and to modes around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from runtime import kernels
from runtime.kernels import sharing
from runtime.program_tools.recompute import POLICIES, recomputed


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every run of a compiled graph; chains are compiled here as on a GPU, by AOTAutograd alone."""
    graphs_run: list[object] = []
    compile_, make = torch.compile, torch._dynamo.lookup_backend("aot_eager")

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled = make(graph, inputs)

        def run(*arguments: Any) -> Any:
            graphs_run.append(graph)
            return compiled(*arguments)

        return run

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=backend, **options))
    # What is written alike was compiled by an earlier test perhaps.
    monkeypatch.setattr(sharing, "_compiled", {})
    monkeypatch.setattr(kernels.Chain, "_is_on_device", lambda chain, tensors: True)
    return graphs_run


def make_chain() -> kernels.Chain:
    return kernels.Chain(plain=lambda x, y: ((x + y).softmax(-1) * y).tanh(), backend="inductor")


def gradients(operator: Callable[..., torch.Tensor], policy: str) -> list[torch.Tensor]:
    """Of a region with the operator between two matrix products, in float64."""
    generator = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(6, 6, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3))
    result = recomputed(lambda x: operator(x @ up, x) @ down, policy)(x)
    return [result, *torch.autograd.grad(result.square().sum(), (x, up, down))]


#: The policies that run the chain once more in the backward pass.
AGAIN = ("selective", "full")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs_what_is_compiled(policy: str, runs: list[object]) -> None:
    chain = make_chain()
    ours, plain = gradients(chain, policy), gradients(chain.plain, "none")
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert len(runs) == (2 if policy in AGAIN else 1) and len(set(map(id, runs))) == 1


class Listed(TorchFunctionMode):
    """A mode that reads an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.listed.append(func)
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_none_of_its_parts(runs: list[object]) -> None:
    chain, x = make_chain(), torch.randn(3, 4)
    with Listed() as mode:
        result = chain(x, x)
        x.abs()
    assert len(runs) == 1 and torch.softmax not in mode.listed
    assert torch.Tensor.softmax not in mode.listed and torch.Tensor.abs in mode.listed
    torch.testing.assert_close(result, chain.plain(x, x))


def test_a_mode_that_sees_every_operator_is_shown_them(runs: list[object]) -> None:
    chain, x = make_chain(), torch.randn(3, 4)
    with FlopCounterMode(display=False):
        assert torch.equal(chain(x, x), chain.plain(x, x))
    assert runs == []
    for _ in range(2):
        chain(x, x)
    assert len(runs) == 2 and runs[0] is runs[1]


def test_on_a_processor_plain() -> None:
    chain, x = make_chain(), torch.randn(3, 4)
    assert torch.equal(chain(x, x), chain.plain(x, x)) and chain._compiled is None
