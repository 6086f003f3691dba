"""Rows that a mask of unknown values picks while a model is traced: they get a made-up number.

``token, choice = torch.where(chosen == expert)`` gives as many rows as the expert has tokens, which weights decide. The
trace goes on with a number that no tensor has by chance; ``passes.canonicalise.expert_loops`` then writes what is
computed on the rows as the same on all rows, of which the mask drops the others. A loop over the experts that were hit
(``for expert in mask.nonzero()``) runs over all of them, and whether a mask picks any row (``if mask.any():``) is taken
to be so: masks that pick nothing have no rows to add.

Rows that a mask of inputs picks have the number of the example, unless it is asked to leave that open at the line that
picks: then such a number, too, is made up.

The result may depend on the numbers of rows in no other way. Traces with other numbers show it: very many rows, one row
for each mask, all rows, numbers that are compared with, none for all or for some of the masks. Those without rows have
to give what leaving out their rows gives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from passes.capture.compared_sizes import compared_sizes
from passes.capture.equal_tensors import computed_alike
from passes.capture.graph_form import form_of
from passes.capture.nested_values import Structure, constants_of
from passes.capture.repeats import RepeatedEntries
from passes.capture.rows_left_out import without_marks
from passes.capture.shorten import NotRepeated
from passes.capture.tracing_errors import frames_of_model
from passes.ir.errors import CaptureError
from passes.ir.graph import Graph
from passes.torch_compat.operators import tree_leaves

#: Most entries of a mask whose places Python loops over.
_MOST_PLACES = 1024
#: Masks that a new one is compared with.
_COMPARED = 4
#: More rows than any threshold in a model (a capacity).
_VERY_MANY = 1 << 33
#: The same for masks of inputs, which code that counts in Python may go through.
_MANY_OF_INPUTS = 10_000_019
#: Rows that no model goes through one by one.
_LONG = 1_000_000
#: Calls that a trace may have more than one of one row for each mask has, and a factor.
_MORE_CALLS = (2, 100)
#: Stands for an operator where a call lists the numbers and texts that the model returns.
_RETURNED = "returned"
#: Operators that only lay out.
_LAYOUTS = ("aten.view", "aten.reshape", "aten.expand", "aten.squeeze", "aten.unsqueeze", "aten.alias")
_VIEWS = ("squeeze", "flatten", "view", "reshape", "cpu", "__getitem__")


@dataclass
class PickedRows:
    """The masks of one trace.

    Args:
        first, step: the number of rows that the first mask picks, and how many more each of the next ones does.
        idle: every so many masks of a module is idle, the first one too; 0: none is.
        left_out: idle masks pick rows, one more than others do; otherwise they pick none.
        any_number_at: lines of the model where masks that inputs decide get made-up numbers, too.
        most_calls: functions of torch that the model may call.
        mean_of_none: what the mean of no rows is for the model: no number, unless it takes zero there.
        whole: each mask picks all of its rows, instead of ``first`` and more.

    Attributes:
        bounds: numbers that the model compares, or may compare, numbers of rows with, other than zero.
        counts: numbers of rows so far → where the model picks them.
        left_out_counts: those of idle masks, whose rows are left out of what is computed.
        num_calls: functions of torch that it called.
        counts_of_inputs: those of masks that inputs decide.
        loops: paths of the modules that looped over places.
        layers: paths of the parameters that rows go through outside of loops over experts.
        hits: nodes of the masks of all experts of which it asked for those that have any row.
    """

    first: int = 1_000_003
    step: int = 2
    idle: int = 0
    left_out: bool = False
    any_number_at: frozenset[str] = frozenset()
    most_calls: int | None = None
    mean_of_none: float = math.nan
    whole: bool = False
    num_calls: int = 0
    bounds: set[int] = field(default_factory=set)
    counts: dict[int, str] = field(default_factory=dict)
    left_out_counts: set[int] = field(default_factory=set)
    counts_of_inputs: set[int] = field(default_factory=set)
    loops: set[str] = field(default_factory=set)
    hits: set[fx.Node] = field(default_factory=set)
    layers: set[str] = field(default_factory=set)
    _masks: dict[Any, tuple[int, int]] = field(default_factory=dict)
    _of_groups: set[object] = field(default_factory=set)
    _by_module: Counter[str] = field(default_factory=Counter)
    _last_place: str = ""
    _last_most: int | None = None
    _places: dict[int, tuple[torch.Tensor, int, str]] = field(default_factory=dict)

    def fresh(self) -> PickedRows:
        """The same numbers for another trace, of which nothing is noted yet."""
        return self.numbered(
            self.first,
            self.step,
            idle=self.idle,
            left_out=self.left_out,
            mean_of_none=self.mean_of_none,
            whole=self.whole,
        )

    def numbered(
        self,
        first: int = 1_000_003,
        step: int = 0,
        *,
        idle: int = 0,
        left_out: bool = False,
        mean_of_none: float = math.nan,
        whole: bool = False,
    ) -> PickedRows:
        """Other numbers for another trace."""
        return PickedRows(first, step, idle, left_out, self.any_number_at, self.most_calls, mean_of_none, whole)

    @property
    def has_several_masks(self) -> bool:
        """Whether some masks of a module can be idle and others not."""
        return bool(self.loops) or max(self._by_module.values(), default=0) > 1

    def _is_idle(self, number: int) -> bool:
        return self.idle > 0 and number % self.idle == 0

    def count(self, mask: object, expert: int | None, place: str, most: int | None = None) -> int:
        """The number of rows that a mask picks: the same whenever it is asked.

        Args:
            mask: what the mask is known by.
            expert: its place in a loop over the experts that were hit.
            place: the line of the model that asks.
            most: how many of its first entries can be true, if that is known.
        """
        self._last_place, self._last_most = place, most
        if mask not in self._masks:
            self.bounds |= compared_sizes(frames_of_model())
            self._masks[mask] = (len(self._masks), self._by_module[_module_path(place)])
            self._by_module[_module_path(place)] += 1
        number, number_in_module = self._masks[mask]
        count = self.first + self.step * number
        if self.whole and isinstance(mask, fx.Node) and mask not in self._of_groups:
            count = mask.meta["val"].numel()
        if self._is_idle(number_in_module if expert is None else expert):
            count = count + 1 if self.left_out else 0
            self.left_out_counts.add(count)
        self.counts.setdefault(count, place)
        return count

    def known_as(self, mask: fx.Node) -> fx.Node:
        """The mask, among the last ones that were counted, that is computed alike; else ``mask`` itself."""
        if mask in self._masks:
            return mask
        last = [each for each in list(self._masks)[-_COMPARED:] if isinstance(each, fx.Node)]
        return next((each for each in reversed(last) if computed_alike(each, mask)), mask)

    def name(self, mask: object, known_by: object) -> None:
        """``mask`` picks the rows that are counted already, under another name."""
        self._masks[mask] = self._masks[known_by]
        self._of_groups.add(mask)

    def is_looping(self, place: str) -> bool:
        """Whether a line may be part of a loop over places."""
        path = _module_path(place)
        return any(not loop or path == loop or path.startswith(f"{loop}.") for loop in self.loops)

    def note_call(self, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A function of torch is called.

        Raises:
            CaptureError: if it is one of very many, for row after row.
        """
        self.num_calls += 1
        is_one_of_many = self.most_calls is not None and self.num_calls > self.most_calls
        if is_one_of_many or (function == "unbind" and self._has_many_pieces(*args, **kwargs)):
            raise CaptureError("forward goes through the rows that a mask picks one by one")

    def _has_many_pieces(self, rows: torch.Tensor, dim: int = 0) -> bool:
        """Whether rows that a mask picks would be taken apart, but for places that a loop goes over."""
        if not self.counts or dim != 0 or not rows.dim() or id(rows) in self._places:
            return False
        return rows.shape[0] in self.counts and rows.shape[0] >= _LONG

    def before(self, reason: str) -> str:
        """Why a trace failed, with the first rows that were picked before."""
        if not self.counts:
            return reason
        place = next(iter(self.counts.values()))
        return f"{reason} (the shape of a result depends on a value that the program leaves open, in {place})"

    def note(self, function: str, operand: object, result: object) -> None:
        """Follow the places of a mask of one dim through functions that only change their shape."""
        if not isinstance(operand, torch.Tensor) or not self.counts:
            return
        size, place = self._source(function, operand)
        for each in result if isinstance(result, tuple) else (result,):
            if size and isinstance(each, torch.Tensor) and each.dim() and each.shape[0] in self.counts:
                self._places[id(each)] = (each, size, place)

    def _source(self, function: str, operand: torch.Tensor) -> tuple[int, str]:
        """How many places there are at most in what a function gives, and who picked them; 0 if it gives no places."""
        if function in ("nonzero", "argwhere", "where"):
            is_one_dim = operand.dim() == 1 and operand.shape[0] <= _MOST_PLACES
            most = operand.shape[0] if self._last_most is None else min(self._last_most, operand.shape[0])
            return most if is_one_dim else 0, self._last_place
        if function not in _VIEWS or id(operand) not in self._places:
            return 0, ""
        return self._places[id(operand)][1:]

    def rows_of(self, function: str, operand: object) -> tuple[torch.Tensor, ...] | list[Any] | None:
        """What a loop or ``tolist`` gives of the places of a mask: all there are; None for other calls."""
        if function not in ("unbind", "tolist") or id(operand) not in self._places:
            return None
        places, size, place = self._places[id(operand)]
        self.loops.add(_module_path(place))
        numbers = [number for number in range(size) if self.left_out or not self._is_idle(number)]
        if function == "tolist":
            return numbers if places.dim() == 1 else [[number] for number in numbers]
        return tuple(torch.full(places.shape[1:], number) for number in numbers)


