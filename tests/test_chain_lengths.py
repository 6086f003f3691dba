"""Calls of other lengths: what is compiled and measured for one is used for the next."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from runtime import kernels
from runtime.kernels import autotune, sharing
from runtime.kernels.chain_call import Chain
from tests.chain_graphs import GraphMaker, programs_of
from tests.test_chain_launch import KernelThatDoesNothing, chain_of

LENGTHS = range(1040, 2048, 16)


def code_of(launches: list[tuple[tuple[int, ...], dict[str, Any]]]) -> set[tuple[Any, ...]]:
    """What of a launch is part of a kernel's code: tiles, warps, and which sizes are none."""
    return {
        (options["TILE"], options["num_warps"], tuple(size is None for size in options["SPACE"]))
        for _, options in launches
    }


def test_lengths_share_machine_code() -> None:
    forward, backward = KernelThatDoesNothing(), KernelThatDoesNothing()
    chain = chain_of(forward, backward)
    for length in LENGTHS:
        x, bias = torch.empty(1, length, 512), torch.empty(512)
        chain.run([x, bias], extra=False)
        chain.run_backward([x], [x, bias], (1, length, 512), {"x": (1, length, 512), "bias": (512,)})
    assert len(forward.launches) == len(LENGTHS)
    assert len(code_of(forward.launches)) == 1 and len(code_of(backward.launches)) == 1


def test_programs_of_two_lengths_share_kernels() -> None:
    chains = []
    for length in (4, 6):
        maker = GraphMaker()
        x = maker.input("x", (3, length, 8), "float32")
        graph = maker.graph(maker.call("mul.Tensor", maker.call("exp", x), maker.call("sigmoid", x)))
        (chain,) = [item for item in programs_of(graph)[0].load().values() if isinstance(item, kernels.Chain)]
        chains.append(chain)
    assert chains[0].forward is chains[1].forward and chains[0].backward is chains[1].backward
    assert chains[0].forward is not chains[0].backward


def test_sizes_are_rounded_to_a_few() -> None:
    rounded = [autotune.rounded_up(size) for size in range(1, 10_000)]
    assert all(size <= one <= 1.25 * size for size, one in enumerate(rounded, start=1))
    assert len({autotune.rounded_up(size) for size in range(4096, 8192)}) == 5


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that ``torch.compile`` was given; a chain for the compiler runs as on a GPU."""
    seen: list[Any] = []

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=note))
    monkeypatch.setattr(Chain, "_is_on_device", lambda chain, tensors: True)
    monkeypatch.setattr(sharing, "_compiled", {})
    return seen


def test_a_compiled_chain_takes_any_length(graphs: list[Any]) -> None:
    chain = kernels.Chain(plain=lambda x: x.softmax(-1) * 2, backend="inductor")
    for length in range(3, 23):
        x = torch.randn(4, length, 2 * length)
        torch.testing.assert_close(chain(x), x.softmax(-1) * 2)
    assert len(graphs) == 2, "for the first length, and for all others"


def test_what_is_not_compiled_is_said(graphs: list[Any]) -> None:
    def capped_plain(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1) * 3

    chain = kernels.Chain(plain=capped_plain, backend="inductor")
    with torch._dynamo.config.patch(recompile_limit=2):
        chain(torch.randn(3, 4)), chain(torch.randn(3, 4).double())
        x = torch.randn(3, 4).bfloat16()
        with pytest.warns(UserWarning, match="the chain capped was called with more kinds of tensors"):
            assert torch.equal(chain(x), capped_plain(x))
        assert torch.equal(chain(x), capped_plain(x))
    assert len(graphs) == 2
