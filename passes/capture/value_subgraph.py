"""The operators that lead to a value, out of a graph that is still being traced, as steps that can be run anywhere."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from passes.canonicalise.bounded_ids import bound_of_ids
from passes.capture.drawn_ranges import answer_whatever_is_drawn, is_drawn
from passes.capture.equal_tensors import computed_alike
from passes.capture.finite_flags import answer_if_finite
from passes.capture.guard_values import StepValues
from passes.capture.held_tensors import HeldTensors, is_written_out
from passes.capture.joined_parts import joined_part
from passes.capture.shorten import SKIPPED
from passes.ir.value_guards import GuardStep, HeldTensor, StepResult
from passes.torch_compat.operators import OpOverload, schema, tree_leaves
from passes.torch_compat.tensor_fields import FakeTensor, storage_id
from passes.torch_compat.tracer_questions import CurrentTrace, outside_of_tracing

#: What a placeholder is: ("input", path), ("parameter", name) or ("buffer", name).
Source = tuple[str, Any]

#: Operators → the place of the argument of which only the shape and dtype matter.
_OF_SHAPE = {
    **{
        f"aten.{name}": 0
        for name in (
            "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "empty_like", "new_empty",
        )
    },
    **{f"aten.{name}": 1 for name in ("expand_as", "view_as", "reshape_as", "type_as")},
}  # fmt: skip
#: Arguments of random operators that draw only where none of these is False or zero.
_SWITCHES = ("train", "training", "dropout", "dropout_p", "p")


class UnknownValue(Exception):
    """A value that no inputs, buffers and constants decide; the text goes on from "a value that"."""


class Subgraphs:
    """Finds what leads to a tensor.

    Args:
        trace: the graph so far.
        tensors: those that the trace began with, by what they are.
        held: finds the tensors of a script that are constants of the trace.
    """

    def __init__(self, trace: CurrentTrace, tensors: Mapping[Source, torch.Tensor], held: HeldTensors) -> None:
        self._trace = trace
        self._held = held
        self._sources: dict[fx.Node, Source] = {}
        for source, tensor in tensors.items():
            node = trace.node_of(tensor)
            if node is not None:
                self._sources.setdefault(node, source)
        self._steps: dict[fx.Node, StepResult] = {}
        self._written: set[int] = set()
        self._open_masks: set[fx.Node] = set()
        self._last_seen: fx.Node | None = None

    def steps_to(self, tensor: torch.Tensor, add: Callable[[GuardStep], StepResult]) -> StepResult:
        """Add the steps that give ``tensor``, those that were added before not again.

        Raises:
            UnknownValue: if it depends on more than inputs, buffers and constants.
        """
        node = self._trace.node_of(tensor)
        if node is None:
            raise UnknownValue("comes from outside of what is traced")
        nodes, writes = self._leading_to(node)
        for each in nodes:  # refuse before anything is run
            self._check(each)
        # What is written to is computed again for every reading, which may come before or after the writing.
        steps = {} if writes else self._steps
        for each in nodes:
            if each not in steps:
                steps[each] = add(self._step(each, steps, copied=writes))
        return steps[node]

    def is_settled(self, tensor: torch.Tensor) -> bool:
        """Whether inputs, buffers and constants decide what ``tensor`` is."""
        node = self._trace.node_of(tensor)
        return node is not None and self._is_settled(self._leading_to(node)[0])

    def why_unknown(self, tensor: torch.Tensor) -> str | None:
        """Why inputs, buffers and constants do not decide what ``tensor`` is; None if they do, or if it is not traced.

        The text goes on from "a value that".
        """
        node = self._trace.node_of(tensor)
        try:
            for each in () if node is None else self._leading_to(node)[0]:
                self._check(each)
        except UnknownValue as unknown:
            return str(unknown)
        return None

    def _leading_to(self, node: fx.Node) -> tuple[list[fx.Node], bool]:
        """All that decides what a node gives, in an order in which it can run; whether any of it is written to."""
        nodes = _upstream(node)
        if not self._are_written(nodes):
            return nodes, False
        return _with_writers(list(self._trace.graph.nodes), node), True

    def answer_if_finite(self, flag: torch.Tensor) -> bool | None:
        """What ``flag`` is if all numbers are finite; None if that does not decide it."""
        node = self._trace.node_of(flag)
        return None if node is None else answer_if_finite(node)

    def answer_whatever_is_drawn(self, flag: torch.Tensor) -> bool | None:
        """What ``flag`` is for all random numbers that can be drawn; None if that does not decide it."""
        node = self._trace.node_of(flag)
        answer = None if node is None else answer_whatever_is_drawn(node)
        return None if node is None or answer is None or self._are_written(_upstream(node)) else answer

    def is_drawn(self, tensor: torch.Tensor) -> bool:
        """Whether all entries are drawn from [0, 1), and stayed what they were."""
        node = self._trace.node_of(tensor)
        return node is not None and is_drawn(node) and not self._are_written(_upstream(node))

    def _is_settled(self, nodes: Iterable[fx.Node]) -> bool:
        try:
            for each in nodes:
                self._check(each)
        except UnknownValue:
            return False
        return True

    def is_decided_by_weights(self, flag: torch.Tensor) -> bool:
        """Whether parameters decide what ``flag`` is, of which no count of a mask's rows and no random number tells."""
        node = self._trace.node_of(flag)
        if node is None or self.mask_counted(flag) is not None or answer_whatever_is_drawn(node) is not None:
            return False
        nodes = self._leading_to(node)[0]
        kinds = {self._sources[each][0] for each in nodes if each in self._sources}
        return "parameter" in kinds and not any(_picks_rows(each) for each in nodes)

    def unsettled_mask(self, mask: torch.Tensor | fx.Node) -> fx.Node | None:
        """The node of a mask that inputs, buffers and constants do not decide; None if they do, or if it is written.

        Masks that only lay out the same entries have one node.
        """
        node = self._mask_node(mask)
        return None if node is None or self._is_settled(self._leading_to(node)[0]) else node

    def open_mask(self, mask: torch.Tensor | fx.Node) -> fx.Node | None:
        """The node of a mask whoever decides it; None if it is written. How many rows it picks is taken for unknown."""
        node = self._mask_node(mask)
        if node is not None:
            self._open_masks.add(node)
        return node

    def _mask_node(self, mask: torch.Tensor | fx.Node) -> fx.Node | None:
        node = _laid_out(mask if isinstance(mask, fx.Node) else self._trace.node_of(mask))
        return None if node is None or node.meta["val"].dim() == 0 or self._are_written([node]) else node

    def are_alike(self, first: torch.Tensor, second: torch.Tensor) -> bool | None:
        """Whether two tensors are computed alike; None if inputs, buffers and constants decide what both are."""
        nodes = [self._trace.node_of(tensor) for tensor in (first, second)]
        leading = [each for node in nodes if node is not None for each in self._leading_to(node)[0]]
        if None in nodes or self._is_settled(leading):
            return None
        return not self._are_written(leading) and computed_alike(*nodes)

    def depends_on(self, tensor: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether ``other`` is among what ``tensor`` is computed of."""
        node, source = self._trace.node_of(tensor), self._trace.node_of(other)
        return node is not None and source is not None and source in _upstream(node)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of what is made of numbers alone; None for what depends on anything else."""
        return self._constant(self._trace.node_of(tensor))

    def _constant(self, node: fx.Node | None) -> torch.Tensor | None:
        nodes = _upstream(node) if node is not None else []
        if not nodes or any(each.op != "call_function" for each in nodes) or self._are_written(nodes):
            return None
        if not self._is_settled(nodes):
            return None
        values = StepValues(_nothing, _nothing)
        steps: dict[fx.Node, StepResult] = {}
        with outside_of_tracing():
            for each in nodes:
                values.run(self._step(each, steps, copied=False))
                steps[each] = StepResult(len(steps))
        return values.results[-1]  # type: ignore[no-any-return]

    def mask_counted(self, tensor: torch.Tensor) -> tuple[fx.Node, Callable[[int], int | bool], int] | None:
        """(mask, f, bound) if ``tensor`` is f of how many entries of a mask are true, compared with ``bound``.

        ``mask.any()``, ``mask.sum() > 0``.
        """
        node: Any = self._trace.node_of(tensor)
        negated = False
        while node is not None and _is_flag(node):
            negated ^= _name(node) != "aten.ne"
            node = node.args[0]
        if node is None or not isinstance(node.target, OpOverload) or not node.args:
            return None
        compare, bound = _COMPARISONS.get(_name(node)), 0
        if compare is not None:
            node, bound = node.args[:2]
        is_sum = isinstance(node, fx.Node) and _name(node) in _COUNTS
        is_any = isinstance(node, fx.Node) and _name(node) == "aten.any" and compare is None
        if not isinstance(bound, int) or not (is_sum or is_any) or len(node.args) != 1:
            return None
        mask = node.args[0]
        if mask.meta["val"].dtype != torch.bool:
            return None
        if is_sum and compare is None:
            return None if negated else (mask, int, 0)
        asked = compare or python_operator.gt
        return mask, lambda count: asked(count, bound) != negated, bound

    def hits_of(self, mask: fx.Node) -> set[fx.Node]:
        """The masks of all experts if ``mask`` says which of them have an entry: ``masks.sum((1, 2)) > 0``."""
        node: Any = mask
        while _name(node) in _ABOVE_ZERO and node.args[1:] in ((), (0,)):
            node = node.args[0]
        if mask.meta["val"].dim() != 1 or _name(node) not in _SUMS or len(node.args) < 2:
            return set()
        masks, dims = node.args[0], node.args[1]
        rank = masks.meta["val"].dim()
        summed = {dim % rank for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}
        is_one_hot = any(_name(each) == "aten.one_hot" for each in _upstream(masks))
        return {masks} if is_one_hot and summed == set(range(1, rank)) else set()

    def most_hits(self, masks: Iterable[fx.Node]) -> int | None:
        """How many experts can be hit at most, whose one-hot rows ``masks`` are; None if that is not known."""
        of = [each.args[0] for node in masks for each in _upstream(node) if _name(each) == "aten.one_hot"]
        bounds = [bound_of_ids(ids) for ids in of]
        known = [bound for bound in bounds if bound is not None]
        return max(known) if known and len(known) == len(bounds) else None

    def bound_of(self, tensor: torch.Tensor) -> int | None:
        """A number that all entries of a tensor of ids are below; None if none is known."""
        node = self._trace.node_of(tensor)
        return None if node is None else bound_of_ids(node)

    def entry_number(self, mask: fx.Node, masks: set[fx.Node]) -> int | None:
        """Which entry along the first dim of one of ``masks`` a mask is; None if it is none."""
        node: Any = mask
        while _name(node) in (*_ABOVE_ZERO, *_SAME_ENTRIES):
            node = node.args[0]
        if not node.args or node.args[0] not in masks:
            return None
        if _name(node) == "aten.select" and node.args[1] == 0:
            return int(node.args[2])
        number = self._constant(node.args[1][0]) if _name(node) == "aten.index" and len(node.args[1]) == 1 else None
        return int(number) if number is not None and number.numel() == 1 else None

    def _are_written(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether an operator of the graph so far writes to the memory of any of these."""
        for node in reversed(self._trace.graph.nodes):  # those since the last question: models ask for every image
            if node is self._last_seen:
                break
            self._written.update(_written_memories(node))
        self._last_seen = next(iter(reversed(self._trace.graph.nodes)), None)
        return any(memory in self._written for node in nodes for memory in _memories(node))

    def _check(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            kind, name = self._sources.get(node, ("unknown", node.name))
            if kind == "parameter":
                raise UnknownValue(f"depends on the parameter {name!r}, which training changes")
            if kind == "unknown":
                raise UnknownValue("comes from outside of what is traced")
        elif node.op == "get_attr":
            if isinstance(self._trace.constant(str(node.target)), FakeTensor):
                raise UnknownValue("depends on a tensor without data")
        elif node.target is not python_operator.getitem:
            if not isinstance(node.target, OpOverload):
                raise UnknownValue(f"comes out of {node.target}")
            if str(node.target) == SKIPPED:
                raise UnknownValue("depends on a layer that is skipped")
            if _draws(node):
                raise UnknownValue(f"depends on random numbers ({node.target})")
            if _picks_rows(node) and not self._open_masks.isdisjoint(map(_laid_out, node.all_input_nodes)):
                raise UnknownValue("depends on how many rows a mask picks")

    def _step(self, node: fx.Node, steps: Mapping[fx.Node, StepResult], *, copied: bool) -> GuardStep:
        if node.op == "placeholder":
            kind, name = self._sources[node]
            return GuardStep(kind, (name,), writes=copied)
        if node.op == "get_attr":
            constant = self._trace.constant(str(node.target))
            if is_written_out(node):
                return _literal(constant)
            with outside_of_tracing():
                return GuardStep("held", (HeldTensor(self._held.of(constant)),), writes=copied)
        part = joined_part(node)
        if part is not None:
            return GuardStep("aten.to.dtype", (steps[part], node.meta["val"].dtype))
        if node.target is python_operator.getitem:
            return GuardStep("item", tuple(_argument(argument, steps) for argument in node.args))
        args = tuple(_argument(argument, steps) for argument in node.args)
        place = _only_shape_at(node)
        if place is not None:
            entry = node.args[place].meta["val"]  # type: ignore[union-attr]
            blank = GuardStep("blank", (tuple(entry.shape), entry.dtype))
            return GuardStep(str(node.target), (*args[:place], blank, *args[place + 1 :]), _keywords(node, steps))
        return GuardStep(str(node.target), args, _keywords(node, steps), writes=bool(_written(node)))


_COUNTS = ("aten.sum", "aten.count_nonzero")
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    f"aten.{name}": getattr(python_operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")
}
_ABOVE_ZERO = ("aten.gt", "aten.greater", "aten.ne", "aten.to", "aten._to_copy")
_SUMS = ("aten.sum", "aten.any")
_LAID_OUT = ("aten.view", "aten.reshape", "aten.flatten", "aten.alias")
#: Operators that give as many rows as a mask picks.
_PICKS = tuple(f"aten.{name}" for name in ("index", "nonzero", "nonzero_numpy", "argwhere", "masked_select"))
_SAME_ENTRIES = ("aten.squeeze", "aten.view", "aten.reshape", "aten.to", "aten.alias", "aten.detach")


def _name(node: fx.Node) -> str:
    """``aten.sum`` for each of its overloads."""
    return str(node.target).rpartition(".")[0]


def _is_flag(node: fx.Node) -> bool:
    """Whether a node tells if another flag is true, or if it is not."""
    if _name(node) in ("aten.logical_not", "aten.bitwise_not"):
        return True
    is_compared = _name(node) in ("aten.ne", "aten.eq") and node.args[1:] == (0,) and isinstance(node.args[0], fx.Node)
    return is_compared and _name(node.args[0]) not in _COUNTS  # type: ignore[arg-type]


def _picks_rows(node: fx.Node) -> bool:
    return _name(node) in _PICKS or (_name(node) == "aten.where" and len(node.args) == 1)


def _laid_out(mask: fx.Node | None) -> fx.Node | None:
    """The node whose entries a mask lays out."""
    while mask is not None and _name(mask) in _LAID_OUT:
        mask = mask.all_input_nodes[0]
    return mask


def _nothing(name: Any) -> torch.Tensor:
    raise UnknownValue(f"depends on {name!r}")


def _upstream(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node depends on by its arguments, and itself, in an order in which they can run."""
    order: dict[fx.Node, None] = {}
    stack = [(node, False)]
    while stack:
        current, is_ready = stack.pop()
        if is_ready:
            order[current] = None
        elif current not in order:
            stack.append((current, True))
            stack += [(source, False) for source in _read_nodes(current)]
    return list(order)


def _with_writers(nodes: list[fx.Node], node: fx.Node) -> list[fx.Node]:
    """The nodes that a node depends on, also by what others wrote to its arguments' memory, in the graph's order."""
    needed, memories, order = {node}, set(_memories(node)), []
    for current in reversed(nodes):
        if current in needed or not memories.isdisjoint(_written_memories(current)):
            order.append(current)
            sources = _read_nodes(current)
            needed.update(sources)
            memories.update(memory for source in (current, *sources) for memory in _memories(source))
    return order[::-1]


def _read_nodes(node: fx.Node) -> list[fx.Node]:
    part = joined_part(node)
    if part is not None:
        return [part]
    place = _only_shape_at(node)
    if place is None:
        return node.all_input_nodes
    others = (*node.args[:place], *node.args[place + 1 :], *node.kwargs.values())
    return [source for source in node.all_input_nodes if source in others]


def _only_shape_at(node: fx.Node) -> int | None:
    """The place of the argument of which only the shape matters; None if there is none."""
    place = _OF_SHAPE.get(str(node.target).rpartition(".")[0])
    return place if place is not None and isinstance(node.args[place], fx.Node) else None


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor))


