"""Turn in-place operators into functional ones.

A write through a view is carried to the tensor it views (``slice_scatter`` and the like), and other views of that
tensor are taken again where they are used later. A buffer that was written gets its final value by one
``aten.copy_`` at the end of the graph. Writes to graph inputs do not reach the caller's tensors; writes to parameters
are noted on their placeholders.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from passes.canonicalise.fx import argument, aten, insert, is_tensor, replace, shape, value, writes
from passes.canonicalise.gradient_carriers import nodes_with_gradient
from passes.canonicalise.parameter_writes import note_parameter_write
from passes.ir.errors import CaptureError
from passes.torch_compat.operators import OpOverload, overload_name, schema, tree_map
from passes.torch_compat.tensor_fields import storage_id


def functionalise(module: fx.GraphModule, buffers: Collection[str], trainable: Collection[str]) -> None:
    """Rewrite every write of the graph.

    Args:
        buffers, trainable: names of the placeholders that are buffers, and of those that carry a gradient.

    Raises:
        CaptureError: for a write without functional form, and for one to a parameter that cannot be done before a call.
    """
    if any(writes(node) for node in module.graph.nodes if node.op == "call_function"):
        _Functionaliser(module.graph, buffers, trainable).run()


class _Functionaliser:
    """Walks the graph once.

    Attributes:
        views: view node → the node it views.
        version: root of a set of views → how often it was written.
        current: node → (version, node that holds its value now).
        detached: nodes that look at the memory of what has a gradient, without it.
    """

    def __init__(self, graph: fx.Graph, buffers: Collection[str], trainable: Collection[str]) -> None:
        self.graph = graph
        self.buffers = buffers
        detaching = [node for node in graph.nodes if node.target is aten.detach.default]
        carrying = nodes_with_gradient(graph, trainable) if detaching else set()
        self.detached = {node for node in detaching if node.args[0] in carrying}
        self.views: dict[fx.Node, fx.Node] = {}
        self.version: dict[fx.Node, int] = {}
        self.current: dict[fx.Node, tuple[int, fx.Node]] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op in ("placeholder", "get_attr"):
                continue
            first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
            written = writes(node) if node.op == "call_function" else []
            if written and (written != [0] or first is None):
                raise CaptureError(f"{node.target} writes to an argument that is not its first")
            if first is not None and not written and self.is_view(node, first):
                self.views[node] = first
                self.current[node] = (self.version.get(self.root(node), 0), node)
            if self.version:
                _map_inputs(node, partial(self.now, user=node))
            if written and first is not None:
                self.write(node, first)
        self.store_buffers()

    def is_view(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether ``node`` looks at the memory of ``source``; an output of ``split`` does, one of ``topk`` does not.

        A literal is copied where the model's code makes it, though its tensor without data is not.
        """
        if node.target is operator.getitem and source not in self.views:
            return False
        if node.target is aten.lift_fresh_copy.default:
            return False
        return _same_memory(node, source)

    def root(self, node: fx.Node) -> fx.Node:
        while node in self.views:
            node = self.views[node]
        return node

    def now(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """The node that holds the value of ``node`` at ``user``: itself, or the view taken again after a write."""
        version = self.version.get(self.root(node), 0)
        current_version, held = self.current.get(node, (0, node))
        if current_version == version:
            return held
        refreshed = insert(user, _target(node), (self.now(self.views[node], user), *node.args[1:]), like=node)
        refreshed.kwargs = dict(node.kwargs)
        self.current[node] = (version, refreshed)
        return refreshed

    def write(self, node: fx.Node, target: fx.Node) -> None:
        """Replace an in-place call on ``target`` and carry the result to everything that shares its memory."""
        if node.target is aten.set_.source_Tensor and node.args[1] is target:  # as parametrize does to a parameter
            replace(node, target)
            return
        root = self.root(target)
        if root.op == "placeholder" and root.name.startswith("p_"):
            note_parameter_write(node, root, self.views)
            return
        if root.op == "placeholder" and root.name.startswith("c_") and str(node.target) not in _WITHOUT_WRITING:
            raise CaptureError(
                f"the model writes in place ({node.target}) to a tensor that is none of its buffers, parameters and "
                "inputs, which a program does not: register it as a buffer, or write to a clone"
            )
        held = _functional(node)
        updates = [(target, held)]
        while target in self.views:
            if target in self.detached:
                raise CaptureError(
                    "the model writes through .data or detach() into a tensor that has a gradient, or where gradients "
                    "are off, which would be lost: write to a clone"
                )
            view, target = target, self.views[target]
            if view.target is operator.getitem:
                target = self.views[target]
            held = _scatter(view, self.now(target, node), held, node)
            updates.append((target, held))
        self.version[target] = self.version.get(target, 0) + 1
        for member, held in updates:
            self.current[member] = (self.version[target], held)
        node.replace_all_uses_with(updates[0][0])
        self.graph.erase_node(node)

    def store_buffers(self) -> None:
        output = next(iter(reversed(self.graph.nodes)))
        for node in self.version:
            if node.op == "placeholder" and node.name in self.buffers:
                insert(output, aten.copy_.default, (node, self.current[node][1]), like=self.current[node][1])


def _map_inputs(node: fx.Node, function: Callable[[fx.Node], fx.Node]) -> None:
    node.args = fx.map_arg(node.args, function)
    node.kwargs = fx.map_arg(node.kwargs, function)


def _target(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target)
    return node.target


def _same_memory(node: fx.Node, source: fx.Node) -> bool:
    """Whether ``node`` is a view of ``source``."""
    entries = [_tensors(node.meta.get("val")), _tensors(source.meta.get("val"))]
    storages = [storage_id(tensors[0]) for tensors in entries if tensors]
    return len(storages) == 2 and storages[0] == storages[1]


def _tensors(entry: Any) -> list[torch.Tensor]:
    leaves = entry if isinstance(entry, (list, tuple)) else [entry]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _functional(node: fx.Node) -> fx.Node:
    """The functional form of an in-place call, inserted before it, of the written tensor's dtype."""
    assert isinstance(node.target, OpOverload)
    target = node.args[0]
    assert isinstance(target, fx.Node)
    special = _SPECIAL.get(str(node.target))
    if special is not None:
        new = special(node, target)
    else:
        new = insert(node, _functional_overload(node.target), node.args)
        new.kwargs = dict(node.kwargs)
    if value(new).dtype != value(target).dtype:
        new = insert(node, aten.to.dtype, (new, value(target).dtype))
    return new


#: Operators of ``x |= y`` and the like.
_ASSIGNING = {
    "__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor",
    "__ilshift__": "bitwise_left_shift", "__irshift__": "bitwise_right_shift",
}  # fmt: skip


def _functional_overload(target: OpOverload) -> OpOverload:
    name = schema(target).name.split("::")[1]
    packet = getattr(getattr(torch.ops, target.namespace), _ASSIGNING.get(name, name.rstrip("_")), None)
    overload = getattr(packet, overload_name(target), None) if name.endswith("_") else None
    if overload is None and name.endswith("_"):
        overload = _like(getattr(packet, "default", None), target)
    if overload is None:
        raise CaptureError(f"{target} writes to a tensor in place and has no functional form")
    return overload


def _like(overload: OpOverload | None, target: OpOverload) -> OpOverload | None:
    """An overload that takes what ``target`` does: ``floor_divide.default`` for ``floor_divide_.Tensor``."""
    if overload is None or len(schema(overload).arguments) != len(schema(target).arguments):
        return None
    return overload


def _copied(node: fx.Node, target: fx.Node) -> fx.Node:
    source = node.args[1]
    assert isinstance(source, fx.Node)
    if value(source).device != value(target).device:  # a number of the model's code, written to a tensor of a GPU
        source = insert(node, aten.to.device, (source, value(target).device, value(source).dtype))
    if value(source).dtype != value(target).dtype:
        source = insert(node, aten.to.dtype, (source, value(target).dtype))
    if shape(source) != shape(target):
        return insert(node, aten.expand.default, (source, list(shape(target))))
    return insert(node, aten.alias.default, (source,))


def _with_diagonal(node: fx.Node, target: fx.Node) -> fx.Node:
    sizes = shape(target)
    if len(sizes) != 2 or (argument(node, "wrap") and sizes[0] > sizes[1]):
        raise CaptureError(
            "fill_diagonal_ of more than two dims, or that wraps around, has no functional form: write torch.where"
        )
    on_it = insert(node, aten.eye.m, sizes, {"dtype": torch.bool, "device": value(target).device})
    return insert(node, aten.masked_fill.Scalar, (target, on_it, argument(node, "fill_value")))


#: In place by name, and writing no number.
_WITHOUT_WRITING = ("aten.detach_.default", "aten.requires_grad_.default")

_SPECIAL: dict[str, Callable[[fx.Node, fx.Node], fx.Node]] = {
    "aten.copy_.default": _copied,
    "aten.fill_.Scalar": lambda node, target: insert(node, aten.full_like.default, (target, node.args[1])),
    "aten.fill_.Tensor": lambda node, target: _copied(node, target),
    "aten.fill_diagonal_.default": _with_diagonal,
    "aten.zero_.default": lambda node, target: insert(node, aten.zeros_like.default, (target,)),
    "aten.detach_.default": lambda node, target: insert(node, aten.detach.default, (target,)),
    "aten.requires_grad_.default": lambda node, target: insert(node, aten.alias.default, (target,)),
}


def _scatter(view: fx.Node, source: fx.Node, new: fx.Node, before: fx.Node) -> fx.Node:
    """``source`` with ``new`` written where ``view`` looks."""
    name = str(view.target)
    rest: tuple[Any, ...] = view.args[1:]
    if view.target is operator.getitem:
        return _scatter_piece(view, source, new, before)
    if name in _WRITTEN_PARTS:
        return _written_part(_WRITTEN_PARTS[name], source, new, before, rest)
    if name == "aten.transpose.int":
        return insert(before, aten.transpose.int, (new, *rest))
    if name == "aten.permute.default":
        order = [dim % len(rest[0]) for dim in rest[0]]
        return insert(before, aten.permute.default, (new, [order.index(dim) for dim in range(len(order))]))
    if is_tensor(source) and value(source).numel() == value(new).numel() and value(source).dtype == value(new).dtype:
        dims = _order_of_dims(view, source)
        if dims is not None and dims == sorted(dims):
            same = shape(source) == shape(new)
            return new if same else insert(before, aten.reshape.default, (new, list(shape(source))))
        if dims is not None:
            return insert(before, aten.permute.default, (new, [dims.index(dim) for dim in range(len(dims))]))
    raise CaptureError(f"the model writes in place through {name}, which has no functional form: clone it first")


def _order_of_dims(view: fx.Node, source: fx.Node) -> list[int] | None:
    """Which dim of ``source`` each dim of a view of all of it is; ascending where elements keep their order.

    None if it shows them otherwise (windows side by side, conjugates).
    """

    def without_data(node: fx.Node) -> torch.Tensor:
        return torch.empty(shape(node), dtype=value(node).dtype, device="meta")

    whole = without_data(source)
    rest, kwargs = fx.map_arg((view.args[1:], dict(view.kwargs)), without_data)
    # what a view moves to its own device stays where nothing has data
    rest, kwargs = tree_map(lambda each: whole.device if isinstance(each, torch.device) else each, (rest, kwargs))
    shown = _target(view)(whole, *rest, **kwargs)
    if shown.is_conj() or shown.is_neg():
        return None
    if shown.is_contiguous():
        return list(range(shown.dim()))
    left = list(range(whole.dim()))
    order: list[int] = []
    for size, stride in zip(shown.shape, shown.stride()):
        alike = (d for d in left if whole.shape[d] == size and (size == 1 or whole.stride(d) == stride))
        dim = next(alike, None)
        if dim is None:
            return None
        left.remove(dim)
        order.append(dim)
    return None if left else order


def _scatter_piece(view: fx.Node, source: fx.Node, new: fx.Node, before: fx.Node) -> fx.Node:
    """``source`` with ``new`` in place of one output of ``split``, ``chunk`` or ``unbind``."""
    pieces, index = view.args
    assert isinstance(pieces, fx.Node) and isinstance(index, int)
    dim = argument(pieces, "dim", 0)
    if pieces.target is aten.unbind.int:
        return _written_part(aten.select_scatter.default, source, new, before, (dim, index))
    sizes = [piece.shape[dim] for piece in pieces.meta["val"]]
    start = sum(sizes[:index])
    return _written_part(aten.slice_scatter.default, source, new, before, (dim, start, start + sizes[index]))


#: What writes to the part that a view shows.
_WRITTEN_PARTS: Mapping[str, OpOverload] = {
    "aten.slice.Tensor": aten.slice_scatter.default,
    "aten.select.int": aten.select_scatter.default,
    "aten.diagonal.default": aten.diagonal_scatter.default,
}


def _written_part(
    scatter: OpOverload, source: fx.Node, new: fx.Node, before: fx.Node, where: tuple[Any, ...]
) -> fx.Node:
    """``source`` with ``new`` in the part ``where``; complex numbers, of which torch has no gradient, as pairs."""
    if not value(source).dtype.is_complex:
        return insert(before, scatter, (source, new, *where))
    is_diagonal = scatter is aten.diagonal_scatter.default  # (offset, dim1, dim2); the others begin with their dim
    num_dims = value(source).dim()
    counted = [
        entry % num_dims if (place > 0 if is_diagonal else place == 0) else entry for place, entry in enumerate(where)
    ]
    resolved = [insert(before, aten.resolve_conj.default, (each,)) for each in (source, new)]
    whole, part = (insert(before, aten.view_as_real.default, (each,)) for each in resolved)
    if is_diagonal:  # a diagonal comes last, behind the pairs
        part = insert(before, aten.transpose.int, (part, -1, -2))
    return insert(before, aten.view_as_complex.default, (insert(before, scatter, (whole, part, *counted)),))
