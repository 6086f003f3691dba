"""One trace for many shapes: ``torch.export`` with open sizes, and the graph of any shapes that it holds for.

torch keeps, for every size that a branch or a constant of the model depends on, the condition under which the trace is
right. Where the conditions hold for other shapes, the program with those numbers for its open sizes is the one that
tracing would give; where they do not, the model has to be traced again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from passes.capture.nested_values import Path
from passes.ir.errors import CaptureError
from passes.torch_compat.operators import HigherOrderOperator
from passes.torch_compat.symbolic_sizes import SYMBOLIC, Sizes
from passes.torch_compat.tensor_fields import FakeTensorMode, storage_id

#: Dims whose sizes are left open, by the path of the input.
OpenDims = Mapping[Path, Collection[int]]


@dataclasses.dataclass(frozen=True)
class StaticProgram:
    """An exported program with numbers for its open sizes; its fields are those of ``ExportedProgram``."""

    graph_module: fx.GraphModule
    graph_signature: Any
    constants: Mapping[str, Any]

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph


def with_sizes(program: ExportedProgram, shapes: Mapping[str, tuple[int, ...]]) -> StaticProgram:
    """A copy of ``program`` for these shapes of its inputs, by the names of their placeholders.

    Raises:
        ValueError: if the trace does not hold for these shapes.
        CaptureError: for a program that cannot be copied so: with branches inside.
    """
    inputs = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    environment = next(iter(inputs.values())).fake_mode.shape_env
    opened = [tuple(inputs[name].shape) for name in shapes]
    sizes = Sizes(environment, program.range_constraints, opened, list(shapes.values()))
    values = _Values(sizes, [leaf for node in program.graph.nodes for leaf in _tensors(node.meta.get("val"))])
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, SYMBOLIC):
            copies[node] = sizes.number(value)
            continue
        if node.op == "get_attr" or isinstance(node.target, HigherOrderOperator):
            raise CaptureError("branches and regions are traced for each shape")
        if _checks_sizes(node):
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
        if value is not None:
            copies[node].meta["val"] = values.of(value)
    return StaticProgram(fx.GraphModule(program.graph_module, graph), program.graph_signature, program.constants)


def _checks_sizes(node: fx.Node) -> bool:
    """Whether a call gives nothing and takes no tensor."""
    is_silent = node.op == "call_function" and node.meta.get("val") is None
    return is_silent and not any(tuple(_tensors(source.meta.get("val"))) for source in node.all_input_nodes)


class _Values:
    """Stand-ins of fixed shapes for those of a trace; what shared memory shares it again."""

    def __init__(self, sizes: Sizes, tensors: list[torch.Tensor]) -> None:
        self._sizes = sizes
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._extents: dict[int, int] = {}
        self._memory: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            shape, strides, offset = self._layout(tensor)
            extent = offset + sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1
            key = storage_id(tensor)
            self._extents[key] = max(self._extents.get(key, 0), extent if 0 not in shape else 0)

    def _layout(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        numbers = self._sizes.numbers
        return numbers(tensor.shape), numbers(tensor.stride()), self._sizes.number(tensor.storage_offset())

    def of(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self.of(entry) for entry in value)
        if not isinstance(value, torch.Tensor):
            return self._sizes.number(value)
        key, (shape, strides, offset) = storage_id(value), self._layout(value)
        with self._mode, torch.no_grad():
            if key not in self._memory:
                self._memory[key] = torch.empty(self._extents[key], dtype=value.dtype, device=value.device)
            if self._memory[key].dtype != value.dtype:
                raise CaptureError("a view of another dtype is traced for each shape")
            stand_in = self._memory[key].as_strided(shape, strides, offset).detach()
        return stand_in.requires_grad_(value.requires_grad)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    leaves = value if isinstance(value, (list, tuple)) else [value]
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
