"""What autograd does in one operator call, observed by making the call on the meta device.

No data is touched: the call runs on tensors that have shapes, strides and storages but no memory, under hooks that see
every tensor that autograd packs away, and every kernel that torch dispatches to. ``passes.autograd.recorded_calls``
remembers records per distinct call, so that a model of many equal layers costs one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from passes.autograd.kernels import EXPENSIVE, REPLACEMENTS, WRITE_OVER_PRODUCTS, attention_kernel
from passes.autograd.record import CallRecord, ComputedTensor, RecordedOperand
from passes.capture.interpret import run_node
from passes.ir.graph import Node, map_refs
from passes.torch_compat.operators import TorchDispatchMode
from passes.torch_compat.tensor_fields import storage_id

_Tensors = Sequence[torch.Tensor]


def observed(call: Node, operands: Sequence[RecordedOperand], *, grad: bool, kernels: str) -> CallRecord | None:
    """The record of ``call``, whose inputs are named by their places in ``operands``; arguments as ``record_call``."""
    inputs = [_tensor(operand) for operand in operands]
    function = _function(call, inputs, kernels)
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> None:
        packed.append(tensor)

    watch = _Kernels(keeps=call.op.split(".")[1] not in WRITE_OVER_PRODUCTS)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, _never) if grad else nullcontext()
    try:
        with torch.set_grad_enabled(grad), hooks, watch:
            outputs = function()
    except Exception:  # whatever an operator raises that has no shapes-only kernel
        return None
    return _Matched(inputs, outputs).record(packed, watch)


def _never(_: object) -> torch.Tensor:
    raise NotImplementedError("there is no backward without data")


def _tensor(operand: RecordedOperand) -> torch.Tensor:
    tensor = torch.empty_strided(operand.shape, operand.strides, dtype=getattr(torch, operand.dtype), device="meta")
    return tensor.requires_grad_(operand.requires_grad)


def _function(node: Node, inputs: _Tensors, kernels: str) -> Callable[[], _Tensors]:
    values = {str(place): tensor for place, tensor in enumerate(inputs)}
    if node.op == "aten.scaled_dot_product_attention.default":
        replacement: Callable[..., Any] | None = attention_kernel(kernels)
    else:
        replacement = REPLACEMENTS[kernels].get(node.op)
    if replacement is None:
        return lambda: run_node(node, values, device="meta")
    arguments = map_refs(node.args, lambda ref: values[ref.name])
    keywords = {key: map_refs(value, lambda ref: values[ref.name]) for key, value in node.kwargs.items()}
    return lambda: (replacement(*arguments, **keywords),)


class _Kernels(TorchDispatchMode):
    """Remembers the outputs of every kernel, and of the expensive ones if recomputation can keep (``keeps``) those."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.outputs: list[torch.Tensor] = []
        self.expensive: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = list(_tensors_in(result))
        self.outputs += outputs
        if self.keeps and func.overloadpacket.__name__ in EXPENSIVE:
            self.expensive += outputs
        return result


def _tensors_in(result: Any) -> Iterator[torch.Tensor]:
    for entry in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(entry, torch.Tensor):
            yield entry


class _Matched:
    """Storages of a call, told apart: its inputs', its outputs', and those made inside."""

    def __init__(self, inputs: _Tensors, outputs: _Tensors) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.input_of = {storage_id(tensor): place for place, tensor in reversed(list(enumerate(inputs)))}
        self.output_of = {storage_id(tensor): place for place, tensor in reversed(list(enumerate(outputs)))}

    def record(self, packed: _Tensors, kernels: _Kernels) -> CallRecord:
        kept_outputs, extras = self._split(packed)
        kept_inputs = tuple(sorted({self.input_of[storage_id(t)] for t in packed if storage_id(t) in self.input_of}))
        expensive_outputs, expensive_made = self._split(kernels.expensive)
        return CallRecord(
            kept_inputs=kept_inputs,
            kept_outputs=kept_outputs,
            extras=extras,
            expensive_outputs=expensive_outputs,
            expensive_made=expensive_made,
            is_expensive=bool(kernels.expensive),
            temporary=self._largest_temporary(packed, kernels.outputs),
            strides=tuple(tuple(output.stride()) for output in self.outputs),
            alias_of=tuple(self.input_of.get(storage_id(output)) for output in self.outputs),
        )

    def _largest_temporary(self, packed: _Tensors, outputs: _Tensors) -> ComputedTensor | None:
        saved_storages = {storage_id(tensor) for tensor in packed}
        _, temporaries = self._split([tensor for tensor in outputs if storage_id(tensor) not in saved_storages])
        return max(temporaries, key=lambda entry: entry.num_bytes, default=None)

    def _split(self, tensors: _Tensors) -> tuple[tuple[int, ...], tuple[ComputedTensor, ...]]:
        outputs: set[int] = set()
        internal: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            storage = storage_id(tensor)
            if storage in self.input_of:
                continue
            if storage in self.output_of:
                outputs.add(self.output_of[storage])
            else:
                internal.setdefault(storage, tensor)
        return (
            tuple(sorted(outputs)),
            tuple(
                ComputedTensor(tensor.untyped_storage().nbytes(), *self._like(tensor))
                for tensor in internal.values()
                if tensor.numel()
            ),
        )

    def _like(self, tensor: torch.Tensor) -> tuple[str, int]:
        """The output or input that is cut as ``tensor`` is: of its size, else sharing most leading dims."""
        groups = (("output", self.outputs), ("input", self.inputs))
        for kind, group in groups:
            for place, other in enumerate(group):
                if other.numel() == tensor.numel() and tensor.numel() > 1:
                    return kind, place
        best = max(
            (
                (_common(tensor.shape, other.shape), kind, place)
                for kind, group in groups
                for place, other in enumerate(group)
            ),
            key=lambda entry: entry[0],
        )
        return best[1], best[2]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading dims of equal size."""
    count = 0
    for left, right in zip(first, second):
        if left != right:
            break
        count += 1
    return count
