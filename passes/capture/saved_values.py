"""What ``torch.autograd.grad`` inside a model saved in its forward pass and reads in its backward.

Autograd hands a saved tensor back as a new object, which the tracer takes for a constant that it has never seen. It
still shares its memory with the value that was traced: the node with this memory and this view of it is meant.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from passes.canonicalise.gradient_carriers import passes_gradient
from passes.capture.open_shapes import StaticProgram
from passes.ir.errors import CaptureError
from passes.torch_compat.tensor_fields import FakeTensor, storage_id


def reconnect_saved_values(program: ExportedProgram | StaticProgram, constants: Collection[int] = ()) -> None:
    """Give the users of a saved value the node that computed it, so that gradients of gradients flow through it.

    Args:
        constants: identities of the values without data that stay constants of the program.

    Raises:
        CaptureError: for a value that no node computed.
    """
    saved = {node: value for node, value in lifted_values(program).items() if id(value) not in constants}
    if not saved:
        return
    computed = _Computed()
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            if source in saved:
                _reconnect(node, source, saved[source], computed)
        if node not in saved and isinstance(node.meta.get("val"), torch.Tensor):
            computed.add(node)


def lifted_values(program: ExportedProgram | StaticProgram) -> dict[fx.Node, torch.Tensor]:
    """Placeholders of the constants that are no real tensors."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    lifted: dict[fx.Node, torch.Tensor] = {}
    for spec in program.graph_signature.input_specs:
        data = program.constants.get(spec.target) if spec.target is not None else None
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.CONSTANT_TENSOR and isinstance(data, FakeTensor) and node.users:
            lifted[node] = data
    return lifted


class _Computed:
    """Nodes by the memory of their values, in the order of the graph."""

    def __init__(self) -> None:
        self._views: dict[Any, fx.Node] = {}
        self._whole: dict[Any, fx.Node] = {}
        self._carrying: set[fx.Node] = set()

    def add(self, node: fx.Node) -> None:
        value = node.meta["val"]
        inherits = not self._carrying.isdisjoint(node.all_input_nodes) and passes_gradient(node)
        carries = value.requires_grad if node.op == "placeholder" else inherits
        if carries:
            self._carrying.add(node)
        # The latest counts: before it the memory may have held something else (an operator in place).
        self._views[_view(value), carries] = node
        if value.is_contiguous():
            self._whole[_memory(value), carries] = node

    def same(self, value: torch.Tensor, *, carries: bool) -> fx.Node | None:
        """The node of this view. A value and its ``detach`` are one memory: ``carries`` says which of them is meant."""
        return self._views.get((_view(value), carries))

    def whole(self, value: torch.Tensor, *, carries: bool) -> fx.Node | None:
        """A node whose value is all of this memory, in order."""
        return self._whole.get((_memory(value), carries))


def _reconnect(user: fx.Node, source: fx.Node, value: torch.Tensor, computed: _Computed) -> None:
    # Autograd keeps an operator's own result without its history, and detaches it when it is asked for.
    detached = user.target is torch.ops.aten.detach.default and not value.requires_grad
    for carries in (True, False) if detached else (value.requires_grad,):
        node = computed.same(value, carries=carries)
        base = computed.whole(value, carries=carries)
        if node is None and base is not None:
            node = _viewed(base, value, user)
        if node is not None:
            break
    else:
        raise CaptureError(
            f"a tensor of shape {list(value.shape)} comes from outside of what was traced: compute it with tensor "
            "operations of the model, or keep it as a buffer"
        )
    if detached:
        user.replace_all_uses_with(node)
    else:
        user.replace_input_with(source, node)


def _viewed(base: fx.Node, value: torch.Tensor, user: fx.Node) -> fx.Node | None:
    """``value`` as a reshaped and permuted ``base``, or None if it is another kind of view."""
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    if not value.permute(order).is_contiguous():
        return None
    node = _call(user, torch.ops.aten.reshape.default, base, [value.shape[dim] for dim in order])
    return _call(user, torch.ops.aten.permute.default, node, [order.index(dim) for dim in range(value.dim())])


def _call(user: fx.Node, op: Any, source: fx.Node, argument: list[int]) -> fx.Node:
    """A new node before ``user``, in the same module."""
    with user.graph.inserting_before(user):
        node = user.graph.call_function(op, (source, argument))
    node.meta = {**user.meta, "val": op(source.meta["val"], argument)}
    return node


def _view(value: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one view of one memory."""
    return (*_memory(value), value.shape, value.stride())


def _memory(value: torch.Tensor) -> tuple[Any, ...]:
    return storage_id(value), value.storage_offset(), value.numel(), value.dtype
