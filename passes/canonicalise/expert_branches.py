"""Experts that are modules of their own and compute all tokens: as products of all tokens with every expert's weight.

    sum(weights[..., e : e + 1] * expert[e](x) for e in range(E))             (sums of weighed branches)
    torch.einsum("...e,...ed->...d", weights, torch.stack([each(x) for each in expert], -2))        (stacked branches)

Branches that are alike but for their weights, for the number of their expert in what they compare or pick, become one
with a dim of experts in front. Only a mixture's do: each has two linear layers or more of its own, and their results
meet values of the samples that know the experts, too. Projections beside each other stay as they are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from passes.canonicalise.dead_code import drop_dead_code
from passes.canonicalise.expert_expressions import alike, operands_of, same_value
from passes.canonicalise.fx import argument, aten, calls, insert, is_random, is_tensor, replace, shape, value
from passes.canonicalise.routed_branches import routed_sum
from passes.canonicalise.row_operators import is_pointwise, rebuild
from passes.torch_compat.operators import OpOverload

#: How many linear layers of its own an expert has at least.
_LAYERS = 2
#: Operators of an expert that are looked at for these.
_MOST = 256
_FILLED = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
#: What a stack of experts' results meets scores in.
_WEIGHED_BY = (aten.mul.Tensor, aten.einsum.default, aten.matmul.default, aten.bmm.default, aten.gather.default)
_LETTERS = "abcdfghjklmnpqrstuvwxyz"


def join_expert_branches(module: fx.GraphModule) -> None:
    """Compute at once what is stacked, or added up, of branches that are alike."""
    changed = False
    for node in calls(module.graph, aten.stack.default):
        branches: Any = node.args[0]
        if _is_weighed(node) and (joined := _joined(node, branches)) is not None:
            dim = argument(node, "dim") % len(shape(node))
            order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape(node)))]
            replace(node, joined if dim == 0 else insert(node, aten.permute.default, (joined, order)))
            changed = True
    for node in reversed(list(calls(module.graph, aten.add.Tensor))):
        terms = [] if not node.users or any(_adds(user, node) for user in node.users) else _terms(node)
        if len(terms) > 1 and not _is_product(terms[0]):
            base, terms = terms[0], terms[1:]
        else:
            base = None
        if len(terms) < 2 or not all(map(_is_product, terms)) or _own_layers(terms) < _LAYERS:
            continue
        place = _place_of_scores(terms)
        total = None if place is None else routed_sum(node, terms, place) or _summed(node, terms)
        if total is None:
            continue
        keeps = base is not None and base.target not in _FILLED
        replace(node, insert(node, aten.add.Tensor, (base, total)) if keeps else total)
        changed = True
    if changed:
        drop_dead_code(module)


def _adds(user: fx.Node, node: fx.Node) -> bool:
    """Whether ``user`` is the next sum of the same row of sums."""
    return user.target is aten.add.Tensor and user.args[0] is node and _is_product(user.args[1])


def _terms(last: fx.Node) -> list[fx.Node]:
    """The terms of ``((a + b) + c) + …``, the first one first."""
    terms: list[fx.Node] = []
    node: Any = last
    while node.target is aten.add.Tensor and argument(node, "alpha") == 1 and isinstance(node.args[1], fx.Node):
        if node is not last and len(node.users) != 1:
            break
        if not _is_product(node.args[1]):
            break
        terms.append(node.args[1])
        node = node.args[0]
        if not isinstance(node, fx.Node):
            return []
    same = [term for term in terms if shape(term) == shape(last)]
    return [node, *reversed(terms)] if len(same) == len(terms) and terms else []


def _is_product(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.mul.Tensor and len(node.users) == 1


def _is_weighed(stack: fx.Node) -> bool:
    """Whether all that uses a stack, but for its layout, weighs it by something of the samples."""
    pending, is_weighed = [stack], False
    while pending:
        node = pending.pop()
        for user in node.users:
            others = [one for one in user.all_input_nodes if one is not node and one.op != "placeholder"]
            if user.target in (aten.transpose.int, aten.permute.default, aten.unsqueeze.default):
                pending.append(user)
            elif user.target not in _WEIGHED_BY or not others:
                return False
            is_weighed |= bool(others)
    return is_weighed


def _place_of_scores(terms: Sequence[fx.Node]) -> int | None:
    """Which factor of each term is what its number picks of the samples' values, not a result of linear layers."""
    factors: list[Any] = [term.args for term in terms]
    for place in range(2):
        picked = [pair[place] for pair in factors]
        if all(isinstance(one, fx.Node) for one in picked) and _own_layers(picked) == 0:
            return place
    return None


