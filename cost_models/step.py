"""What one training step is made of, as plain figures: layers, chunks of layers, and the pipeline that runs them.

The planner fills these in; ``cost_models.step_time`` gives the closed form of the step's time,
``cost_models.simulator`` plays it event by event. Seconds and bytes are of one device.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """One layer for one micro-batch, run one way.

    Attributes:
        forward, backward: seconds on the compute stream, with the communication that it must wait for and with
            recomputation; backward is all of it, weight gradients included.
        backward_weight: the part of ``backward`` that only makes weight gradients (zero-bubble schedules delay it).
        gather_forward, gather_backward: seconds on the communication stream to gather parameters ahead of use, each
            micro-batch (hidden behind compute where there is enough of it).
        reduce_backward: seconds on the communication stream to reduce gradients, each micro-batch.
        reduce_step: the same, but once a step: after the last micro-batch's backward of this layer.
        update_step: seconds of the optimizer, once a step.
        gather_step: seconds to gather updated parameters, once a step after the optimizer.
        state_bytes: parameters, gradients, optimizer state: always there.
        saved_bytes: what the backward pass needs, held for each micro-batch in flight.
        peak_bytes: beyond that, the most that is alive while the layer runs.
        host_bytes: what the backward pass needs, but in the host's memory, for each micro-batch in flight.
    """

    forward: float
    backward: float
    backward_weight: float = 0.0
    gather_forward: float = 0.0
    gather_backward: float = 0.0
    reduce_backward: float = 0.0
    reduce_step: float = 0.0
    update_step: float = 0.0
    gather_step: float = 0.0
    state_bytes: float = 0.0
    saved_bytes: float = 0.0
    peak_bytes: float = 0.0
    host_bytes: float = 0.0

    @property
    def forward_seconds(self) -> float:
        """Seconds of forward in a row of such layers: parameters are gathered one layer ahead, beside compute."""
        return max(self.forward, self.gather_forward)

    @property
    def backward_seconds(self) -> float:
        """Seconds of backward in a row of such layers: gathers and reductions run beside compute."""
        return max(self.backward, self.gather_backward + self.reduce_backward)

    @property
    def computed_backward(self) -> float:
        """Seconds of backward without what overlaps with it."""
        return self.backward

    @property
    def split_seconds(self) -> tuple[float, float]:
        """The same where gradients of inputs and of weights run apart: of the two together, and of those of weights.

        Parameters are gathered beside the first, gradients reduced beside the second; what is not done by then holds up
        the gathers of the action after it.
        """
        if not self.gather_backward:
            return self.backward_seconds, self.backward_weight
        weight = max(self.backward_weight, self.reduce_backward)
        return max(self.backward - self.backward_weight, self.gather_backward) + weight, weight

    @property
    def last_communication(self) -> float:
        """Seconds of the communication stream for the last micro-batch's backward: gathers and all reductions."""
        return self.gather_backward + self.reduce_backward + self.reduce_step

    @property
    def reductions(self) -> float:
        """Seconds of the communication stream for all reductions of the last micro-batch's gradients."""
        return self.reduce_backward + self.reduce_step

    @property
    def last_wait(self) -> float:
        """Seconds by which that takes longer than the others' backward: the next layer's gather waits for reductions.

        Where nothing is gathered, reductions hold up nothing.
        """
        return max(0.0, self.last_communication - self.backward_seconds) if self.gather_backward else 0.0

    @property
    def last_excess(self) -> float:
        """Seconds by which ``last_communication`` exceeds the layer's last backward, waits included."""
        return self.last_communication - (self.backward_seconds + self.last_wait)

    @property
    def last_reductions(self) -> float:
        """Seconds by which its reductions, which follow its compute, outlast its last backward, waits included."""
        return self.computed_backward + self.last_excess - self.gather_backward


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """What the seconds of one layer for one micro-batch are made of: ``LayerCosts.forward`` and ``backward`` by cause.

    Attributes:
        compute_forward, compute_backward: operators, each once.
        communication_forward, communication_backward: collectives inside the layer, which its operators wait for.
        recompute: operators that the backward pass runs again.
        recommunicate: collectives that it issues again.
        accumulate: gradients copied to where they are reduced, and added to those of the micro-batches before.
        unpack_forward, unpack_backward: pieces of weights cast, and laid out whole once they are gathered.
        contention_forward, contention_backward: by how much compute slows down beside gathers and reductions.
        carry_forward, carry_backward: by how much activations take longer to the host, and back, than all that.
        host_forward, host_backward: by how much the host takes longer to launch all of it than it takes.
    """

    compute_forward: float = 0.0
    compute_backward: float = 0.0
    communication_forward: float = 0.0
    communication_backward: float = 0.0
    recompute: float = 0.0
    recommunicate: float = 0.0
    accumulate: float = 0.0
    unpack_forward: float = 0.0
    unpack_backward: float = 0.0
    contention_forward: float = 0.0
    contention_backward: float = 0.0
    carry_forward: float = 0.0
    carry_backward: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0

    @property
    def forward(self) -> float:
        computing = self.compute_forward + self.communication_forward + self.unpack_forward
        return computing + self.contention_forward + self.carry_forward + self.host_forward

    @property
    def backward(self) -> float:
        computing = self.compute_backward + self.communication_backward
        again = self.recompute + self.recommunicate
        copying = self.accumulate + self.unpack_backward
        return computing + again + copying + self.contention_backward + self.carry_backward + self.host_backward


@dataclass(frozen=True, kw_only=True)
class ChunkCosts:
    """Consecutive layers that one device holds: (costs, how many such layers in a row).

    ``receive_forward`` and ``receive_backward`` are seconds to take one micro-batch's activations from the chunk
    before and its gradients from the chunk after (0 at the ends, and between chunks of one device). ``rows`` says of
    each entry of ``layers`` in which row of the model's like layers it is, which run in any order; empty: each is one.
    """

    layers: tuple[tuple[LayerCosts, int], ...]
    receive_forward: float = 0.0
    receive_backward: float = 0.0
    rows: tuple[int, ...] = ()

    @property
    def layers_by_row(self) -> list[list[tuple[LayerCosts, int]]]:
        """The layers row by row."""
        rows = self.rows or range(len(self.layers))
        pairs = itertools.groupby(zip(rows, self.layers, strict=True), key=operator.itemgetter(0))
        return [[entry for _, entry in row] for _, row in pairs]


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """One training step: ``chunks`` in model order, ``num_ranks`` pipeline ranks (1: no pipeline).

    ``schedule`` is a name in ``cost_models.schedules.SCHEDULES``, which says on which rank each chunk is; the number
    of chunks is a multiple of ``num_ranks``.
    """

    schedule: str
    num_microbatches: int
    num_ranks: int
    chunks: tuple[ChunkCosts, ...]
