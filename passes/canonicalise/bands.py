"""Matrices of two values whose rows are each one interval: what attention masks are made of.

Row i of a band has one value in the columns ``start[i] <= j < stop[i]`` and another elsewhere. Causal masks, sliding
windows, packed documents, and everything or nothing visible are all bands. They are found from the operators that
make them, exactly, in time and memory of rows + columns: a mask of 131,072 × 131,072 is never formed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.canonicalise.broadcasts import is_pointwise
from passes.canonicalise.constants import CONSTANT
from passes.canonicalise.fx import argument, aten, is_tensor, shape, value
from passes.torch_compat.operators import OpOverload

#: Elements of the largest tensor that is computed to know its values.
LARGEST = 1 << 24


@dataclass(frozen=True)
class Band:
    """A matrix [rows, columns]: ``values[0]`` in columns ``start[i]`` to ``stop[i]`` of row i, else ``values[1]``.

    ``start <= stop`` are int64 [rows], ``values`` is [2] in the dtype of the matrix.
    """

    start: torch.Tensor
    stop: torch.Tensor
    columns: int
    values: torch.Tensor

    @property
    def uniform(self) -> bool:
        """Whether all elements are one value."""
        return bool(self.values[0] == self.values[1]) or self._everywhere(0) or self._everywhere(self.columns)

    @property
    def only(self) -> torch.Tensor:
        """The value of a uniform band, 0-d."""
        return self.values[1] if self._everywhere(0) else self.values[0]

    def _everywhere(self, width: int) -> bool:
        return bool((self.stop - self.start == width).all())

    def same_interval(self, other: Band) -> bool:
        return torch.equal(self.start, other.start) and torch.equal(self.stop, other.stop)

    def with_values(self, values: torch.Tensor) -> Band:
        return Band(self.start, self.stop, self.columns, values)


def uniform_band(rows: int, columns: int, only: torch.Tensor) -> Band:
    """The matrix that is ``only`` (0-d) everywhere."""
    return _band(torch.zeros(rows, dtype=torch.int64), torch.full((rows,), columns), columns, torch.stack([only, only]))


def true_columns(band: Band) -> Band | None:
    """A Boolean band with True inside its interval and False outside, or None if its True columns have a gap."""
    inside = torch.tensor([True, False])
    if band.uniform:
        everything = uniform_band(len(band.start), band.columns, torch.tensor(True))
        stop = everything.stop if band.only else everything.start
        return Band(everything.start, stop, band.columns, inside)
    if band.values[0]:
        return band
    empty, first, last = band.start == band.stop, band.start == 0, band.stop == band.columns
    if not (empty | first | last).all():
        return None
    start = torch.where(empty | ~first, 0, band.stop)
    stop = torch.where(empty | first, band.columns, band.start)
    return Band(start, stop, band.columns, inside)


class BandFinder:
    """Knows constants of a graph as bands, each looked at once."""

    def __init__(self) -> None:
        self._bands: dict[fx.Node, Band | None] = {}
        self._tensors: dict[fx.Node, torch.Tensor | None] = {}

    def band(self, node: fx.Node) -> Band | None:
        """The last two dims of a constant, the same for all indices of the leading ones; None if it is not known."""
        if node not in self._bands:
            self._bands[node] = self._find(node) if _is_constant(node) and len(shape(node)) >= 2 else None
        return self._bands[node]

    def tensor(self, node: fx.Node) -> torch.Tensor | None:
        """The value of a constant of at most ``LARGEST`` elements, or None if it depends on something else."""
        if node not in self._tensors:
            is_call = node.op == "call_function" and isinstance(node.target, OpOverload)  # not one of several results
            is_small_constant = is_call and _is_constant(node) and value(node).numel() <= LARGEST
            self._tensors[node] = self._compute(node) if is_small_constant else None
        return self._tensors[node]

    def _compute(self, node: fx.Node) -> torch.Tensor | None:
        tensors: dict[fx.Node, torch.Tensor | None] = {}
        for used in node.all_input_nodes:
            if used is node.args[0] and _reads_metadata_alone(node):
                tensors[used] = torch.empty((), dtype=value(used).dtype).expand(shape(used))
            else:
                tensors[used] = self.tensor(used)
        if any(tensor is None for tensor in tensors.values()):
            return None
        kwargs = {**node.kwargs, **({"device": "cpu"} if "device" in node.kwargs else {})}
        return _call(node, fx.map_arg(node.args, tensors.get), fx.map_arg(kwargs, tensors.get))

    def _find(self, node: fx.Node) -> Band | None:
        rows, columns = shape(node)[-2:]
        if min(rows, columns) == 1:
            return self._operand(node, rows, columns)
        rule = _RULES.get(node.target)
        band = rule(self, node, rows, columns) if rule is not None else None
        return band if band is not None or not is_pointwise(node) else self._pointwise(node, rows, columns)

    def _operand(self, operand: Any, rows: int, columns: int) -> Band | None:
        """The band of an operand that is broadcast to [rows, columns]."""
        if not isinstance(operand, fx.Node):
            return uniform_band(rows, columns, torch.tensor(operand))
        if min(rows, columns) > 1 and shape(operand)[-2:] == (rows, columns):
            return self.band(operand)
        tensor = self.tensor(operand)
        return None if tensor is None else _broadcast(tensor, rows, columns)

    def _pointwise(self, node: fx.Node, rows: int, columns: int) -> Band | None:
        """Operands that are each uniform, or all have the same interval, give one value inside and one outside."""
        values: dict[fx.Node, torch.Tensor] = {}
        shared: Band | None = None
        for used in node.all_input_nodes:
            band = self._operand(used, rows, columns)
            if band is None:
                return None
            if band.uniform:
                # a tensor without dims counts for less in the choice of dtype
                values[used] = band.only if shape(used) == () else band.only.expand(2)
                continue
            if shared is not None and not shared.same_interval(band):
                return None
            shared = band
            values[used] = band.values
        result = _call(node, fx.map_arg(node.args, values.get), fx.map_arg(dict(node.kwargs), values.get))
        if result is None:
            return None
        if shared is None:
            return uniform_band(rows, columns, result.reshape(-1)[0])
        return shared.with_values(result.expand(2))

    def compared(self, node: fx.Node, rows: int, columns: int) -> Band | None:
        """A vector along the rows compared with a sorted one along the columns."""
        left, right = node.args[:2]
        relation = _COMPARISONS[node.target]
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            return None
        if _runs_along_columns(right):
            left, right, relation = right, left, _MIRRORED[relation]
        if not _runs_along_columns(left) or not _runs_along_rows(right):
            return None
        along, across = self.tensor(left), self.tensor(right)
        if along is None or across is None:
            return None
        dtype = torch.promote_types(along.dtype, across.dtype)
        along, across = along.to(dtype).flatten(), across.to(dtype).flatten()
        if not bool((along[1:] >= along[:-1]).all()) or bool((across != across).any()):
            return None
        below, upto = torch.searchsorted(along, across), torch.searchsorted(along, across, right=True)
        first, last = torch.zeros_like(below), torch.full_like(below, columns)
        ends = {"lt": (first, below), "le": (first, upto), "gt": (upto, last), "ge": (below, last)}
        start, stop = ends.get(relation, (below, upto))
        return _band(start, stop, columns, torch.tensor([relation != "ne", relation == "ne"]))

    def both(self, node: fx.Node, rows: int, columns: int) -> Band | None:
        """True where both operands are."""
        return _intersection([self._true(operand, rows, columns) for operand in node.args[:2]])

    def either(self, node: fx.Node, rows: int, columns: int) -> Band | None:
        """True where an operand is: not where both are False."""
        return _negated(_intersection([_negated(self._true(operand, rows, columns)) for operand in node.args[:2]]))

    def _true(self, operand: Any, rows: int, columns: int) -> Band | None:
        band = self._operand(operand, rows, columns)
        return true_columns(band) if band is not None and band.values.dtype == torch.bool else None

    def viewed(self, node: fx.Node, rows: int, columns: int) -> Band | None:
        """Views that leave the matrix as it is."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if node.target is aten.expand.default:
            return self._operand(source, rows, columns)
        if node.target is aten.select.int and argument(node, "dim") % len(shape(source)) >= len(shape(source)) - 2:
            return None
        return self.band(source) if shape(source)[-2:] == (rows, columns) else None

    def filled(self, node: fx.Node, rows: int, columns: int) -> Band | None:
        """One value everywhere: the same call for one element tells which."""
        args = list(node.args)
        place = _FILLED[node.target]
        if place is not None:
            args[place] = [1]
        scalars = {used: torch.empty(1, dtype=value(used).dtype) for used in node.all_input_nodes}
        kwargs = {**node.kwargs, **({"device": "cpu"} if "device" in node.kwargs else {})}
        result = _call(node, fx.map_arg(tuple(args), scalars.get), kwargs)
        return None if result is None else uniform_band(rows, columns, result.reshape(-1)[0])

    def triangle(self, node: fx.Node, rows: int, columns: int) -> Band | None:
        """``tril`` and ``triu`` of a matrix that is 0 outside its interval."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        band, diagonal = self.band(source), argument(node, "diagonal")
        if band is None:
            return None
        if band.uniform:
            band = uniform_band(rows, columns, band.only).with_values(torch.stack([band.only, band.only * 0]))
        if band.values[1] != 0:
            return None
        place = torch.arange(rows)
        if node.target is aten.tril.default:
            stop = (place + diagonal + 1).clamp(0, columns)
            return _band(band.start, torch.minimum(band.stop, stop), columns, band.values)
        start = (place + diagonal).clamp(0, columns)
        return _band(torch.maximum(band.start, start), band.stop, columns, band.values)


def _is_constant(node: fx.Node) -> bool:
    return bool(node.meta.get(CONSTANT)) and is_tensor(node)


def _reads_metadata_alone(node: fx.Node) -> bool:
    name = str(node.target).split(".")[1]
    return name.startswith("new_") or name.endswith("_like")


def _call(node: fx.Node, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The result of a call on real tensors, None if it is not of the node's dtype."""
    assert isinstance(node.target, OpOverload)
    with torch.no_grad():
        result = node.target(*args, **kwargs)
    return result if isinstance(result, torch.Tensor) and result.dtype == value(node).dtype else None


