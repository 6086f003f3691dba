"""Nested containers, taken apart and put together as torch's own functions do."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from passes.torch_compat.quick_pytrees import quick_pytrees


class Pair(NamedTuple):
    first: Any
    second: Any


X = torch.zeros(2)
TREES = (
    *(1, None, X, (), [], {}, (1, 2), [X, (X, {"a": 1, "b": [2, 3]})], ((X, 2, (3, 4)), {"dim": 1, "keepdim": True})),
    *(Pair(X, [1]), {"z": Pair(1, (X,)), "a": None}, torch.Size([2, 3]), (torch.Size([1]), X), slice(1, 2)),
    *(torch.zeros(2, 2).max(0), [{1: X}, {True: X}, {1.0: X}], immutable_list([1, X]), immutable_dict({"a": X})),
    *(collections.OrderedDict(b=1, a=(2,)), collections.defaultdict(list, {"q": [1]}), collections.deque([1, X])),
)


def all_of(tree: Any) -> tuple[Any, ...]:
    leaves, spec = pytree.tree_flatten(tree)
    numbered = pytree.tree_unflatten(range(len(leaves)), spec)
    mapped = pytree.tree_map(lambda leaf: [leaf], tree)
    leaves_by_identity = [[*map(id, each)] for each in (leaves, pytree.tree_leaves(tree), pytree.tree_iter(tree))]
    return leaves_by_identity, repr(spec), hash(spec), repr(numbered), type(numbered), repr(mapped), type(mapped)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: repr(tree)[:40])
def test_trees_come_apart_and_together_as_by_torch(tree: Any) -> None:
    expected, spec = all_of(tree), pytree.tree_structure(tree)
    with quick_pytrees():
        for _ in range(2):  # the second time with specs that are there
            assert all_of(tree) == expected
        assert pytree.tree_structure(tree) == spec
        assert pytree.tree_flatten(tree, is_leaf=lambda node: node is tree)[0] == [tree] or tree is X


def test_a_wrong_number_of_leaves_is_refused() -> None:
    with quick_pytrees(), pytest.raises(ValueError, match="has length 1 but the spec refers to a pytree that holds 2"):
        pytree.tree_unflatten([1], pytree.tree_structure((1, 2)))


def test_torch_is_left_as_it_was_also_by_one_block_in_another() -> None:
    def functions() -> list[Callable[..., Any]]:
        names = ("tree_flatten", "tree_iter", "tree_leaves")
        return [pytree.TreeSpec.unflatten, *(getattr(pytree, name) for name in names)]

    before = functions()
    with pytest.raises(KeyError), quick_pytrees(), quick_pytrees():
        raise KeyError
    assert functions() == before
