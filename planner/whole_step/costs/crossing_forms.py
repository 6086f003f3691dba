"""In which placements a value crosses a cut of the pipeline: as programs have it there, not only as it is made.

A conversion belongs to the unit of the first operator that asks for it, or where that is of a repeated block, to the
unit before it (``passes.pipeline_cut.unit_chain``); what a repeated block converts inside (``passes.shard.loop``)
leaves it converted. Behind that unit the converted value crosses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from passes.ir.graph import Value
from passes.ir.types import I, MeshShape, Placement, R
from passes.repeats.model_units import ModelUnit
from planner.sharding_ilp.sharding_problem import Scope
from planner.whole_step.costs.sharding import Variant
from planner.whole_step.costs.stream_units import unit_of_element


class FormUse(NamedTuple):
    """A unit that asks for a value in a placement; ``repeats``: it is a repeated block."""

    unit: int
    placement: Placement
    repeats: bool

    @property
    def converted_in(self) -> int:
        """The unit that the conversion belongs to if no other use comes before."""
        return self.unit - self.repeats


@dataclass(frozen=True)
class ValueForms:
    """The placements of one value.

    Attributes:
        made: the one in which it is made.
        source_of: of each other one, what it is converted from.
        uses: those behind the repeated block that makes it; all where none does.
        inside: placements that operators of that block ask for.
        following: those that its next copy does.
    """

    made: Placement
    source_of: Mapping[Placement, Placement]
    uses: Sequence[FormUse]
    inside: Sequence[Placement] = ()
    following: Sequence[Placement] = ()

    def crossing(self, index: int) -> frozenset[Placement]:
        """Those that cross the cut before unit ``index`` (of a run: between two copies); as made, if nobody asks."""
        first: dict[Placement, int] = {}
        for use in self.uses:
            for form in self._chain(use.placement):
                first[form] = min(use.converted_in, first.get(form, use.converted_in))
        in_block = self._in_block()
        crossing = set()
        for use in self.uses:
            if use.unit >= index:
                there = (one for one in self._chain(use.placement) if one in in_block or first[one] < index)
                crossing.add(next(there, self.made))
        return frozenset(crossing or (self.made,))

    def _in_block(self) -> frozenset[Placement]:
        """What the block converts in each copy: for its own operators, and for the next copy and behind it alike."""
        behind = self._chains(use.placement for use in self.uses)
        return self._chains(self.inside) | (self._chains(self.following) & behind)

    def _chains(self, targets: Iterable[Placement]) -> frozenset[Placement]:
        return frozenset(form for target in targets for form in self._chain(target))

    def _chain(self, target: Placement) -> list[Placement]:
        """``target`` and what it is converted from, back to what is made, which is left out."""
        forms = []
        while target in self.source_of and target != self.made:
            forms.append(target)
            target = self.source_of[target]
        return forms


def sources_of(
    steps: Iterable[tuple[Placement, Placement]], value: Value, mesh: MeshShape
) -> dict[Placement, Placement]:
    """What each placement of a value is converted from, as programs have them, of steps (source, target)."""
    pairs = ((in_program(source, value, mesh), in_program(target, value, mesh)) for source, target in steps)
    return {target: source for source, target in pairs if source != target}


def in_program(placement: Placement, value: Value, mesh: MeshShape) -> Placement:
    """A placement as programs have it: axes of one rank are blank, and what has no gradient is R for I."""
    blank = (R,) if value.requires_grad else (R, I)
    return tuple(R if size == 1 or kind in blank else kind for size, kind in zip(mesh.sizes, placement))


class CrossingBytes:
    """Bytes that cross the cut before each unit under one sharding.

    Args:
        unit_of: of operators, their unit.
    """

    def __init__(self, variant: Variant, units: Sequence[ModelUnit], unit_of: Mapping[str, int]) -> None:
        self.problem, self.assignment, self.pricing = variant.problem, variant.assignment, variant.pricing
        self.units, self.unit_of = units, unit_of
        self.forms: dict[str, ValueForms] = {}

    def before(self, index: int, values: Mapping[str, Value]) -> tuple[float, float]:
        """Of activations, and of their gradients, before a copy of unit ``index``."""
        forward = backward = 0.0
        for name in self.units[index].entering:
            value = values[name]
            num_bytes = sum(self.pricing.local_bytes(value, form) for form in self._forms(name).crossing(index))
            forward += num_bytes
            backward += num_bytes if value.requires_grad else 0.0
        return forward, backward

    def _forms(self, name: str) -> ValueForms:
        stream = self.problem.first_name(name)
        if stream not in self.forms:
            self.forms[stream] = self._forms_of(stream)
        return self.forms[stream]

    def _forms_of(self, name: str) -> ValueForms:
        stream, options, mesh = self.problem.streams[name], self.assignment.options, self.pricing.mesh

        def asked(*scopes: Scope) -> list[tuple[str, Placement]]:
            uses = (use for use in stream.uses if use.scope in scopes)
            return [
                (use.element, in_program(options[use.element].inputs[use.index], stream.value, mesh)) for use in uses
            ]

        of_block = stream.copies > 1
        behind = asked("exit") if of_block else asked("inner", "exit")
        steps = ((item.arc.step.source, item.arc.step.target) for item in self.assignment.trees[name])
        located = [(unit_of_element(self.units, self.unit_of, element), form) for element, form in behind]
        return ValueForms(
            in_program(options[stream.source].outputs[stream.output], stream.value, mesh),
            sources_of(steps, stream.value, mesh),
            [FormUse(unit, form, self.units[unit].run is not None) for unit, form in located if unit is not None],
            [form for _, form in asked("inner")] if of_block else (),
            [form for _, form in asked("next")] if of_block else (),
        )