def with_most_calls(any_number_at: frozenset[str], trace: Callable[[PickedRows], PickedRows]) -> PickedRows:
    """For a trace that leaves numbers open, with a bound of its calls by what one of one row for each mask has.

    Args:
        trace: traces with such numbers; they, as they are then.
    """
    of_one_row = trace(PickedRows(first=1, step=0, any_number_at=any_number_at))
    factor, more = _MORE_CALLS
    return PickedRows(any_number_at=any_number_at, most_calls=factor * of_one_row.num_calls + more)


def _module_path(place: str) -> str:
    """The path of the module in a place as ``describe_stack`` gives it."""
    return place.split("'")[1] if place.startswith("module '") else ""


def refuse_picked_rows(picked: PickedRows, repeats: Sequence[RepeatedEntries], *, is_open: bool) -> None:
    """Refuse a trace for several shapes, or one that skips some of the layers that a loop picks rows for.

    Raises:
        CaptureError, NotRepeated: in these cases.
    """
    if picked.counts and is_open:
        raise CaptureError("rows that a mask picks are traced for each shape")
    for number, place in picked.counts.items() if repeats else ():
        if number not in picked.counts_of_inputs and all(
            repeat.entry_of(_module_path(place)) is None for repeat in repeats
        ):
            raise NotRepeated(place)


