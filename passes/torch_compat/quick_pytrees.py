"""torch's nested containers taken apart and put together with fewer calls of Python, where torch does little else.

A tracer, and a mode that runs operators on every rank, take the arguments of each operator apart several times: a
seventh of a trace. What comes out is what torch's own functions give; these are replaced up to torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils import _pytree
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, is_namedtuple_class

_IsLeaf = Callable[[Any], bool] | None
_LEAF: TreeSpec = _pytree.tree_structure(0)


@contextlib.contextmanager
def quick_pytrees() -> Iterator[None]:
    """Inside the block, ``torch.utils._pytree`` is quicker."""
    trees = _Trees()
    before = {name: vars(_pytree)[name] for name in ("tree_flatten", "tree_iter", "tree_leaves")}
    unflatten = TreeSpec.unflatten
    vars(_pytree).update(tree_flatten=trees.flatten, tree_iter=trees.iterate, tree_leaves=trees.leaves)
    TreeSpec.unflatten = _unflatten  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        vars(_pytree).update(before)
        TreeSpec.unflatten = unflatten  # type: ignore[method-assign]


class _Trees:
    """Takes trees apart; trees of one structure have one spec."""

    def __init__(self) -> None:
        self._specs: dict[tuple[Any, ...], TreeSpec] = {}
        self._known = {id(_LEAF)}
        self._flatten, self._iterate, self._leaves = _pytree.tree_flatten, _pytree.tree_iter, _pytree.tree_leaves

    def flatten(self, tree: Any, is_leaf: _IsLeaf = None) -> tuple[list[Any], TreeSpec]:
        if is_leaf is not None:
            return self._flatten(tree, is_leaf)
        leaves: list[Any] = []
        return leaves, self._spec(tree, leaves) if _is_node(type(tree)) else _leaf(tree, leaves)

    def iterate(self, tree: Any, is_leaf: _IsLeaf = None) -> Iterable[Any]:
        return self._iterate(tree, is_leaf) if is_leaf is not None else iter(self.leaves(tree))

    def leaves(self, tree: Any, is_leaf: _IsLeaf = None) -> list[Any]:
        if is_leaf is not None:
            return self._leaves(tree, is_leaf)
        leaves: list[Any] = []
        if _is_node(type(tree)):
            _collect(tree, leaves)
        else:
            leaves.append(tree)
        return leaves

    def _spec(self, node: Any, leaves: list[Any]) -> TreeSpec:
        kind, children, context = _taken_apart(node)
        specs: list[TreeSpec] = []
        for child in children:
            own = type(child)
            if own in SUPPORTED_NODES or (issubclass(own, tuple) and is_namedtuple_class(own)):
                specs.append(self._spec(child, leaves))
            else:
                leaves.append(child)
                specs.append(_LEAF)
        if kind not in _BUILTIN:
            return TreeSpec(kind, context, specs)
        names = () if context is None else tuple(context)
        # Keys of other types may be equal and yet not the same: 1 and True.
        if not _TEXT.issuperset(map(type, names)) or not self._known.issuperset(map(id, specs)):
            return TreeSpec(kind, context, specs)
        key = (kind, names, *map(id, specs))
        if key not in self._specs:
            self._specs[key] = TreeSpec(kind, context, specs)
            self._known.add(id(self._specs[key]))
        return self._specs[key]


_BUILTIN = frozenset((tuple, list, dict))
_TEXT = frozenset((str,))


def _is_node(kind: type) -> bool:
    return kind in SUPPORTED_NODES or is_namedtuple_class(kind)


def _leaf(tree: Any, leaves: list[Any]) -> TreeSpec:
    leaves.append(tree)
    return _LEAF


def _taken_apart(node: Any) -> tuple[Any, Iterable[Any], Any]:
    """A node's type as specs name it, its children, and what else its spec says."""
    kind: Any = type(node)
    if kind is tuple or kind is list:
        return kind, node, None
    if kind is dict:
        return kind, node.values(), list(node)
    kind = namedtuple if is_namedtuple_class(kind) else kind
    children, context = SUPPORTED_NODES[kind].flatten_fn(node)
    return kind, children, context


def _collect(node: Any, leaves: list[Any]) -> None:
    for child in _taken_apart(node)[1]:
        own = type(child)
        if own in SUPPORTED_NODES or (issubclass(own, tuple) and is_namedtuple_class(own)):
            _collect(child, leaves)
        else:
            leaves.append(child)


def _unflatten(spec: TreeSpec, leaves: Iterable[Any]) -> Any:
    """``TreeSpec.unflatten``."""
    if not isinstance(leaves, (list, tuple)):
        leaves = list(leaves)
    if len(leaves) != spec.num_leaves:
        raise ValueError(
            f"treespec.unflatten(leaves): `leaves` has length {len(leaves)} but the spec refers to a pytree that holds "
            f"{spec.num_leaves} items ({spec})."
        )
    return _put_together(spec, iter(leaves))


def _put_together(spec: TreeSpec, leaves: Iterator[Any]) -> Any:
    kind = spec.type
    if kind is None:
        return next(leaves)
    children = [next(leaves) if child.type is None else _put_together(child, leaves) for child in spec._children]
    if kind is tuple:
        return tuple(children)
    if kind is dict:
        return dict(zip(spec._context, children, strict=True))
    return SUPPORTED_NODES[kind].unflatten_fn(children, spec._context)
