"""Fill a problem's elements with their options."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from passes.ir.conversions import divides
from passes.ir.graph import Value
from passes.ir.types import MeshShape, Placement, R, SpmdType, shard, shard_dim
from planner.sharding_ilp.options import (
    Labels,
    OperatorChoices,
    Option,
    keeps_buffer,
    operator_options,
    placement_option,
    placements_of,
    whole_type,
)
from planner.sharding_ilp.sharding_prices import Pricing, is_view
from planner.sharding_ilp.sharding_problem import Element, Problem

#: Label of the one option of a source that is whole on every rank.
WHOLE = "whole"


@dataclass(frozen=True)
class Roles:
    """What axes are for, where that is settled before the search.

    Attributes:
        fixed: by node name, the label of the one choice that an axis is left with, or of the few.
        whole_states: axes on which parameters are stored whole (who divides them over such an axis decides elsewhere).
        used_states: axes on which parameters are stored as they are used: cut where some use cuts them, else whole.
    """

    fixed: Mapping[str, Mapping[str, Labels]] = field(default_factory=dict)
    whole_states: Collection[str] = ()
    used_states: Collection[str] = ()


def fill_options(
    problem: Problem,
    pricing: Pricing,
    *,
    offers: OperatorChoices,
    bound_frozen: bool,
    roles: Roles | None = None,
) -> None:
    """Give every element its options, out of what ``offers`` says of operators.

    ``bound_frozen``: where parameters without gradient are stored matters (to a memory limit or a constraint).

    Operators come first, then carries, then sources: the options of each follow from what its users need.
    """
    filler = _Filler(problem, pricing, offers, bound_frozen, roles or Roles())
    for kind in ("op", "output", "carry", "input", "parameter", "buffer", "constant"):
        for name, element in problem.elements.items():
            if element.kind == kind:
                element.options = filler.options(name, element)


class _Filler:
    def __init__(
        self,
        problem: Problem,
        pricing: Pricing,
        offers: OperatorChoices,
        bound_frozen: bool,
        roles: Roles,
    ) -> None:
        self.problem = problem
        self.pricing = pricing
        self.mesh: MeshShape = pricing.mesh
        self.offers = offers
        self.bound_frozen = bound_frozen
        self.roles = roles
        self.live = {use.element for stream in problem.streams.values() for use in stream.uses if use.live}
        self.outputs = self._outputs_by_source()

    def _outputs_by_source(self) -> dict[str, list[str]]:
        names_by_source: dict[str, list[str]] = {}
        for name, stream in self.problem.streams.items():
            names_by_source.setdefault(stream.source, []).append(name)
        return names_by_source

    def options(self, name: str, element: Element) -> list[Option]:
        makers = {
            "op": self._operator,
            "output": self._output,
            "carry": self._carry,
            "input": self._input,
            "parameter": self._parameter,
            "buffer": self._buffer,
            "constant": self._whole,
        }
        return makers[element.kind](name, element)

    def _operator(self, name: str, element: Element) -> list[Option]:
        node = element.node
        assert node is not None
        rule, flops = self.offers.facts(node)
        element.has_rule, element.matmul = rule is not None, flops > 0
        element.rule_source = rule.source if rule is not None else ""
        saved_outputs = [not is_view(node) and self.problem.streams[value.name].saved for value in node.outputs]
        options = operator_options(
            node,
            self.offers,
            self.pricing,
            live=name in self.live,
            saved=saved_outputs,
            fixed=self.roles.fixed.get(name),
        )
        if not node.writes_buffer:
            return options
        held = self._buffer_placement(node.inputs[0])
        return [option for option in options if keeps_buffer(option.inputs[0], held)]

    def _output(self, name: str, element: Element) -> list[Option]:
        stream = self.problem.streams[element.streams[0]]
        path = element.key.removeprefix("output:")
        whole = (whole_type(stream.value),) * len(self.mesh.names)
        if path not in self.problem.pinned_outputs:
            return [Option(whole, (whole,), ())]
        makers = self.problem.elements[stream.source].options or [Option((), (), (whole,) * (stream.output + 1))]
        types = [{whole[0], *(option.outputs[stream.output][axis] for option in makers)} for axis in range(len(whole))]
        places = placements_of(stream.value, [sorted(axis) for axis in types], self.mesh)
        free = self.problem.pinned_outputs[path]
        allowed = [p for p in places if all(t == w for t, w, is_free in zip(p, whole, free) if not is_free)]
        return [Option(where, (where,), ()) for where in allowed]

    def _carry(self, name: str, element: Element) -> list[Option]:
        """Any type that a user of the block's value needs or its producer gives."""
        value = self.problem.streams[name].value
        makers = [stream for stream in self.problem.streams.values() if any(use.element == name for use in stream.uses)]
        produced = [where for stream in makers for where in self.problem.produced(stream)]
        candidates = [*self._needed_placements(name), *produced]
        types = [
            sorted({whole_type(value), R, *(where[axis] for where in candidates)}) if size > 1 else [whole_type(value)]
            for axis, size in enumerate(self.mesh.sizes)
        ]
        return [Option(where, (where,), (where,)) for where in placements_of(value, types, self.mesh)]

    def _needed_placements(self, stream: str) -> list[Placement]:
        """Placements that the uses of a stream need, under any option."""
        return [where for use in self.problem.streams[stream].uses for where in self.problem.needed(use)]

    def _input(self, name: str, element: Element) -> list[Option]:
        value = self.problem.streams[name].value
        if value.requires_grad:
            return self._whole(name, element)
        element.follows = True
        places = self._stored(name, value, R, ())
        return [placement_option(where) for where in places if divides(where, value.shape, self.mesh)]

    def _parameter(self, name: str, element: Element) -> list[Option]:
        value = self.problem.streams[name].value
        element.follows = not value.requires_grad and not self.bound_frozen
        whole = whole_type(value)
        places = self._stored(name, value, whole, range(len(value.shape)))
        held = self._held(name)
        if held is not None and held not in places:  # cut unevenly for another call, where an operator needed it so
            places.append(held)
        return [placement_option(where, self.pricing.state_bytes(value, where).total) for where in places]

    def _buffer(self, name: str, element: Element) -> list[Option]:
        """As it is held already (a cache of keys and values is cut); else whole."""
        where = self._buffer_placement(name)
        if all(shard_dim(spmd_type) is None for spmd_type in where):
            return self._whole(name, element)
        return [placement_option(where, self.pricing.state_bytes(self.problem.streams[name].value, where).total)]

    def _buffer_placement(self, name: str) -> Placement:
        """How the buffer of this value's name is held."""
        return self._held(name) or (R,) * len(self.mesh.names)

    def _held(self, name: str) -> Placement | None:
        """How the plan that is kept holds the parameter or buffer of this value's name; None where it has none."""
        path = next(state.path for state in self.problem.graph.states if state.value.name == name)
        return self.problem.pinned_states.get(path)

    def _stored(self, name: str, value: Value, whole: SpmdType, dims: Iterable[int]) -> list[Placement]:
        """``whole`` or a shard of a dim on each axis: of one that a use shards there, or of one of ``dims``."""
        needed = self._needed_placements(name)
        types: list[tuple[SpmdType, ...]] = []
        for axis, size in enumerate(self.mesh.sizes):
            if value.kind == "parameter" and self.mesh.names[axis] in self.roles.whole_states:
                types.append((whole,))
                continue
            shards = {where[axis] for where in needed if shard_dim(where[axis]) is not None}
            if value.kind == "parameter" and size > 1 and self.mesh.names[axis] in self.roles.used_states:
                is_used_whole = any(shard_dim(where[axis]) is None for where in needed)
                types.append((*((whole,) if is_used_whole or not shards else ()), *sorted(shards)))
                continue
            shards.update(shard(dim) for dim in dims if value.shape[dim] % size == 0)
            types.append((whole, *sorted(shards)) if size > 1 else (whole,))
        return placements_of(value, types, self.mesh)

    def _whole(self, name: str, element: Element) -> list[Option]:
        streams = [self.problem.streams[stream] for stream in self.outputs[name]]
        axes = len(self.mesh.names)
        memory = 0
        if element.kind in ("parameter", "buffer"):
            memory = self.pricing.state_bytes(streams[0].value, (R,) * axes).total
        types = [whole_type(stream.value) if element.kind == "input" else R for stream in streams]
        return [Option((WHOLE,) * axes, (), tuple((spmd_type,) * axes for spmd_type in types), memory=memory)]