def _memories(node: fx.Node) -> list[int]:
    return [storage_id(tensor) for tensor in _tensors(node)]


def _written_memories(node: fx.Node) -> list[int]:
    return [memory for argument in _written(node) for memory in _memories(argument)]


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operator changes in place."""
    if not isinstance(node.target, OpOverload):
        return []
    arguments = schema(node.target).arguments
    values = {**dict(zip((argument.name for argument in arguments), node.args)), **node.kwargs}
    changed = [
        values.get(argument.name) for argument in arguments if argument.alias_info and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, fx.Node)]


def _draws(node: fx.Node) -> bool:
    """Whether an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return False
    arguments = schema(node.target).arguments  # type: ignore[arg-type]
    values = {**dict(zip((argument.name for argument in arguments), node.args)), **node.kwargs}
    return all(values.get(name) not in (False, 0.0) for name in _SWITCHES if name in values)


def _keywords(node: fx.Node, steps: Mapping[fx.Node, StepResult]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _argument(value, steps)) for name, value in node.kwargs.items() if name != "pin_memory")


def _argument(argument: Any, steps: Mapping[fx.Node, StepResult]) -> Any:
    """An argument with results of steps for nodes; whatever the device, guards are read on the CPU."""
    if isinstance(argument, fx.Node):
        return steps.get(argument)
    if isinstance(argument, (list, tuple)):
        return tuple(_argument(item, steps) for item in argument)
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _literal(tensor: torch.Tensor) -> GuardStep:
    with outside_of_tracing():
        whole = tensor.detach().cpu().contiguous()
        content = whole.view(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    return GuardStep("literal", (tuple(tensor.shape), tensor.dtype, content))