class RowsTraced(Protocol):
    """A trace with other numbers of rows."""

    def graph(self) -> Graph:
        """Its canonical graph."""

    def calls(self) -> list[OperatorCall]:
        """As ``operator_calls``; before ``graph``."""

    def read_without_rows(self) -> set[str]:
        """Paths of the parameters and buffers that are used on tensors without entries; before ``graph``."""


#: An operator's name, and its arguments that are no tensors.
OperatorCall = tuple[str, list[Any]]


def operator_calls(module: fx.GraphModule, returned: Structure) -> list[OperatorCall]:
    """The operators that a trace called, in order, and the constants that it returns.

    Not those that only lay out, which torch itself adds for one row.
    """
    graphs = [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    called = [node for node in nodes if str(node.target).rpartition(".")[0] not in _LAYOUTS]
    constants = [value for value in constants_of(returned) if isinstance(value, (int, float, str))]
    return [*((str(node.target), _numbers(node)) for node in called), (_RETURNED, constants)]


def _numbers(node: fx.Node) -> list[Any]:
    return [leaf for leaf in tree_leaves((node.args, node.kwargs)) if not isinstance(leaf, fx.Node)]


def check_picked_rows(
    calls: list[OperatorCall], graph: Graph, picked: PickedRows, trace: Callable[[PickedRows], RowsTraced]
) -> Graph:
    """Trace again with other numbers of picked rows: nothing else may come of them.

    Args:
        calls, graph: those of ``picked``.
        trace: traces with other numbers.

    Returns:
        ``graph``; weights of experts are marked as a loop's if it uses them only where they have rows.

    Raises:
        CaptureError: if something does.
    """
    many = trace(picked.numbered(_VERY_MANY if not picked.any_number_at else _MANY_OF_INPUTS, picked.step))
    calls_of_many = many.calls()
    same = all(_same_calls(calls, calls_of_many, trace(few).calls()) for few in _few_rows(picked))
    same = same and form_of(graph) == form_of(many.graph())
    picks_nothing = {idle: trace(picked.numbered(idle=idle)) for idle in ((1, 2) if picked.has_several_masks else (1,))}
    read_without_rows = {path for each in picks_nothing.values() for path in each.read_without_rows()}
    forms = {idle: form_of(each.graph()) for idle, each in picks_nothing.items()}
    mean = next(filter(lambda mean: _leaves_out(forms, picked, trace, mean), _MEANS_OF_NONE), None) if same else None
    if mean is None:
        raise CaptureError(
            f"in {next(iter(picked.counts.values()))}: control flow depends on a value that the program "
            "leaves open: how many entries of a mask are true decides more than which rows are computed: compute every "
            "row and choose with torch.where"
        )
    guarded = sorted(picked.layers - read_without_rows)
    if guarded:
        raise CaptureError(
            f"in {next(iter(picked.counts.values()))}: rows that a mask picks go through {guarded[0]!r} only if there "
            "are any, so that it has no gradient where there are none, and a program gives it zeros, which move it "
            "under weight decay: call the layer whatever the mask picks (of no rows it adds nothing)"
        )
    if mean == 0:
        graph = trace(picked.numbered(picked.first, picked.step, mean_of_none=mean)).graph()
    return without_marks(graph, read_without_rows)


def _few_rows(picked: PickedRows) -> Iterator[PickedRows]:
    """Numbers of rows that models tell from others: one, all of them, and those that they compare them with."""
    yield picked.numbered(1)
    yield picked.numbered(whole=True)
    around = {number for bound in picked.bounds for number in (bound - 1, bound, bound + 1)}
    yield from (picked.numbered(number) for number in sorted(around) if 1 < number < _LONG)


#: What models take for the mean of no rows: no number, or zero (``rows.mean() if mask.any() else 0``).
_MEANS_OF_NONE = (math.nan, 0.0)


def _leaves_out(
    forms: Mapping[int, Any], picked: PickedRows, trace: Callable[[PickedRows], RowsTraced], mean_of_none: float
) -> bool:
    """Whether traces in which masks pick nothing compute what those do in which picked rows are left out.

    Args:
        forms: of the former, by how many masks are idle.
    """
    for idle, form in forms.items():
        left_out = trace(picked.numbered(idle=idle, left_out=True, mean_of_none=mean_of_none))
        if form_of(left_out.graph()) != form:
            return False
    return True


def _same_calls(calls: list[OperatorCall], many: list[OperatorCall], one: list[OperatorCall]) -> bool:
    """Whether traces with some, with very many and with one row a mask called the same.

    One row has canonical layouts that more rows have not, so calls are compared and not graphs. A number that differs
    between some and very many rows is made of the number of rows: what comes of it the graphs tell.
    """
    if not len(calls) == len(many) == len(one):
        return False
    for (name, numbers), (name_of_many, of_many), (name_of_one, of_one) in zip(calls, many, one):
        if not name == name_of_many == name_of_one or not len(numbers) == len(of_many) == len(of_one):
            return False
        if name == _RETURNED and not numbers == of_many == of_one:
            return False
        if any(some == very_many != single for some, very_many, single in zip(numbers, of_many, of_one)):
            return False
    return True
