"""Inline the subgraphs that export makes of ``no_grad`` and of disabled ``autocast`` regions."""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.canonicalise.fx import argument, aten, insert, is_tensor, writes
from passes.ir.errors import CaptureError
from passes.torch_compat.operators import OpOverload, schema

_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


def inline_regions(module: fx.GraphModule) -> None:
    """Put the operators of every region in place of its call.

    What enters a region without gradient is detached, so that what leaves it has no gradient either.

    Raises:
        CaptureError: for a region that switches autocast on (its casts happen below the level of the graph).
    """
    for node in list(module.graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name in _REGIONS:
            _inline(module, node, name)


def _inline(module: fx.GraphModule, node: fx.Node, name: str) -> None:
    body_node = node.args[_REGIONS[name]]
    assert isinstance(body_node, fx.Node) and isinstance(body_node.target, str)
    body = module.get_submodule(body_node.target)
    assert isinstance(body, fx.GraphModule)
    if name == "wrap_with_autocast" and node.args[2]:
        raise CaptureError(
            "the model switches autocast on in its forward: cast its weights to the dtype instead (model.to(dtype))"
        )
    inline_regions(body)
    passed: list[Any] = list(node.args[_REGIONS[name] + 1 :])
    arguments = passed
    if name == "wrap_with_set_grad_enabled" and node.args[0] is False:
        arguments = [_detached(argument, node) for argument in passed]
    _splice(node, body.graph, arguments, passed)
    if not body_node.users:
        module.graph.erase_node(body_node)


def _detached(argument: Any, node: fx.Node) -> Any:
    if isinstance(argument, fx.Node) and is_tensor(argument) and argument.meta["val"].dtype.is_floating_point:
        return insert(node, aten.detach.default, (argument,))
    return argument


def _splice(node: fx.Node, body: fx.Graph, arguments: list[Any], passed: list[Any]) -> None:
    """Copy the nodes of ``body`` before ``node`` and give its results to the users of ``node``.

    Args:
        passed: what ``arguments`` were made of: behind the region, a result that is one of them, written in place.
    """
    placeholders = [inner for inner in body.nodes if inner.op == "placeholder"]
    copies: dict[fx.Node, Any] = dict(zip(placeholders, arguments, strict=True))
    outside = dict(zip(placeholders, passed, strict=True))

    def result(used: fx.Node) -> Any:
        written = used
        while (target := _written(written)) is not None:
            written = target
        return outside[written] if written in outside else copies[used]

    outputs: Any = ()
    for inner in body.nodes:
        if inner.op == "output":
            outputs = fx.map_arg(inner.args[0], result)
        elif inner.op != "placeholder":
            with node.graph.inserting_before(node):
                copies[inner] = node.graph.node_copy(inner, lambda used: copies[used])
    for user in list(node.users):
        user.replace_all_uses_with(outputs[user.args[1]])
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _written(node: fx.Node) -> fx.Node | None:
    """What a call writes in place and returns; None if it is none that does."""
    if len(writes(node)) != 1:
        return None
    assert isinstance(node.target, OpOverload)
    written = argument(node, schema(node.target).arguments[writes(node)[0]].name)
    return written if isinstance(written, fx.Node) else None
