"""What compilers for GPUs fuse in the place of our operators computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime import kernels
from runtime.kernels.definitions import DEFINITIONS, definition_for_compiler

ROWS, WIDTH = (2, 3, 4), 8
#: Operands of each operator: shapes, and what is no tensor.
OPERANDS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "layer_norm": ((ROWS, (WIDTH,), (WIDTH,), 1e-5), (ROWS, None, None, 1e-3), (ROWS, (WIDTH,), None, 1e-5)),
    "add_layer_norm": ((ROWS, ROWS, (WIDTH,), (WIDTH,), 1e-5),),
    "rms_norm": ((ROWS, (WIDTH,), 1e-5), (ROWS, (WIDTH,), 1e-5, 1.0), (ROWS, None, 1e-5)),
    "add_rms_norm": ((ROWS, ROWS, (WIDTH,), 1e-5), (ROWS, ROWS, (WIDTH,), 1e-5, 1.0)),
    "swiglu": ((ROWS, ROWS),),
    "geglu": ((ROWS, ROWS), (ROWS, ROWS, "tanh")),
    "bias_gelu": ((ROWS, (WIDTH,)), (ROWS, (WIDTH,), "tanh")),
    "rotary": ((ROWS, "tables"), (ROWS, "tables", True), (ROWS, "half tables")),
    "rotary_pair": ((ROWS, (2, 1, 4), "tables"), (ROWS, ROWS, "tables", True)),
}
CASES = [(name, which) for name, cases in OPERANDS.items() for which in range(len(cases))]


def operands_of(name: str, which: int, dtype: torch.dtype) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    operands: list[Any] = []
    for one in OPERANDS[name][which]:
        if isinstance(one, tuple):
            shape = (*one, WIDTH) if len(one) > 1 else one
            operands.append(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_())
        elif isinstance(one, str) and one.endswith("tables"):
            width = WIDTH // 2 if one.startswith("half") else WIDTH
            angles = torch.randn(4, width // 2, generator=generator, dtype=torch.float64).repeat(1, 2)
            operands += [angles.cos().to(dtype), angles.sin().to(dtype)]
        else:
            operands.append(one)
    return operands


def results_of(function: Callable[..., Any], operands: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, and gradients of the trained operands."""
    outputs = function(*operands)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    trained = [one for one in operands if isinstance(one, torch.Tensor) and one.requires_grad]
    total = sum((output * torch.linspace(0.5, 1.5, output.numel()).view_as(output)).sum() for output in outputs)
    return outputs, list(torch.autograd.grad(total, trained))


def test_every_definition_is_tried() -> None:
    assert OPERANDS.keys() == DEFINITIONS.keys()


@pytest.mark.parametrize(("name", "which"), CASES)
def test_definitions_are_the_operators(name: str, which: int) -> None:
    operands = operands_of(name, which, torch.float64)
    ours, inlined = (results_of(one, operands) for one in (getattr(torch.ops.meshwright, name), DEFINITIONS[name]))
    for expected, got in zip((*ours[0], *ours[1]), (*inlined[0], *inlined[1]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "which"), CASES)
def test_definitions_compute_wide_and_round_once(name: str, which: int) -> None:
    operands = operands_of(name, which, torch.bfloat16)
    expected, _ = results_of(getattr(torch.ops.meshwright, name), operands)
    outputs, _ = results_of(DEFINITIONS[name], operands)
    for ours, got in zip(expected, outputs, strict=True):
        # One unit in the last of bfloat16's places: sums are in another order in float32.
        torch.testing.assert_close(got, ours, rtol=2**-7, atol=1e-6)


def everything(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    total, normal = kernels.add_layer_norm(x, x, weight, weight, 1e-5)
    total, other = kernels.add_rms_norm(total, kernels.layer_norm(normal, weight, None, 1e-5), weight, 1e-5)
    gated = kernels.swiglu(other, kernels.geglu(total, kernels.rms_norm(normal, weight, 1e-5)))
    query, key = kernels.rotary_pair(gated, kernels.bias_gelu(gated, weight), cos, sin)
    return kernels.rotary(query * key, cos, sin).square().sum()


def compiled_operators(operands: list[torch.Tensor]) -> tuple[set[str], torch.Tensor]:
    """Our operators in the graph that a compiler gets, and the gradient of the first operand."""
    torch.compiler.reset()
    names: set[str] = set()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        names.update(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("meshwright"))
        return graph.forward

    loss = torch.compile(everything, backend=backend, fullgraph=True)(*operands)
    return names, torch.autograd.grad(loss, operands[0])[0]


def test_compilers_for_gpus_get_definitions_and_others_get_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    x, cos, sin = operands_of("rotary", 0, torch.float64)
    operands = [x, torch.rand(WIDTH, dtype=torch.float64), cos, sin]
    expected = torch.autograd.grad(everything(*operands), x)[0]
    assert definition_for_compiler("rms_norm", x) is None
    names, gradient = compiled_operators(operands)
    assert len(names) == len(DEFINITIONS)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
    monkeypatch.setattr("runtime.kernels.library.definition_for_compiler", lambda name, _: DEFINITIONS.get(name))
    names, gradient = compiled_operators(operands)
    assert names == set()
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
