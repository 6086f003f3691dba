"""Passes that a step makes over gradients and weights beside its operators, in bytes read and written.

``whole`` are bytes of what is computed with, ``gradients`` of gradients, ``updated`` of what the optimizer updates, all
of what one of ``group`` devices that hold the same has before ZeRO divides it.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.dtypes import item_size
from planner.whole_step.candidates.mesh_layout import MeshLayout
from planner.whole_step.candidates.training_options import TrainingOptions
from planner.whole_step.costs.unit_figures import UnitFigures

#: How often ``unpacking_bytes`` passes over what is laid out whole, at least.
LEAST_UNPACKED = 2


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of some trained parameters on one device before ZeRO."""

    whole: float
    gradients: float
    updated: float

    @property
    def are_updated_in_place(self) -> bool:
        """Whether the optimizer updates what is computed with, by gradients of its dtype."""
        return self.updated == self.whole == self.gradients


def gradient_bytes(parameters: ParameterBytes, stage: int, *, group: int, num_microbatches: int) -> float:
    """Bytes, in the mean of the micro-batches, of copying gradients to where they are reduced and adding them up.

    The first micro-batch's are copied, further ones added; from ZeRO 2 on all are copied, and reduced pieces added.
    Where nothing is reduced and what is computed with is updated, autograd adds them where they are.
    """
    further = 1.0 - 1.0 / num_microbatches
    once = parameters.whole + parameters.gradients
    if group == 1 and parameters.are_updated_in_place:
        return further * (once + parameters.gradients)
    if stage < 2:
        return once + further * parameters.gradients
    return once + further * 3 * parameters.gradients / group


def unpacking_bytes(parameters: ParameterBytes, *, group: int) -> float:
    """Bytes of casting a rank's pieces, and of laying out whole what has been gathered of them."""
    return (parameters.updated + parameters.whole) / group + LEAST_UNPACKED * parameters.whole


def casting_bytes(parameters: ParameterBytes) -> float:
    """Bytes of making what is computed with of what was updated, where these are whole and differ."""
    return 0.0 if parameters.updated == parameters.whole else parameters.updated + parameters.whole


def least_gradient_bytes(
    figures: UnitFigures, layout: MeshLayout, training: TrainingOptions, *, num_microbatches: int
) -> float:
    """A lower bound of ``gradient_bytes`` of one copy of an undivided unit, under any ZeRO stage and sharding.

    A parameter is cut into no more parts than the axes ``tp`` and, of experts, ``ep`` have; one that copies share is
    left out, as it may be held once for all of them.
    """
    whole = gradients = updated = 0.0
    for weight in figures.weights:
        if weight.trainable and not weight.shared:
            elements = weight.elements / layout.tensor / (layout.expert if weight.expert else 1)
            whole += elements * item_size(weight.dtype)
            gradients += elements * item_size(training.gradients(weight.dtype))
            updated += elements * max(4, item_size(weight.dtype))
    parameters = ParameterBytes(whole, gradients, updated)
    stages = (0, 2) if layout.group > 1 else (0,)
    return min(
        gradient_bytes(parameters, stage, group=layout.group, num_microbatches=num_microbatches) for stage in stages
    )
