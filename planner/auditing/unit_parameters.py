"""Seconds and bytes of the parameters of one unit, counted state by state, under one ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from cost_models import CostModel
from cost_models.dtypes import item_size
from cost_models.memory import OPTIMIZER_MOMENTS, zero_state_bytes
from planner.auditing.unit_prices import StateOfUnit
from planner.whole_step.candidates.mesh_layout import REPLICAS
from planner.whole_step.costs.step_prices import DATA, PIPELINE

if TYPE_CHECKING:
    from planner.auditing.repriced_step import StepPricer


class UnitParameters:
    """The parameters of one copy of a unit under one ZeRO stage (Rajbhandari et al. 2020)."""

    def __init__(self, pricer: StepPricer, states: Sequence[StateOfUnit], zero: int) -> None:
        self.pricer, self.states, self.zero = pricer, states, zero
        self.trained = [state for state in self.states if state.value.requires_grad]

    def share(self, state: StateOfUnit) -> float:
        """The share of a parameter that counts for the unit: 1, or, if copies share it, one parameter a rank."""
        if state.copies == 1:
            return 1.0
        return min(1.0, self.pricer.layout.pipeline / state.copies)

    def gradient_size(self, state: StateOfUnit) -> int:
        return item_size(self.pricer.training.gradients(state.value.dtype))

    def whole_bytes(self, state: StateOfUnit) -> float:
        return self.share(state) * state.elements * item_size(state.value.dtype)

    def gradient_bytes(self, state: StateOfUnit) -> float:
        return self.share(state) * state.elements * self.gradient_size(state)

    def group_of(self, state: StateOfUnit) -> int:
        """Devices that hold the parameter alike: of experts on an axis ``ep`` fewer than of the rest.

        Where ZeRO divides over some of them, those.
        """
        layout = self.pricer.layout
        if self.is_hybrid:
            return layout.zero_ranks // layout.expert if state.expert else layout.zero_ranks
        return layout.group_of(expert=state.expert)

    @property
    def is_hybrid(self) -> bool:
        """Whether several groups of devices each hold all pieces."""
        return bool(self.zero and self.pricer.step.zero_ranks)

    def over_groups(self, collective: str, num_bytes: Callable[[StateOfUnit], float]) -> float:
        """Seconds of one collective over the parameters that all hold alike, and of one over each rank's experts."""
        return sum(self._of_groups(collective, num_bytes))

    def _of_groups(self, collective: str, num_bytes: Callable[[StateOfUnit], float]) -> Iterator[float]:
        """Seconds of the collective of each."""
        links, layout = self.pricer.links, self.pricer.layout
        alike = (links.pieces, links.expert_pieces) if self.is_hybrid else (links.group, links.expert_group)
        for expert, prices in zip((False, True), alike):
            together = sum(num_bytes(state) for state in self.trained if self.is_apart(state) == expert)
            if layout.group_of(expert=expert) > 1 and (together or not expert):
                yield prices.collective_seconds(collective, num_bytes=together, axis=DATA)

    def is_apart(self, state: StateOfUnit) -> bool:
        """Whether a parameter is reduced over fewer devices than the rest."""
        return state.expert and self.pricer.layout.expert > 1

    def launches(self) -> tuple[int, int]:
        """Collectives and passes over parameters that a micro-batch launches, in a forward pass and backward."""
        each_pass, backward = 0, _count(self._accumulated())
        if self.zero == 3:
            each_pass = _count(self._of_groups("all_gather", self.whole_bytes)) + _count(self._unpacked())
        if self.zero >= 2:
            backward += _count(self._of_groups("reduce_scatter", self.gradient_bytes))
        return each_pass, each_pass + backward

    def gather(self) -> float:
        return self.over_groups("all_gather", self.whole_bytes)

    def scatter(self) -> float:
        return self.over_groups("reduce_scatter", self.gradient_bytes)

    def reduction_each_step(self) -> float:
        """Stage 0 and 1 reduce gradients once a step; stages 2 and 3 do it for every micro-batch.

        Devices that hold the same pieces sum their gradients once a step.
        """
        if not self.zero:
            return self.over_groups("all_reduce", self.gradient_bytes)
        over_replicas = 0.0
        if self.is_hybrid:
            links = self.pricer.links
            for expert, prices in ((False, links.pieces), (True, links.expert_pieces)):
                apart = [state for state in self.trained if self.is_apart(state) == expert]
                piece_bytes = sum(self.gradient_bytes(state) / self.group_of(state) for state in apart)
                if apart or not expert:
                    over_replicas += prices.collective_seconds("all_reduce", num_bytes=piece_bytes, axis=REPLICAS)
        return over_replicas + (self.scatter() if self.zero == 1 else 0.0)

    def tied_exchange(self) -> float:
        """Sum the gradients of a shared parameter over the ranks that have it."""
        if not self.pricer.tied_apart:
            return 0.0
        num_bytes = sum(self.gradient_bytes(state) for state in self.trained if state.tied)
        return self.pricer.links.axes.p2p_seconds(num_bytes=num_bytes, axis=PIPELINE) if num_bytes else 0.0

    def accumulation(self) -> float:
        """A micro-batch's gradients: read and written where they are reduced, or read, read, written to add them.

        Of m micro-batches one is copied, the others are added; with ZeRO 2 and 3 all are copied, and of those after the
        first the pieces that were reduced are read, read, written. On one device that updates what it computes with
        autograd adds them where they are, and copies none.
        """
        return sum(self._accumulated())

    def _accumulated(self) -> Iterator[float]:
        """Seconds of that for the parameters that as many devices hold alike."""
        count = self.pricer.step.num_microbatches
        for states, group in self._held_alike():
            read, written = sum(map(self.whole_bytes, states)), sum(map(self.gradient_bytes, states))
            if group == 1 and all(map(self._is_own_working_weight, states)):
                first, further = 0.0, read + 2 * written
            elif self.zero < 2:
                first, further = read + written, read + 2 * written
            else:
                first = read + written
                further = first + 3 * written / group
            yield self.memory_pass((first + (count - 1) * further) / count)

    def unpacking(self) -> float:
        """Pieces read as they are updated and written as they are sent; whole weights read and written."""
        return sum(self._unpacked())

    def _unpacked(self) -> Iterator[float]:
        """Seconds of that for the parameters that as many devices hold alike."""
        for states, group in self._held_alike():
            whole = sum(map(self.whole_bytes, states))
            yield self.memory_pass((sum(map(self._updated_bytes, states)) + whole) / group + 2 * whole)

    def _held_alike(self) -> Iterator[tuple[list[StateOfUnit], int]]:
        """Trained parameters that as many devices hold alike, and how many."""
        for expert in (False, True):
            states = [state for state in self.trained if self.is_apart(state) == expert]
            if any(state.elements for state in states):
                yield states, self.group_of(states[0])

    def _updated_bytes(self, state: StateOfUnit) -> float:
        return self.share(state) * state.elements * max(4, item_size(state.value.dtype))

    def _is_own_working_weight(self, state: StateOfUnit) -> bool:
        return self._updated_bytes(state) == self.whole_bytes(state) == self.gradient_bytes(state)

    def _casting(self) -> float:
        """Working weights made of what was updated, once a step."""
        if self.zero:
            return self.unpacking() if self.zero < 3 else 0.0
        total = 0.0
        for states, _ in self._held_alike():
            updated, whole = sum(map(self._updated_bytes, states)), sum(map(self.whole_bytes, states))
            total += self.memory_pass(updated + whole) if updated != whole else 0.0
        return total

    def update(self) -> float:
        """4 bytes of gradient read; parameter and moments read and written in float32; then the working weights.

        On the host all devices of a node do so at once, and write 2 bytes of copy; its links carry gradient and weight
        down, the weight up.
        """
        parts = {state: self.group_of(state) if self.zero else 1 for state in self.trained}
        elements = sum(self.share(state) * state.elements / parts[state] for state in self.trained)
        moments = OPTIMIZER_MOMENTS[self.pricer.step.optimizer]
        if not self.pricer.training.offload:
            touched = elements * (4 + 8 * (1 + moments))
            return self.memory_pass(touched, kind="optimizer") + self._casting() if elements else 0.0
        host = self.pricer.links.axes.cluster.host
        if host is None:
            raise ValueError("the plan offloads optimizer state, but its cluster has no [host]")
        whole = sum(self.whole_bytes(state) / parts[state] for state in self.trained)
        node_size = host.num_devices(self.pricer.links.axes.cluster.levels)
        over_link = 3 * whole * min(host.link_shared_by, node_size) / host.link_bandwidth
        return over_link + elements * (6 + 8 * (1 + moments)) * node_size / host.memory_bandwidth

    def memory_pass(self, num_bytes: float, *, kind: str = "list_copy") -> float:
        axes: CostModel = self.pricer.links.axes
        return axes.compute_seconds(flops=0.0, num_bytes=num_bytes, dtype="float32", kind=kind)

    def held_bytes(self) -> float:
        buffers = [state for state in self.states if state.value.kind == "buffer"]
        return sum(self.state_parts()[:3]) + sum(state.elements * item_size(state.value.dtype) for state in buffers)

    def state_parts(self) -> tuple[int, int, int, int]:
        """Bytes of parameters, gradients, optimizer state, and of what is on the host, each rounded to whole ones."""
        parts = [0.0, 0.0, 0.0, 0.0]
        for state in self.states:
            if state.value.kind == "buffer":
                continue
            if not state.value.requires_grad:
                parts[0] += self.share(state) * state.elements * item_size(state.value.dtype)
                continue
            held = zero_state_bytes(
                state.elements,
                state.value.dtype,
                stage=self.zero,
                group_size=self.group_of(state),
                gradient_dtype=self.pricer.training.gradients(state.value.dtype),
                optimizer=self.pricer.step.optimizer,
                offloaded=self.pricer.training.offload,
            )
            for index, part in enumerate((held.parameters, held.gradients, held.optimizer, held.host)):
                parts[index] += self.share(state) * part
        return round(parts[0]), round(parts[1]), round(parts[2]), round(parts[3])

    def transient_bytes(self) -> float:
        """Whole gradients before they are scattered; whole parameters of this layer and the one gathered ahead."""
        divided = [state for state in self.trained if self.group_of(state) > 1]
        whole, gradients = sum(map(self.whole_bytes, divided)), sum(map(self.gradient_bytes, divided))
        return (0.0, 0.0, gradients, 2 * whole + gradients)[self.zero]


def _count(launches: Iterator[float]) -> int:
    """How many of them take any seconds."""
    return sum(seconds > 0 for seconds in launches)