def _summed(at: fx.Node, terms: Sequence[fx.Node]) -> fx.Node | None:
    """The sum of alike terms over experts, all of which compute all tokens."""
    joined = _joined(at, terms)
    return None if joined is None else insert(at, aten.sum.dim_IntList, (joined, [0]))


def _joined(at: fx.Node, branches: Sequence[fx.Node]) -> fx.Node | None:
    """The branches with a dim of experts in front, inserted before ``at``; None if they are not alike."""
    if len(branches) < 2 or len({shape(each) for each in branches}) != 1 or _own_layers(branches) < _LAYERS:
        return None
    joined = _Branches(at, len(branches)).joined(branches)
    return joined if joined is not None and shape(joined) == (len(branches), *shape(branches[0])) else None


def _own_layers(branches: Sequence[fx.Node]) -> int:
    """How many linear layers lie shortly behind the first branch that do not behind the second."""
    behind = [_behind(branch) for branch in branches[:2]]
    return sum(node.target is aten.linear.default for node in behind[0] - behind[1])


def _behind(node: fx.Node) -> set[fx.Node]:
    """What a node is computed from, nearest first, up to a number of operators."""
    in_order, reached = [node], {node}
    for one in in_order:  # which grows
        for operand in one.all_input_nodes:
            if operand not in reached and len(reached) < _MOST:
                reached.add(operand)
                in_order.append(operand)
    return reached