def _band(start: torch.Tensor, stop: torch.Tensor, columns: int, values: torch.Tensor) -> Band:
    return Band(start, torch.maximum(start, stop), columns, values)


def _intersection(bands: list[Band | None]) -> Band | None:
    """Where two bands of True inside are both True."""
    first, second = bands
    if first is None or second is None:
        return None
    start, stop = torch.maximum(first.start, second.start), torch.minimum(first.stop, second.stop)
    return _band(start, stop, first.columns, first.values)


def _negated(band: Band | None) -> Band | None:
    return None if band is None else true_columns(band.with_values(~band.values))


def _runs_along_columns(node: fx.Node) -> bool:
    sizes = shape(node)
    return len(sizes) >= 1 and all(size == 1 for size in sizes[:-1])


def _runs_along_rows(node: fx.Node) -> bool:
    sizes = shape(node)
    return len(sizes) >= 2 and all(size == 1 for size in (*sizes[:-2], sizes[-1]))


def _broadcast(tensor: torch.Tensor, rows: int, columns: int) -> Band | None:
    """A scalar or a vector of at most two values as a matrix; the columns of one of them must be neighbours."""
    if bool((tensor == tensor.flatten()[0]).all()):
        return uniform_band(rows, columns, tensor.flatten()[0])
    if any(size != 1 for size in tensor.shape[:-2]):
        return None
    first = tensor.flatten()[0]
    others = tensor[tensor != first]
    if bool((others != others[0]).any()) or tensor.numel() not in (rows, columns):
        return None
    values = torch.stack([others[0], first])
    held = (tensor != first).flatten()
    if tensor.dim() >= 2 and tensor.shape[-1] == 1:
        return _band(torch.zeros_like(held, dtype=torch.int64), held * columns, columns, values)
    if tensor.dim() >= 2 and tensor.shape[-2] != 1:
        return None
    places = held.nonzero().flatten()
    start, stop = int(places[0]), int(places[-1]) + 1
    if stop - start != len(places):
        return None
    return _band(torch.full((rows,), start), torch.full((rows,), stop), columns, values)


