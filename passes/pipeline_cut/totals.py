"""Totals of the whole batch that the loss needs, and how the losses of micro-batches add up.

A mean over valid tokens is a sum over the batch divided by a count over the batch. The count needs no gradient and
comes from the inputs alone, so it is computed before the first micro-batch, for all of them, and handed to each: it
is a *total*. What is then left of a micro-batch's loss is a partial sum, and so are its gradients.

A total may also come from activations: how many tokens chose each expert, which a load-balancing loss multiplies by the
mean probability of each expert. Only the probability carries a gradient, so the loss is linear in what does. A pass of
all micro-batches through all chunks, without gradients, counts such totals before the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from passes.ir.graph import Value
from passes.ir.types import P, Placement
from passes.shard import Compute, Convert, Local, Repeat, Section
from passes.shard.operations import Operation, made_by, used_by, writes_state


class DependentSamplesError(ValueError):
    """Samples depend on each other, so that they cannot be run in several micro-batches."""


@dataclass(frozen=True)
class Total:
    """A value of the whole batch: ``source`` is a micro-batch's share of it on one data rank, ``target`` the sum."""

    source: Local
    target: Local


@dataclass(frozen=True)
class Additive:
    """A main section whose results add up over micro-batches.

    Attributes:
        body, results: as in a section, with totals in place of what they stand for.
        totals: values that must be computed over the whole batch first, from the inputs alone.
        before: operations that compute the totals' sources from the inputs.
        counted: totals that come from activations.
    """

    body: tuple[Operation, ...]
    results: tuple[Local, ...]
    totals: tuple[Total, ...]
    before: tuple[Operation, ...]
    counted: tuple[Total, ...] = ()

    @property
    def counting(self) -> Additive:
        """The section whose results are the sources of ``counted``."""
        return dataclasses.replace(self, results=tuple(total.source for total in self.counted), counted=())


def additive(main: Section, *, axis: int, paths: Collection[str]) -> Additive:
    """``main`` with every reduction over the batch axis (position ``axis``) taken out.

    Args:
        paths: what the results are called, for messages.

    Raises:
        DependentSamplesError: if samples depend on each other in another way than through totals, or a result is no sum
            over samples: such a model must be run in one micro-batch.
    """
    if any(map(writes_state, main.body)):
        raise DependentSamplesError(
            "the model writes a buffer in its forward, which every micro-batch would do again: plan with "
            "num_microbatches=1"
        )
    changed: dict[Local, Local] = {}
    totals: list[Total] = []
    body: list[Operation] = []
    for operation in _makers(main.body, main.results):
        if isinstance(operation, Repeat):
            _check_inside(operation, axis)
            body.append(_with_entries(operation, changed))
        elif isinstance(operation, Compute):
            body.append(_with_inputs(operation, changed, axis))
        elif axis in operation.step.axes and operation.forward is not None:
            _take_out(operation, axis, changed, totals)
        else:
            body.append(_moved(operation, changed, axis))
    results = tuple(changed.get(local, local) for local in main.results)
    for path, local in zip(paths, results):
        if local.placement[axis] != P:
            raise DependentSamplesError(
                f"output {path!r} is no sum over samples, so micro-batches cannot be added up: plan with "
                "num_microbatches=1"
            )
    from_inputs = [total for total in totals if _is_from_inputs(body, total)]
    counted = tuple(total for total in totals if total not in from_inputs)
    _check_counted(body, counted)
    return Additive(tuple(body), results, tuple(from_inputs), _before(body, from_inputs), counted)


def _check_inside(repeat: Repeat, axis: int) -> None:
    steps = (operation for operation in repeat.block.section.body if isinstance(operation, Convert))
    for step in (*steps, *repeat.between):
        if axis in step.step.axes and step.forward is not None:
            raise _mixing(step.source.value)


def _mixing(value: Value) -> DependentSamplesError:
    return DependentSamplesError(
        f"{value.name!r} (shape {list(value.shape)}) is computed from all samples together, so they cannot be run in "
        "several micro-batches: plan with num_microbatches=1"
    )


def _take_out(convert: Convert, axis: int, changed: dict[Local, Local], totals: list[Total]) -> None:
    """A reduction over the batch: of a value without a gradient it is a total, else the result stays partial."""
    source = changed.get(convert.source, convert.source)
    one_axis = not convert.step.is_joint
    if not one_axis or convert.step.source_type != P or convert.target.placement[axis] not in ("R", "I"):
        raise _mixing(convert.source.value)
    if convert.source.value.requires_grad:
        changed[convert.target] = source
        return
    value = convert.source.value
    total = Value(f"total_{value.name}", value.shape, value.dtype, kind="input")
    target = Local(total, convert.target.placement, convert.target.shape)
    changed[convert.target] = target
    totals.append(Total(source, target))


def _moved(convert: Convert, changed: dict[Local, Local], axis: int) -> Convert:
    """A conversion on another axis, of what is now partial on the batch axis, or now a total."""
    source = changed.get(convert.source)
    if source is None:
        return convert
    placement = _on_axis(convert.target.placement, axis, source.placement[axis])
    target = Local(source.value, placement, convert.target.shape)
    changed[convert.target] = target
    step = dataclasses.replace(
        convert.step, source=source.placement, target=_on_axis(convert.step.target, axis, source.placement[axis])
    )
    return dataclasses.replace(convert, step=step, source=source, target=target)


def _with_inputs(compute: Compute, changed: dict[Local, Local], axis: int) -> Compute:
    inputs = tuple(changed.get(local, local) for local in compute.inputs)
    for replacement, local in zip(inputs, compute.inputs):
        if replacement.placement[axis] != local.placement[axis]:
            raise DependentSamplesError(
                f"{compute.node.op} ({compute.node.key}) takes {local.value.name!r}, a sum over all samples with a "
                "gradient, and is not additive: plan with num_microbatches=1"
            )
    return dataclasses.replace(compute, inputs=inputs)


def _with_entries(repeat: Repeat, changed: dict[Local, Local]) -> Repeat:
    if any(entry in changed for entry in repeat.entries):
        return dataclasses.replace(repeat, entries=tuple(changed.get(entry, entry) for entry in repeat.entries))
    return repeat


def _on_axis(placement: Placement, axis: int, spmd_type: str) -> Placement:
    return (*placement[:axis], spmd_type, *placement[axis + 1 :])


def _before(body: Sequence[Operation], totals: Sequence[Total]) -> tuple[Operation, ...]:
    """The operations that compute the totals from the inputs alone, before any micro-batch runs."""
    return tuple(_makers(body, [total.source for total in totals]))


def _is_from_inputs(body: Sequence[Operation], total: Total) -> bool:
    """Whether a total depends on the inputs of the batch alone, and on no activation."""
    return not any(
        isinstance(operation, Repeat) or any(local.value.requires_grad for local in used_by(operation))
        for operation in _makers(body, [total.source])
    )


def _check_counted(body: Sequence[Operation], counted: Collection[Total]) -> None:
    """Raise DependentSamplesError if one of these totals depends on another: one pass could not count both."""
    targets = {total.target for total in counted}
    for total in counted:
        if any(targets.intersection(used_by(operation)) for operation in _makers(body, [total.source])):
            raise _mixing(total.source.value)


def _makers(body: Sequence[Operation], targets: Collection[Local]) -> tuple[Operation, ...]:
    """The operations, in order, that ``targets`` come from."""
    needed, makers = set(targets), []
    for operation in reversed(body):
        if needed.intersection(made_by(operation)):
            needed.update(used_by(operation))
            makers.append(operation)
    return tuple(reversed(makers))