class _Branches:
    """Alike expressions, one for each expert, at once.

    Args:
        at: the node before which they are inserted.
        count: of experts.
    """

    def __init__(self, at: fx.Node, count: int) -> None:
        self._at, self._count = at, count
        self._built: dict[tuple[fx.Node, ...], fx.Node | None] = {}

    def joined(self, nodes: Sequence[fx.Node]) -> fx.Node | None:
        """[experts, …] of one node of each expert's; None if there is no such."""
        key = tuple(nodes)
        if key not in self._built:
            self._built[key] = self._join(key)
        return self._built[key]

    def _join(self, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
        first = nodes[0]
        if not all(map(is_tensor, nodes)) or len({shape(node) for node in nodes}) != 1:
            return None
        if all(node.op == "placeholder" for node in nodes):
            return insert(self._at, aten.stack.default, (list(nodes), 0))
        picked = self._picked(nodes)
        if picked is not None:
            return picked
        if first.op != "call_function" or not isinstance(first.target, OpOverload) or is_random(first):
            return None
        if not all(alike(first, node) for node in nodes):
            return None
        operands: dict[fx.Node, fx.Node] = {}
        own: set[fx.Node] = set()
        for each in zip(*map(operands_of, nodes)):
            if all(same_value(each[0], other) for other in each):
                operands.setdefault(each[0], each[0])
                continue
            built = self.joined(each)
            if built is None or operands.setdefault(each[0], built) is not built:
                return None
            own.add(each[0])
        if not own:
            return None
        if first.target is aten.linear.default:
            return self._linear(first, operands, own)
        return self._pointwise(first, operands, own) or self._rebuilt(first, operands, own)

    def _picked(self, nodes: Sequence[fx.Node]) -> fx.Node | None:
        """What each expert picks by its number, or compares with it."""
        at, sources = self._at, [node.args[0] if node.args else None for node in nodes]
        source: Any = sources[0]
        if not isinstance(source, fx.Node) or any(one is not source for one in sources):
            return None
        if nodes[0].target is aten.eq.Scalar and [node.args[1] for node in nodes] == list(range(self._count)):
            numbers = insert(at, aten.arange.default, (self._count,), {"dtype": value(source).dtype})
            apart = insert(at, aten.reshape.default, (numbers, [self._count, *[1] * len(shape(source))]))
            return insert(at, aten.eq.Tensor, (insert(at, aten.unsqueeze.default, (source, 0)), apart))
        places = [_entry(node) for node in nodes]
        if places[0] is None or places != [(places[0][0], number, places[0][2]) for number in range(self._count)]:
            return None
        whole = source.args[0] if nodes[0].target is operator.getitem else source
        dim, _, keeps = places[0]
        if shape(whole)[dim] != self._count:  # type: ignore[arg-type]
            return None
        order = [dim, *(other for other in range(len(shape(whole))) if other != dim)]  # type: ignore[arg-type]
        front = insert(at, aten.permute.default, (whole, order))
        return insert(at, aten.unsqueeze.default, (front, dim + 1)) if keeps else front

    def _linear(self, first: fx.Node, operands: dict[fx.Node, fx.Node], own: set[fx.Node]) -> fx.Node | None:
        at = self._at
        source, weight, bias = (argument(first, name) for name in ("input", "weight", "bias"))
        if weight not in own or len(shape(source)) + 2 > len(_LETTERS):
            return None
        rank = len(shape(source))
        rows, inner = _LETTERS[: rank - 1], _LETTERS[rank - 1]
        source_letters = f"e{rows}{inner}" if source in own else f"{rows}{inner}"
        equation = f"{source_letters},eo{inner}->e{rows}o"
        product = insert(at, aten.einsum.default, (equation, [operands[source], operands[weight]]))
        if bias is None:
            return product
        if bias not in own:
            return insert(at, aten.add.Tensor, (product, bias))
        return insert(at, aten.add.Tensor, (product, self._in_front(operands[bias], len(shape(first)))))

    def _in_front(self, node: fx.Node, rank: int) -> fx.Node:
        """[experts, …] with as many dims behind that of experts as an operand of ``rank`` dims has."""
        size = shape(node)
        missing = rank + 1 - len(size)
        return insert(self._at, aten.reshape.default, (node, [size[0], *[1] * missing, *size[1:]])) if missing else node

    def _pointwise(self, first: fx.Node, operands: dict[fx.Node, fx.Node], own: set[fx.Node]) -> fx.Node | None:
        if not is_pointwise(str(first.target)):
            return None
        rank = len(shape(first))
        laid = {old: self._in_front(new, rank) if old in own else new for old, new in operands.items()}
        args, kwargs = fx.map_arg((first.args, first.kwargs), lambda one: laid.get(one, one))
        return insert(self._at, first.target, tuple(args), dict(kwargs))  # type: ignore[arg-type]

    def _rebuilt(self, first: fx.Node, operands: dict[fx.Node, fx.Node], own: set[fx.Node]) -> fx.Node | None:
        """An operator that works along other dims than the first: its rows are those of all experts."""
        rows = {old: new for old, new in operands.items() if old in own}
        if any(len(shape(old)) < 2 or not math.prod(shape(old)) for old in rows):
            return None
        of_all = rebuild(first, rows, 2)
        if of_all is not None:
            self._at.prepend(of_all)  # it was inserted where the first expert stands
        return of_all


def _entry(node: fx.Node) -> tuple[int, int, bool] | None:
    """(dim, number, whether the dim stays) if ``node`` is one entry along a dim of what it is picked from."""
    source: Any = node.args[0] if node.args else None
    if node.target is aten.select.int:
        return node.args[1] % len(shape(source)), node.args[2], False  # type: ignore[operator, return-value]
    if node.target is aten.slice.Tensor and argument(node, "step") == 1:
        dim, start = argument(node, "dim") % len(shape(source)), argument(node, "start")
        return (dim, start, True) if shape(node)[dim] == 1 and isinstance(start, int) else None
    if node.target is operator.getitem and isinstance(source, fx.Node):
        if source.target is aten.unbind.int:
            return argument(source, "dim") % len(shape(source.args[0])), node.args[1], False  # type: ignore[arg-type, return-value]
        if source.target is aten.split_with_sizes.default and set(argument(source, "split_sizes")) == {1}:
            return argument(source, "dim") % len(shape(source.args[0])), node.args[1], True  # type: ignore[arg-type, return-value]
    return None
