"""Lower bounds of a candidate before its sharding is searched, from shardings with fewer axes.

They rest on two properties of the cost models (``cost_models.efficiency``, ``cost_models.collectives``): one of n
equal parts of an operator or a message never takes less than 1/n of its time, and never holds less than 1/n of its
bytes. So an axis of n devices saves at most a factor of n, and a micro-batch of fewer samples takes at least its share
of a larger one's operators, if not of what is copied beside collectives (``PricedCuts``).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from cost_models import CostModel
from cost_models.memory import zero_state_bytes
from cost_models.schedules import in_flight, rank_of_chunk
from planner.whole_step.candidates.candidates import Candidate
from planner.whole_step.candidates.mesh_layout import Links, MeshLayout, divisors
from planner.whole_step.candidates.training_options import TrainingOptions
from planner.whole_step.costs.hulls import hull
from planner.whole_step.costs.least_passes import StageSeconds, least_beside, stage_seconds
from planner.whole_step.costs.least_received import least_received, seconds_to_receive
from planner.whole_step.costs.least_recompute import ROUNDING, Savings
from planner.whole_step.costs.level_one import LevelOne, Sharded
from planner.whole_step.costs.parameter_passes import least_gradient_bytes
from planner.whole_step.costs.sharding import Cut
from planner.whole_step.costs.split_fills import PhaseSeconds, operator_seconds
from planner.whole_step.costs.step_prices import CONTEXT, TENSOR
from planner.whole_step.costs.unit_figures import UnitFigures

#: Devices from which on so many tensor sizes stand beside a context axis that its conversions are worth pricing apart.
SHARED_FROM = 256


class PricedCuts:
    """Seconds of one micro-batch for some cuts, and the lower bounds that follow for cuts into more parts.

    Cuts of other axes than the batch's bound only those into micro-batches as large: of one sample nothing is copied
    beside collectives (``Step.copied_bytes``), so that one may take less than its share of several.
    """

    def __init__(self) -> None:
        self.seconds: dict[Cut, float] = {}
        self._totals: list[tuple[Cut, float]] = []
        self._most: dict[Cut, tuple[int, float]] = {}

    def add(self, cut: Cut, seconds: float) -> None:
        """Record the seconds of ``cut``, unless it has some already."""
        if cut not in self.seconds:
            self.seconds[cut] = seconds
            self._totals.append((cut, seconds * cut.parts))

    def most(self, cut: Cut) -> float:
        """Lower bound of ``cut`` from the recorded cuts into fewer parts; checks only those new since the last call."""
        looked_at, most = self._most.get(cut, (0, 0.0))
        if looked_at < len(self._totals):
            for recorded, total in itertools.islice(self._totals, looked_at, None):
                if not (
                    cut.context % recorded.context
                    or cut.tensor % recorded.tensor
                    or cut.pieces % recorded.pieces
                    or cut.expert % recorded.expert
                    or (recorded.context * recorded.tensor > 1 and cut.batches != recorded.batches)
                ):
                    most = max(most, total)
            self._most[cut] = (len(self._totals), most)
        return most / cut.parts


@dataclass(frozen=True)
class _Least:
    """Least bytes of the undivided model with one micro-batch: state; saved under the leanest policies; peak."""

    state: float
    saved: float
    peak: float


class Bounds:
    """Lower bounds of the candidates of one search, cached by cut.

    ``context_first``: a context axis beside a tensor axis does what it does alone.
    """

    def __init__(self, level_one: LevelOne, training: TrainingOptions, *, context_first: bool = True) -> None:
        self.level_one, self.training, self.context_first = level_one, training, context_first
        self.priced_cuts = PricedCuts()
        #: Seconds of conversions on the context axis, by the size of the tensor axis beside it.
        self.conversions: defaultdict[int, PricedCuts] = defaultdict(PricedCuts)
        #: Seconds of cuts on the context axis alone, by how many neighbours lie inside of each of its places.
        self.apart: defaultdict[int, PricedCuts] = defaultdict(PricedCuts)
        self.impossible: set[Cut] = set()
        self._zero: dict[MeshLayout, list[tuple[float, float]]] = {}
        self._stages: dict[MeshLayout, list[list[StageSeconds]]] = {}
        self._passes: dict[tuple[MeshLayout, int], float] = {}
        self._leasts: dict[int, _Least | None] = {}
        self._savings: dict[int, Savings | None] = {}
        self._experts: dict[Cut, float] = {}
        #: Lower bound of each device's memory shortfall in bytes, set when no recompute policy or ZeRO stage fits.
        self.missing = 0.0
        #: Seconds and missing bytes.
        self._recompute: dict[tuple[object, ...], tuple[float, float]] = {}
        self._gradients: dict[tuple[int, ...], float] = {}
        self._undivided: dict[int, PhaseSeconds] = {}
        #: Of every unit, where a pipeline may be cut.
        self._boundaries: dict[tuple[MeshLayout, int], tuple[tuple[float, int], ...]] = {}

    def whole(self, cut: Cut) -> float:
        """Lower bound of one micro-batch in seconds, from undivided operators; infinite if nothing divides."""
        if cut.expert == 1:
            return self._alone(Cut(cut.pieces)) / (cut.context * cut.tensor)
        if self._alone(Cut(cut.pieces)) == math.inf:
            return math.inf
        return self._beside(Cut(cut.pieces, expert=cut.expert), self.rest.whole) / (cut.context * cut.tensor)

    @functools.cached_property
    def rest(self) -> Bounds:
        """Bounds of all but experts, which an axis of experts divides as a data axis does."""
        return Bounds(self.level_one.without_experts, self.training, context_first=False)

    def _beside(self, cut: Cut, rest: Callable[[Cut], float]) -> float:
        """Seconds of experts and their exchange under ``cut``, and of the ``rest`` with ``ep`` as part of ``dp``.

        Every operator and conversion of the rest has the same parts under both.
        """
        if cut not in self._experts:
            self._experts[cut] = self.level_one.least_of_experts(cut)
        return self._experts[cut] + rest(cut._replace(pieces=cut.pieces * cut.expert, expert=1))

    def zero(
        self, candidate: Candidate, links: Mapping[MeshLayout, Links], memory: float, stages: Collection[int]
    ) -> float:
        """Lower bound of the seconds on ZeRO's communication streams for one micro-batch, over all ranks together.

        State must fit beside the least activations. A relaxation: fractions of layers take each stage over each group
        of ``links`` (layouts that differ in ``zero_ranks``), those that free most bytes a second first (as in
        ``recompute``). Infinite if no stage fits.
        """
        layout, room = candidate.layout, self._room_for_state(candidate, memory)
        if layout not in self._zero:
            self._zero[layout] = hull(list(self._zero_costs(candidate, links, stages)))
        communication = _least_within(room, self._zero[layout])
        if communication == math.inf:
            self.missing = (self._zero[layout][-1][0] - room) / layout.pipeline
        return communication

    def _room_for_state(self, candidate: Candidate, memory: float) -> float:
        """Bytes of all ranks of one pipeline beside the least activations."""
        least, layout = self._least(candidate.cut.pieces), candidate.layout
        assert least is not None  # the candidate has been bounded by it
        return memory * layout.pipeline - max(least.saved, least.peak) / layout.num_parts

    def passes(
        self, candidate: Candidate, links: Mapping[MeshLayout, Links], memory: float, stages: Collection[int]
    ) -> float:
        """Lower bound of the seconds by which ZeRO prolongs the compute of one micro-batch, over all ranks together:
        see ``planner.whole_step.costs.least_passes``. It adds to every bound of the rest."""
        key = candidate.layout, candidate.cut.pieces
        if key not in self._passes:
            layout = candidate.layout
            self._passes[key] = least_beside(
                self._figures(candidate),
                self._stages_of_units(candidate, links, stages),
                parts=layout.num_parts,
                num_microbatches=candidate.num_microbatches,
                slowdown=next(iter(links.values())).axes.device.overlap_slowdown,
                room=self._room_for_state(candidate, memory),
            )
        return self._passes[key]

    def _zero_costs(
        self, candidate: Candidate, links: Mapping[MeshLayout, Links], stages: Collection[int]
    ) -> Iterator[tuple[float, float]]:
        """(bytes held, seconds of a micro-batch on the communication streams) of the whole model, over one pipeline, at
        every ZeRO stage over every group."""
        counts = [figures.unit.count for figures in self._figures(candidate)]
        for of_units in zip(*self._stages_of_units(candidate, links, stages), strict=True):
            seconds = sum(count * (2 * each.gather + each.reduce) for count, each in zip(counts, of_units))
            yield sum(each.held for each in of_units), seconds

    def _stages_of_units(
        self, candidate: Candidate, links: Mapping[MeshLayout, Links], stages: Collection[int]
    ) -> list[list[StageSeconds]]:
        """Of every unit, in model order, each ZeRO stage over each group of ``links``."""
        layout = candidate.layout
        if layout not in self._stages:
            self._stages[layout] = [
                list(stage_seconds(each, links, stages, self.training)) for each in self._figures(candidate)
            ]
        return self._stages[layout]

    def _figures(self, candidate: Candidate) -> tuple[UnitFigures, ...]:
        """Of every unit, undivided but for the batch."""
        sharded = self.level_one.alone(Cut(candidate.cut.pieces))
        assert sharded is not None  # the candidate has been bounded by it
        return sharded.figures

    def recompute(self, candidate: Candidate, memory: float) -> float:
        """Lower bound of the seconds that one micro-batch recomputes to fit in ``memory`` bytes on each device: see
        ``planner.whole_step.costs.least_recompute``. Infinite if even the leanest policies do not fit.

        It adds to every bound of the rest: recomputed operators run again, divided over no more devices.
        """
        layout = candidate.layout
        held = _fewest_in_flight(candidate.schedule, layout.pipeline, candidate.num_microbatches, candidate.num_chunks)
        key = (candidate.cut, layout.num_devices, held)
        if key not in self._recompute:
            savings, least = self._savings_of(candidate.cut.pieces), self._least(candidate.cut.pieces)
            self._recompute[key] = math.inf, 0.0
            if savings is not None and least is not None:
                state = least.state * layout.pipeline / layout.num_devices
                self._recompute[key] = savings.least_recomputed(held, memory, state=state, parts=layout.num_parts)
        seconds, self.missing = self._recompute[key]
        return seconds

    def gradients(self, candidate: Candidate, prices: CostModel) -> float:
        """Lower bound of the seconds in which one micro-batch's gradients are copied and added up, over all stages.

        Like ``recompute`` it adds to every bound of the rest. ``prices`` are those of all devices.
        """
        layout, pieces = candidate.layout, candidate.cut.pieces
        key = pieces, layout.tensor, layout.expert, layout.group, candidate.num_microbatches
        if key not in self._gradients:
            sharded = self.level_one.alone(Cut(pieces))
            assert sharded is not None  # the candidate has been bounded by it
            self._gradients[key] = sum(
                figures.unit.count
                * _copying(
                    least_gradient_bytes(figures, layout, self.training, num_microbatches=candidate.num_microbatches),
                    prices,
                )
                for figures in sharded.figures
            )
        return self._gradients[key]

    def reducing(self, candidate: Candidate, links: Links) -> float:
        """Lower bound of the seconds in which a step sums all gradients (``byte_weights.reducing_seconds``)."""
        return sum(
            figures.unit.count
            * sum(each.reduce_step for each in stage_seconds(figures, {candidate.layout: links}, (0,), self.training))
            for figures in self._figures(candidate)
        )

    def launched(self, candidate: Candidate) -> float:
        """Lower bound of the seconds in which the host launches one micro-batch, over all stages: its operators, which
        are as many under all shardings. Unlike ``recompute`` it adds to no bound: the device computes meanwhile."""
        each = self.level_one.cluster.device.host_seconds
        if not each:
            return 0.0
        return each * sum(figures.unit.count * sum(figures.launches) for figures in self._figures(candidate))

    def received(self, candidate: Candidate, prices: CostModel) -> float:
        """Lower bound of the seconds in which the chunks receive one micro-batch from other ranks, over all of them.

        Like ``recompute`` it adds to every bound of the rest. ``prices`` are those of all devices.
        """
        key = candidate.layout, candidate.cut.pieces
        if key not in self._boundaries:
            self._boundaries[key] = seconds_to_receive(self._figures(candidate), candidate.layout, prices)
        return least_received(candidate, self._boundaries[key])

    def undivided(self, pieces: int) -> PhaseSeconds:
        """Seconds of all operators on one micro-batch, by phase, if only the batch is divided."""
        if pieces not in self._undivided:
            sharded = self.level_one.alone(Cut(pieces))
            assert sharded is not None  # the candidate has been bounded by it
            self._undivided[pieces] = operator_seconds(sharded.figures)
        return self._undivided[pieces]

    def _savings_of(self, pieces: int) -> Savings | None:
        """What recomputing saves of the undivided model, worked out once; None if nothing divides the batch so."""
        if pieces not in self._savings:
            sharded = self.level_one.alone(Cut(pieces))
            self._savings[pieces] = None if sharded is None else Savings.of(sharded.figures)
        return self._savings[pieces]

    def scaled(self, cut: Cut) -> float:
        """Lower bound of one micro-batch in seconds, from the recorded cuts into fewer parts on the same axes.

        If d divides n, an axis of d devices takes at most n/d times as long as one of n. With both axes the context
        axis does at every operator what it does alone (``planner.whole_step.costs.sharding``), so its conversions add
        to the whole cost of the tensor axis, each with at least 1/n of the bytes.
        """
        least = self.priced_cuts.most(cut)
        if cut.expert > 1:
            return max(
                least, self.whole(cut), self._beside(cut, self.rest.scaled), self._beside(cut, self._apart(cut).most)
            )
        if cut.context == 1 or cut.tensor == 1 or not self.context_first:
            return least
        tensor = self.priced_cuts.most(Cut(cut.pieces, 1, cut.tensor)) / cut.context
        along = Cut(cut.pieces, cut.context)
        between = max(self.conversions[beside].most(along) for beside in (1, cut.tensor))
        return max(least, tensor + between / cut.tensor)

    def by_axis(self, cut: Cut, enough: float) -> float:
        """The bound of ``scaled`` after also solving each axis by itself, on its best links; stops at ``enough``."""
        least = self.scaled(cut)
        if cut.expert > 1:
            return max(least, self._by_axis_beside_experts(cut, enough))
        for axis, size in ((TENSOR, cut.tensor), (CONTEXT, cut.context)):
            for part in self._telling_parts(size):
                if least >= enough:
                    return least
                along = Cut(cut.pieces, 1, part) if axis == TENSOR else Cut(cut.pieces, part)
                if self._alone(along) == math.inf and part == size:
                    return math.inf
                least = max(least, self.scaled(cut))
        if cut.context == 1 or cut.tensor == 1 or least >= enough or not self.context_first:
            return least
        if self.level_one.cluster.num_devices < SHARED_FROM:
            return least
        along = Cut(cut.pieces, cut.context)
        self.conversions[cut.tensor].add(along, self.level_one.beside(along, cut.tensor))
        return max(least, self.scaled(cut))

    def _by_axis_beside_experts(self, cut: Cut, enough: float) -> float:
        """``by_axis`` of all but experts; the context axis lies around that of experts, so it is priced there."""
        room = enough - self._experts[cut]
        if cut.context == 1 or not self.level_one.has_one_place(cut):
            return self._beside(cut, lambda merged: self.rest.by_axis(merged, room))
        along = Cut(cut.pieces * cut.expert, cut.context)
        sharded = self.rest.level_one.apart(along, cut.expert * cut.tensor)
        if sharded is None:
            return math.inf
        self._apart(cut).add(along, sharded.without_samples)
        least = self._beside(cut, self._apart(cut).most)
        if cut.tensor == 1 or least >= enough:
            return least
        across = self._beside(cut, lambda merged: self.rest.by_axis(merged._replace(context=1), room) / cut.context)
        return max(least, across)

    def _apart(self, cut: Cut) -> PricedCuts:
        """Of all but experts, cuts on a context axis that lies on the ranks as that of ``cut`` does."""
        return self.rest.apart[cut.expert * cut.tensor]

    def _telling_parts(self, size: int) -> list[int]:
        """Sizes of an axis whose own programs bound one of ``size`` devices: that alone if it lies within a node; else,
        smallest first, its divisors that do not, which talk over slower links and bound many other sizes."""
        node = self.level_one.cluster.levels[0].group_size
        return [part for part in divisors(size) if part > node] or [size]

    def learn(self, cut: Cut, seconds: float) -> None:
        """Record the seconds of a cut on the best links, to bound cuts into more parts."""
        self.priced_cuts.add(cut, seconds)

    def memory(self, candidate: Candidate) -> float:
        """Lower bound of the fullest device's bytes: state divided over all devices, one micro-batch in flight."""
        least = self._least(candidate.cut.pieces)
        if least is None:
            return math.inf
        layout = candidate.layout
        activations = max(least.saved / layout.pipeline, least.peak) / layout.num_parts
        return least.state / layout.num_devices + activations

    def _least(self, pieces: int) -> _Least | None:
        if pieces not in self._leasts:
            sharded = self.level_one.alone(Cut(pieces))
            self._leasts[pieces] = None if sharded is None else self._least_of(sharded)
        return self._leasts[pieces]

    def _least_of(self, sharded: Sharded) -> _Least:
        figures = sharded.figures
        return _Least(
            state=self._state(sharded),
            saved=sum(
                unit_figures.unit.count * min(policy.saved_bytes for policy in unit_figures.policies)
                for unit_figures in figures
            ),
            peak=max(
                min(policy.saved_bytes + policy.peak_bytes for policy in unit_figures.policies)
                for unit_figures in figures
            ),
        )

    def _state(self, sharded: Sharded) -> float:
        """Bytes of all parameters, gradients and optimizer state of the model."""
        total = 0.0
        for figures in sharded.figures:
            for weight in figures.weights:
                if weight.trainable:
                    dtype = self.training.gradients(weight.dtype)
                    parts = zero_state_bytes(
                        weight.elements, weight.dtype, stage=3, group_size=1, gradient_dtype=dtype,
                        optimizer=self.training.optimizer, offloaded=self.training.offload,
                    )  # fmt: skip
                    total += (1 if weight.shared else figures.unit.count) * parts.total
        return total

    def _alone(self, cut: Cut) -> float:
        if cut in self.impossible:
            return math.inf
        seconds = self.priced_cuts.seconds.get(cut)
        if seconds is None:
            sharded = self.level_one.alone(cut)
            if sharded is None:
                self.impossible.add(cut)
                return math.inf
            seconds = sharded.without_samples
            self.priced_cuts.add(cut, seconds)
            if cut.context > 1:
                self.conversions[1].add(cut, sharded.between)
        return seconds


@functools.lru_cache(maxsize=4096)
def _fewest_in_flight(schedule: str, ranks: int, num_microbatches: int, num_chunks: int) -> tuple[float, ...]:
    """By rank, the micro-batches in flight in the chunk that has fewest of them when the rank holds most."""
    held = in_flight(schedule, num_ranks=ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    fewest = [math.inf] * ranks
    for chunk, times in enumerate(held):
        rank = rank_of_chunk(schedule, chunk, num_ranks=ranks, num_chunks=num_chunks)
        fewest[rank] = min(fewest[rank], times)
    return tuple(fewest)


def _copying(num_bytes: float, prices: CostModel) -> float:
    return prices.compute_seconds(flops=0.0, num_bytes=num_bytes, dtype="float32", kind="list_copy")


def _least_within(room: float, edge: list[tuple[float, float]]) -> float:
    """The least cost at which no more than ``room`` bytes are held; infinite if there is none."""
    if room >= edge[0][0]:
        return edge[0][1]
    for (most, less), (fewer, more) in pairwise(edge):
        if room >= fewer:
            return less + (more - less) * (most - room) / (most - fewer)
    return math.inf if room < edge[-1][0] * (1 - ROUNDING) else edge[-1][1]