_COMPARISONS: dict[Any, str] = {
    getattr(aten, name).Tensor: name for name in ("lt", "le", "gt", "ge", "eq", "ne")
}  # fmt: skip
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}

#: Which argument is the size, None if it is that of another tensor.
_FILLED: dict[Any, int | None] = {
    aten.full.default: 0, aten.zeros.default: 0, aten.ones.default: 0,
    aten.new_full.default: 1, aten.new_zeros.default: 1, aten.new_ones.default: 1,
    aten.full_like.default: None, aten.zeros_like.default: None, aten.ones_like.default: None,
}  # fmt: skip

_VIEWS = (
    aten.expand.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor,
    aten.select.int, aten.repeat.default, aten.clone.default, aten.contiguous.default, aten.detach.default,
)  # fmt: skip

_RULES: dict[Any, Callable[[BandFinder, fx.Node, int, int], Band | None]] = {
    **dict.fromkeys(_COMPARISONS, BandFinder.compared),
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), BandFinder.both),
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.logical_or.default), BandFinder.either),
    **dict.fromkeys(_VIEWS, BandFinder.viewed),
    **dict.fromkeys(_FILLED, BandFinder.filled),
    **dict.fromkeys((aten.tril.default, aten.triu.default), BandFinder.triangle),
}
