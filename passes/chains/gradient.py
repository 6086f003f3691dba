"""What a chain's backward kernel needs, and what is kept for it.

Backward computes values again from what was kept. Of three choices the one of the fewest bytes is taken: the chain's
inputs; its outputs, with the inputs that they do not replace; or the values that the derivatives name, written by the
forward kernel too. The last is what the operators keep one by one, so a chain never keeps more than those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from passes.chains.iteration_space import best_split, kind_of
from passes.chains.members import FLOATS
from passes.chains.operator_chain import Member, OperatorChain, bytes_of
from passes.shard import Local


@dataclass(frozen=True)
class Backward:
    """The plan of a backward kernel.

    Attributes:
        outputs: outputs whose gradients come in.
        inputs: inputs whose gradients go out, each with how it is summed (``passes.chains.iteration_space``).
        passed: inputs whose gradient is that of an output as it is: nothing is computed or copied for them.
        shared: inputs whose gradient is that of another input.
        saved: what is kept: inputs, outputs and ``extra``, in this order.
        extra: values that the forward kernel writes for this alone.
        again: members that are computed again.
        members: members through which gradients flow, in order.
    """

    outputs: tuple[Local, ...]
    inputs: dict[Local, str]
    passed: dict[Local, Local]
    shared: dict[Local, Local]
    saved: tuple[Local, ...]
    extra: tuple[Local, ...]
    again: tuple[Member, ...]
    members: tuple[Member, ...]

    @property
    def holds_rows(self) -> bool:
        """Whether the kernel must see whole rows: to find the largest number of one, or to reduce it again."""
        reducing = [member.formula for member in self.members if member.reduces and member.formula is not None]
        templates = [template for formula in reducing for template in formula.gradients.values()]
        return any(member.reduces for member in self.again) or any("exists" in template for template in templates)


def is_differentiable(local: Local) -> bool:
    """Whether a gradient of ``local`` exists and somebody may want it."""
    return local.value.requires_grad and local.value.dtype in FLOATS


def columns_of(chain: OperatorChain) -> int:
    """How many trailing dims of the space are columns; 0 for as many as lie side by side."""
    if any(member.reduces for member in chain.members):
        return 1
    return best_split([local.shape for local in chain.inputs if is_differentiable(local)], chain.space)


def backward_of(chain: OperatorChain) -> Backward | None:
    """The backward of a chain; None if no gradient goes through it."""
    flowing = {local for local in chain.inputs if is_differentiable(local)}
    members = []
    for member in chain.members:
        if is_differentiable(member.output) and any(local in flowing for _, local in gradients_of(member)):
            flowing.add(member.output)
            members.append(member)
    outputs = tuple(local for local in chain.outputs if local in flowing)
    reached = set(outputs)
    for member in reversed(members):
        if member.output in reached:
            reached.update(local for _, local in gradients_of(member) if local in flowing)
    members = [member for member in members if member.output in reached]
    ends = [local for local in chain.inputs if local in flowing & reached]
    if not outputs or not ends:
        return None
    passed, shared = _same(ends, outputs, members)
    columns = columns_of(chain)
    computed_ends = [local for local in ends if local not in passed and local not in shared]
    inputs = {local: kind_of(local.shape, chain.space, columns=columns) for local in computed_ends}
    members = _towards(members, inputs)
    used = {member.output for member in members}
    users = {local for member in members for _, local in gradients_of(member)}
    outputs = tuple(local for local in outputs if local in used | users)
    saved, again = _kept(chain, _needed(members, {*inputs, *used}))
    boundary = (*chain.inputs, *chain.outputs)
    ordered = [local for local in boundary if local in saved]
    extra = tuple(local for local in saved if local not in boundary)
    return Backward(outputs, inputs, passed, shared, (*dict.fromkeys(ordered), *extra), extra, again, tuple(members))


def _same(
    ends: Sequence[Local], outputs: Collection[Local], members: Sequence[Member]
) -> tuple[dict[Local, Local], dict[Local, Local]]:
    """Inputs that only take part in additions and the like: their gradient is an output's, or another input's."""
    parts: dict[Local, list[tuple[Member, str]]] = {}
    for member in members:
        for name, local in gradients_of(member):
            parts.setdefault(local, []).append((member, name))
    passed, shared = {}, {}
    first: dict[Any, Local] = {}
    for end in ends:
        local = end
        while len(parts.get(local, ())) == 1 and local not in outputs:
            ((member, name),) = parts[local]
            assert member.formula is not None
            if member.formula.gradients[name] != "{grad}" or member.reduces:
                break
            local = member.output
        if local.shape != end.shape:
            continue
        if local in outputs and not parts.get(local) and local.value.dtype == end.value.dtype:
            passed[end] = local
        elif local is not end:
            earlier = first.setdefault((local, end.value.dtype), end)
            if earlier is not end:
                shared[end] = earlier
    return passed, shared


def _towards(members: Sequence[Member], inputs: Collection[Local]) -> list[Member]:
    """Members through which a gradient gets to one of these inputs."""
    leading = set(inputs)
    leading_members = []
    for member in members:
        if any(local in leading for _, local in gradients_of(member)):
            leading.add(member.output)
            leading_members.append(member)
    return leading_members


def gradients_of(member: Member) -> Iterator[tuple[str, Local]]:
    """Arguments of ``member`` that have a gradient, with their tensors."""
    assert member.formula is not None
    for name, local in member.operands.items():
        if name in member.formula.gradients and is_differentiable(local):
            yield name, local


def fields_of(template: str) -> set[str]:
    """Names that a formula uses."""
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def _needed(members: Collection[Member], flowing: Collection[Local]) -> dict[Local, None]:
    """Values that the derivatives name."""
    values: dict[Local, None] = {}
    for member in members:
        assert member.formula is not None
        for name, local in gradients_of(member):
            if local not in flowing:
                continue
            used = fields_of(member.formula.gradients[name])
            values.update((other, None) for field, other in member.operands.items() if field in used)
            if "out" in used:
                values[member.output] = None
    return values


def _kept(chain: OperatorChain, needed: dict[Local, None]) -> tuple[tuple[Local, ...], tuple[Member, ...]]:
    choices = [
        _computed_from(chain, needed, available)
        for available in (chain.inputs, (*chain.inputs, *chain.outputs), (*chain.inputs, *needed))
    ]
    return min(choices, key=lambda choice: bytes_of(*choice[0]))


def _computed_from(
    chain: OperatorChain, needed: dict[Local, None], available: Collection[Local]
) -> tuple[tuple[Local, ...], tuple[Member, ...]]:
    """The values of ``available`` to save so that the needed ones can be computed, and the members that run again."""
    makers = {member.output: member for member in chain.members}
    saved: dict[Local, None] = {}
    needed_locals = set(needed)
    again = []
    for member in reversed(chain.members):
        if member.output in needed_locals and member.output not in available:
            again.append(member)
            needed_locals.update(member.operands.values())
    for local in needed_locals:
        if local in available or local not in makers:
            saved[local] = None
    ordered = [local for local in (*chain.inputs, *makers) if local in saved]
    return tuple(ordered), tuple(reversed(again))
