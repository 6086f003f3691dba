"""The choices of a unit under one sharding, as ``LayerCosts``: recompute policy × ZeRO stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from cost_models import CostModel
from cost_models.dtypes import item_size
from cost_models.memory import OPTIMIZER_MOMENTS, StateBytes, zero_state_bytes
from cost_models.step import LayerCosts, LayerSeconds
from planner.pipeline_ilp.stage_problem import UnitChoice, UnitRun
from planner.whole_step.candidates.mesh_layout import REPLICAS, Links, MeshLayout
from planner.whole_step.candidates.training_options import ZERO_STAGES, TrainingOptions
from planner.whole_step.costs.parameter_passes import (
    ParameterBytes,
    casting_bytes,
    gradient_bytes,
    unpacking_bytes,
)
from planner.whole_step.costs.step_prices import DATA, PIPELINE
from planner.whole_step.costs.unit_figures import Policy, UnitFigures, Weight

#: Tensors of a parameter's bytes that an optimizer on the host moves: gradient and weight down, weight up.
CARRIED = 3


@dataclass(frozen=True)
class StageSetting:
    """What the choices depend on beside the unit: layout and links, micro-batches a step, and what the user allows.

    With ``tied_apart`` units that share a parameter lie on different ranks, but with ``ends_together`` the first and
    the last unit on one. ``forward_passes``: how often a step computes forward (``StepPlan.forward_passes``).
    ``host_seconds``: what the host needs to launch one operator or collective (``Device.host_seconds``).
    """

    layout: MeshLayout
    links: Links
    num_microbatches: int
    forward_passes: int
    tied_apart: bool
    ends_together: bool
    training: TrainingOptions
    recompute: Collection[str]
    zero: Collection[int]
    host_seconds: float = 0.0


@dataclass(frozen=True)
class RankPrices:
    """What the units of a pipeline rank are priced with: the setting, and their figures on its devices."""

    setting: StageSetting
    figures: Sequence[UnitFigures]

    @property
    def figures_on_rank(self) -> Sequence[UnitFigures]:
        """The figures as choices have them: with tied parameters in each unit that uses them from another rank."""
        if not self.setting.tied_apart:
            return self.figures
        return with_tied_copies(self.figures, ends_together=self.setting.ends_together)


@dataclass(frozen=True)
class _Zero:
    """Costs of one ZeRO stage for a unit, whatever is recomputed: seconds, bytes of state, bytes of temporaries.

    ``launches``: collectives and passes over parameters in a micro-batch, in a forward pass and backward.
    """

    gather_forward: float
    gather_backward: float
    reduce_backward: float
    reduce_step: float
    update_step: float
    gather_step: float
    accumulate: float
    unpack: float
    state_bytes: float
    transient_bytes: float
    launches: tuple[int, int]


def unit_runs(figures: Sequence[UnitFigures], setting: StageSetting) -> tuple[UnitRun, ...]:
    """The chain of units, each with all its choices."""
    if setting.tied_apart:
        figures = with_tied_copies(figures, ends_together=setting.ends_together)
    return tuple(_run(unit_figures, index, setting) for index, unit_figures in enumerate(figures))


def with_all_choices(ways: Sequence[Sequence[UnitRun]]) -> tuple[UnitRun, ...]:
    """The chain of units with the choices that it has under any of several ways in which ZeRO divides; those of ZeRO 0,
    which divides nothing, are the same under all."""
    undivided = f"zero-{ZERO_STAGES[0]}"
    return tuple(
        replace(
            alike[0],
            choices=(
                *alike[0].choices,
                *(choice for run in alike[1:] for choice in run.choices if choice.label[1] != undivided),
            ),
        )
        for alike in zip(*ways, strict=True)
    )


def with_tied_copies(figures: Sequence[UnitFigures], *, ends_together: bool = False) -> tuple[UnitFigures, ...]:
    """The figures with every tied parameter counted in each unit that uses it, for users on different ranks.

    With ``ends_together`` not in the last unit if the first has it.
    """
    last = len(figures) - 1

    def held_apart(weight: Weight) -> Weight:
        if not (ends_together and 0 in weight.uses and last in weight.uses):
            return weight
        return replace(weight, uses=type(weight.uses)(use for use in weight.uses if use != last))

    own = [tuple(map(held_apart, unit_figures.weights)) for unit_figures in figures]
    tied = [weight for weights in own for weight in weights if len(weight.uses) > 1]
    figures_with_copies = []
    for index, (unit_figures, weights) in enumerate(zip(figures, own)):
        own_paths = {weight.path for weight in weights}
        more = (
            replace(weight, shared=unit_figures.unit.count > 1)
            for weight in tied
            if index in weight.uses and weight.path not in own_paths
        )
        figures_with_copies.append(replace(unit_figures, weights=(*weights, *more)))
    return tuple(figures_with_copies)


def _run(figures: UnitFigures, index: int, setting: StageSetting) -> UnitRun:
    # A pipeline is cut before every copy but the model's first.
    is_cut = setting.layout.pipeline > 1 and (index > 0 or figures.unit.count > 1)
    return UnitRun(
        name=figures.unit.name,
        count=figures.unit.count,
        choices=tuple(_choices(figures, setting)),
        receive_forward=_sending(figures.entering_bytes, setting) * setting.forward_passes if is_cut else 0.0,
        receive_backward=_sending(figures.returning_bytes, setting) if is_cut else 0.0,
    )


def _sending(num_bytes: float, setting: StageSetting) -> float:
    """Seconds of what crosses a cut; nothing is sent where there is nothing, as of gradients of frozen layers."""
    return setting.links.axes.p2p_seconds(num_bytes=num_bytes, axis=PIPELINE) if num_bytes else 0.0


def _choices(figures: UnitFigures, setting: StageSetting) -> Iterator[UnitChoice]:
    stages = [stage for stage in ZERO_STAGES if stage in setting.zero]
    if setting.layout.group == 1 or not any(weight.trainable for weight in figures.weights):
        stages = stages[:1]  # nothing to divide, or nobody to divide it with: all stages are the same
    allowed = [policy for policy in figures.policies if policy.name in setting.recompute]
    pieces = {divides: traffic(figures, setting, divides=divides) for divides in {stage > 0 for stage in stages}}
    for stage in stages:
        zero = _zero(figures, stage, setting, pieces[stage > 0])
        for policy in allowed or figures.policies[:1]:
            yield UnitChoice(label=(policy.name, f"zero-{stage}"), costs=_costs(figures, policy, zero, setting))


def _costs(figures: UnitFigures, policy: Policy, zero: _Zero, setting: StageSetting) -> LayerCosts:
    forward = (figures.compute[0] + figures.communication[0] + zero.unpack) * setting.forward_passes
    backward = sum(
        (
            figures.compute[1],
            figures.communication[1],
            policy.compute,
            policy.communication,
            zero.accumulate,
            zero.unpack,
        )
    )
    slower_forward, slower_backward = _contention(forward, backward, zero, setting)
    forward, backward = forward + slower_forward, backward + slower_backward
    late_forward, late_backward = _carry(policy, forward, backward, setting)
    forward, backward = forward + late_forward, backward + late_backward
    late_forward, late_backward = _launching(figures, policy, zero, forward, backward, setting)
    return LayerCosts(
        forward=forward + late_forward,
        backward=backward + late_backward,
        backward_weight=figures.weight_backward + zero.accumulate,
        gather_forward=zero.gather_forward,
        gather_backward=zero.gather_backward,
        reduce_backward=zero.reduce_backward,
        reduce_step=zero.reduce_step,
        update_step=zero.update_step,
        gather_step=zero.gather_step,
        state_bytes=zero.state_bytes,
        saved_bytes=policy.saved_bytes,
        peak_bytes=policy.peak_bytes + zero.transient_bytes,
        host_bytes=policy.host_bytes,
    )


def seconds_by_cause(figures: UnitFigures, label: tuple[str, str], setting: StageSetting) -> LayerSeconds:
    """What the seconds of the choice (recompute policy, ``zero-<stage>``) of a unit are made of."""
    name, stage = label
    policy = next(policy for policy in figures.policies if policy.name == name)
    level = int(stage.removeprefix("zero-"))
    zero = _zero(figures, level, setting, traffic(figures, setting, divides=level > 0))
    parts = LayerSeconds(
        compute_forward=figures.compute[0] * setting.forward_passes,
        compute_backward=figures.compute[1],
        communication_forward=figures.communication[0] * setting.forward_passes,
        communication_backward=figures.communication[1],
        recompute=policy.compute,
        recommunicate=policy.communication,
        accumulate=zero.accumulate,
        unpack_forward=zero.unpack * setting.forward_passes,
        unpack_backward=zero.unpack,
    )
    slower_forward, slower_backward = _contention(parts.forward, parts.backward, zero, setting)
    parts = replace(parts, contention_forward=slower_forward, contention_backward=slower_backward)
    late_forward, late_backward = _carry(policy, parts.forward, parts.backward, setting)
    parts = replace(parts, carry_forward=late_forward, carry_backward=late_backward)
    late_forward, late_backward = _launching(figures, policy, zero, parts.forward, parts.backward, setting)
    return replace(parts, host_forward=late_forward, host_backward=late_backward)


def _carry(policy: Policy, forward: float, backward: float, setting: StageSetting) -> tuple[float, float]:
    """Seconds by which activations take longer to the host than the units after take forward, and back than those
    before take backward: in a row of equal units, than the unit itself."""
    if not policy.host_bytes:
        return 0.0, 0.0
    cluster = setting.links.axes.cluster
    assert cluster.host is not None  # ``planner.whole_step.offloading`` has refused it
    carried = cluster.host.carry_seconds(policy.host_bytes, num_devices=cluster.host.num_devices(cluster.levels))
    return max(0.0, carried - forward), max(0.0, carried - backward)


def _launching(
    figures: UnitFigures, policy: Policy, zero: _Zero, forward: float, backward: float, setting: StageSetting
) -> tuple[float, float]:
    """Seconds by which the host takes longer to launch a unit than the device to run it: while it runs one operator the
    host launches those after it, so that the longer of the two counts. From unit to unit the host gets no further
    ahead."""
    if not setting.host_seconds:
        return 0.0, 0.0
    launched = figures.launches[0] + figures.collective_launches[0] + zero.launches[0]
    launched_back = figures.launches[1] + figures.collective_launches[1] + policy.launches + zero.launches[1]
    host_forward = setting.host_seconds * launched * setting.forward_passes
    return max(0.0, host_forward - forward), max(0.0, setting.host_seconds * launched_back - backward)


def _contention(forward: float, backward: float, zero: _Zero, setting: StageSetting) -> tuple[float, float]:
    """Seconds by which compute slows down while parameters are gathered and gradients reduced beside it.

    What is reduced once a step slows one backward pass, which is shared out among all micro-batches.
    """
    slowdown = setting.links.axes.device.overlap_slowdown
    every_time = min(backward, zero.gather_backward + zero.reduce_backward)
    once = min(backward - every_time, zero.reduce_step) / setting.num_microbatches
    return slowdown * min(forward, zero.gather_forward), slowdown * (every_time + once)


def _zero(figures: UnitFigures, stage: int, setting: StageSetting, pieces: Sequence[Traffic]) -> _Zero:
    """Costs by ZeRO stage: 0 all-reduces gradients once a step; 1 reduce-scatters them once a step and gathers
    parameters after the update; 2 and 3 reduce-scatter in every micro-batch; 3 gathers parameters before each use.

    Groups that hold the same pieces sum their gradients once a step."""
    tied = sum(piece.tied for piece in pieces)
    gathers = [piece.over_group("all_gather", piece.whole) for piece in pieces] if stage else []
    scatters = [piece.over_group("reduce_scatter", piece.gradients) for piece in pieces] if stage else []
    gather, scatter = sum(gathers, 0.0), sum(scatters, 0.0)
    reduced = sum(piece.over_group("all_reduce", piece.gradients) for piece in pieces) if not stage else 0.0
    once = {0: reduced, 1: scatter}.get(stage, 0.0) + sum(piece.over_replicas() for piece in pieces)
    apart = setting.links.axes.p2p_seconds(num_bytes=tied, axis=PIPELINE) if tied and setting.tied_apart else 0.0
    transient = sum(
        {2: piece.gradients, 3: 2 * piece.whole + piece.gradients}.get(stage, 0.0)
        for piece in pieces
        if piece.group > 1
    )
    accumulated = [_gradient_passes(piece, stage, setting) for piece in pieces]
    unpacked = [_unpacking(piece, setting) for piece in pieces] if stage == 3 else []
    each_pass = sum(map(bool, (*gathers, *unpacked))) if stage == 3 else 0
    once_back = sum(map(bool, (*accumulated, *(scatters if stage >= 2 else ()))))
    return _Zero(
        gather_forward=gather * setting.forward_passes if stage == 3 else 0.0,
        gather_backward=gather if stage == 3 else 0.0,
        reduce_backward=scatter if stage >= 2 else 0.0,
        reduce_step=once + apart,
        update_step=_update(pieces, stage, setting),
        gather_step=gather if stage in (1, 2) else 0.0,
        accumulate=sum(accumulated),
        unpack=sum(unpacked, 0.0),
        state_bytes=state_bytes(figures, stage, setting).total + figures.buffer_bytes,
        transient_bytes=transient,
        launches=(each_pass, each_pass + once_back),
    )


def state_bytes(figures: UnitFigures, stage: int, setting: StageSetting) -> StateBytes:
    """Parameters, gradients and optimizer state of one copy of a unit on one device (rounded to whole bytes)."""
    training, total = setting.training, [0.0, 0.0, 0.0, 0.0]
    for weight in figures.weights:
        share = _share(weight, figures.unit.count, setting.layout.pipeline)
        if not weight.trainable:
            total[0] += share * weight.elements * item_size(weight.dtype)
            continue
        parts = zero_state_bytes(
            weight.elements,
            weight.dtype,
            stage=stage,
            group_size=setting.layout.piece_ranks(expert=weight.expert),
            gradient_dtype=training.gradients(weight.dtype),
            optimizer=training.optimizer,
            offloaded=training.offload,
        )
        for index, part in enumerate((parts.parameters, parts.gradients, parts.optimizer, parts.host)):
            total[index] += share * part
    return StateBytes(*(round(part) for part in total))


@dataclass(frozen=True)
class Traffic:
    """Trainable parameters of one copy on one device before ZeRO that one group of ``group`` devices holds alike:
    elements, bytes in the compute dtype, of gradients, of the gradients of tied parameters, and of what is updated.

    ``replicas``: groups whose devices hold the same pieces."""

    prices: CostModel
    group: int
    replicas: int
    elements: float
    whole: float
    gradients: float
    tied: float
    updated: float

    @property
    def bytes(self) -> ParameterBytes:
        return ParameterBytes(self.whole, self.gradients, self.updated)

    def over_group(self, collective: str, num_bytes: float) -> float:
        """Seconds of a collective among those that hold the same."""
        return self.prices.collective_seconds(collective, num_bytes=num_bytes, axis=DATA) if self.group > 1 else 0.0

    def over_replicas(self) -> float:
        """Seconds to sum the gradients of the pieces over the groups that hold the same."""
        if self.replicas == 1:
            return 0.0
        pieces = self.gradients / self.group
        return self.prices.collective_seconds("all_reduce", num_bytes=pieces, axis=REPLICAS)


def traffic(figures: UnitFigures, setting: StageSetting, *, divides: bool) -> tuple[Traffic, ...]:
    """What is gathered and reduced of one copy of a unit, under ZeRO 0 or a stage that ``divides``: together or, on an
    axis ``ep``, experts and the rest."""
    layout, links = setting.layout, setting.links

    def held(weights: Sequence[Weight], *, expert: bool) -> Traffic:
        if not divides:
            prices = links.expert_group if expert else links.group
            return _traffic(weights, figures.unit.count, prices, layout.group_of(expert=expert), setting)
        prices = links.expert_pieces if expert else links.pieces
        pieces = _traffic(weights, figures.unit.count, prices, layout.piece_ranks(expert=expert), setting)
        return replace(pieces, replicas=layout.num_replicas)

    if layout.expert == 1 or not any(weight.expert and weight.trainable for weight in figures.weights):
        return (held(figures.weights, expert=False),)
    rest = [weight for weight in figures.weights if not weight.expert]
    experts = [weight for weight in figures.weights if weight.expert]
    return held(rest, expert=False), held(experts, expert=True)


def _traffic(weights: Sequence[Weight], count: int, prices: CostModel, group: int, setting: StageSetting) -> Traffic:
    elements = whole = gradients = tied = updated = 0.0
    for weight in weights:
        if not weight.trainable:
            continue
        local_elements = _share(weight, count, setting.layout.pipeline) * weight.elements
        gradient = local_elements * item_size(setting.training.gradients(weight.dtype))
        elements, gradients = elements + local_elements, gradients + gradient
        whole += local_elements * item_size(weight.dtype)
        updated += local_elements * max(4, item_size(weight.dtype))
        tied += gradient if len(weight.uses) > 1 else 0.0
    return Traffic(prices, group, 1, elements, whole, gradients, tied, updated)


def _share(weight: Weight, count: int, num_stages: int) -> float:
    """The share of a parameter that counts for one copy: 1, or, if all copies share it, one parameter a stage."""
    return min(1.0, num_stages / count) if weight.shared else 1.0


def _update(pieces: Sequence[Traffic], stage: int, setting: StageSetting) -> float:
    """Seconds of the optimizer: gradients read; parameters and moments read and written; working weights made of them.

    On the host after gradients and weights came down there, and before the weights go up again in 16 bits.
    """
    elements = sum(piece.elements / (piece.group if stage else 1) for piece in pieces)
    if not elements:
        return 0.0
    touched_bytes = elements * (4 + 8 * (1 + OPTIMIZER_MOMENTS[setting.training.optimizer]))
    if not setting.training.offload:
        return _memory_pass(touched_bytes, setting, kind="optimizer") + _working_weights(pieces, stage, setting)
    touched_bytes += 2 * elements
    cluster = setting.links.axes.cluster
    assert cluster.host is not None  # ``planner.whole_step.offloading`` has refused it
    return cluster.host.update_seconds(
        carried_bytes=CARRIED * sum(piece.whole / (piece.group if stage else 1) for piece in pieces),
        touched_bytes=touched_bytes,
        num_devices=cluster.host.num_devices(cluster.levels),
    )


def _working_weights(pieces: Sequence[Traffic], stage: int, setting: StageSetting) -> float:
    """Seconds in which what is computed with is made of what was updated, once a step; ZeRO 3 does for every use."""
    if stage == 3:
        return 0.0
    if stage:
        return sum(_unpacking(piece, setting) for piece in pieces)
    return sum(_memory_pass(casting_bytes(piece.bytes), setting) for piece in pieces)


def _gradient_passes(piece: Traffic, stage: int, setting: StageSetting) -> float:
    """Seconds of one micro-batch in which gradients are copied and added up."""
    copied = gradient_bytes(piece.bytes, stage, group=piece.group, num_microbatches=setting.num_microbatches)
    return _memory_pass(copied, setting)


def _unpacking(piece: Traffic, setting: StageSetting) -> float:
    """Seconds to cast a rank's pieces, and to lay out whole what has been gathered of them."""
    return _memory_pass(unpacking_bytes(piece.bytes, group=piece.group), setting)


def _memory_pass(num_bytes: float, setting: StageSetting, *, kind: str = "list_copy") -> float:
    """Seconds to move ``num_bytes`` through the device's memory: gradients, weights, an update."""
    return setting.links.axes.compute_seconds(flops=0.0, num_bytes=num_bytes, dtype="float32", kind=kind)
