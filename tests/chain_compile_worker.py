"""Compile the kernels of some chains for a GPU of compute capability 9.0, without one; prints a word for each."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from passes.ir.graph import Graph
from runtime import kernels
from runtime.kernels import chain as chain_module
from tests.chain_graphs import GraphMaker, programs_of

_POINTERS = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip


class Compiled:
    """Stands in for a kernel: compiles it for a launch instead of running it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.compile

    def compile(self, *given: Any, num_warps: int, **options: Any) -> None:
        arguments = {**dict(zip(self.kernel.arg_names, given)), **options}
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        constants = {name: value for name, value in arguments.items() if name not in tensors}
        signature = {
            name: _POINTERS[tensors[name].dtype] if name in tensors else "constexpr" for name in self.kernel.arg_names
        }
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants)
        done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        assert done.asm["ptx"]
        print("compiled")


def compile_both(graph: Graph) -> None:
    """The forward and the backward kernel of the only chain of a graph."""
    (chain,) = [item for item in programs_of(graph)[0].load().values() if isinstance(item, kernels.Chain)]
    chain.forward, chain.backward = Compiled(chain.forward), Compiled(chain.backward)
    values = [*graph.inputs, *(state.value for state in graph.states)]
    by_name = {value.name: value for value in values}
    tensors = []
    for name in chain.inputs:
        value = by_name[name]
        tensor = torch.zeros(value.shape, dtype=getattr(torch, value.dtype))
        tensors.append(tensor.requires_grad_(value.requires_grad))
    results = chain(*tensors)
    outputs = list(results) if isinstance(results, tuple) else [results]
    ends = [output for output in outputs if output.requires_grad]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends])


def walking() -> Graph:
    """Every kind of sum, a row reduction, and most of the functions."""
    maker = GraphMaker()
    x, bias = maker.input("x", (2, 64, 256), "bfloat16"), maker.weight("bias", (256,), "bfloat16")
    column, number = maker.input("column", (2, 64, 1), "bfloat16"), maker.input("number", (), "bfloat16")
    value = maker.call("gelu", maker.call("add.Tensor", x, bias))
    value = maker.call("mul.Tensor", maker.call("tanh", value), column)
    value = maker.call("maximum", maker.call("div.Tensor", value, number), maker.call("sigmoid", x))
    return maker.graph(value, maker.call("amax", maker.call("clamp", value, -1.0, 1.0), [-1]))


def flat() -> Graph:
    """Elements alone, a value that is kept, and whole numbers."""
    maker = GraphMaker()
    x, y = (maker.input(name, (64, 512), "bfloat16") for name in "xy")
    labels = maker.input("labels", (64, 512), "int64")
    value = maker.call("relu", maker.call("add.Tensor", x, y))
    known = maker.call("ne.Scalar", labels, -100)
    return maker.graph(maker.call("where.ScalarOther", known, maker.call("mul.Tensor", value, value), 0.0))


def wide() -> Graph:
    """float64, with operands that walk through the rows in their own ways."""
    maker = GraphMaker()
    x, mask = maker.input("x", (2, 3, 40, 50)), maker.input("mask", (2, 1, 1, 50), "bool")
    value = maker.call("mul.Tensor", maker.call("sin", x), maker.input("scale", (3, 1, 50)))
    return maker.graph(maker.call("masked_fill.Scalar", value, mask, 0.1))


if __name__ == "__main__":
    chain_module.runs_triton = lambda tensor: True
    for make in (walking, flat, wide):
        compile_both(make())
