"""The part of a plan that says how a whole training step runs: layout, micro-batches, stages, recompute, ZeRO.

The rest of the plan is of one micro-batch, on a mesh without the pipeline axis. Where a whole step was searched its
axes are ``dp``, ``cp`` and ``tp``, and whatever is sharded on ``dp`` is also cut into ``num_microbatches`` parts in
time, first by ``dp``. On a mesh that was given every axis cuts what pays, and the batch runs at once in one stage.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from cost_models.short_text import ShortRepr
from cost_models.step import ChunkCosts, LayerSeconds, PipelineStep

#: The policy of a unit that computes the loss in chunks (``ops.linear_cross_entropy``): it never holds its logits, and
#: makes each chunk's a second time in the backward pass. Of the rest it keeps all, as under ``none``.
CHUNKED_LOSS = "chunked_loss"
#: The policy of a unit that keeps what ``none`` does, but all that it makes itself in the host's memory: it goes there
#: after the unit has run forward and comes back before it runs backward, beside the units that run meanwhile.
ON_HOST = "offload"
#: What ``StepPlan.offload`` says is, or may be, in the hosts' memory: the optimizer's state, and the optimizer runs
#: there; activations, of units under the policy ``ON_HOST``; both.
OPTIMIZER, ACTIVATIONS, ALL = "optimizer", "activations", "all"
#: The optimizer of a plan on a given mesh: whatever its caller steps with, on the parameters as they are. Its time is
#: not predicted; memory counts AdamW's state.
CALLERS = "callers"


@dataclass(frozen=True)
class GroupPlan:
    """``count`` equal units in a row that run alike: the module path of the first, what is recomputed, ZeRO stage."""

    unit: str
    first: int
    count: int
    recompute: str
    zero: int

    @property
    def runs_again(self) -> str:
        """What the program recomputes around its operators: ``recompute`` but for what an operator does itself."""
        return "none" if self.recompute == CHUNKED_LOSS else self.recompute


@dataclass(frozen=True, repr=False)
class ChunkPlan(ShortRepr):
    """Consecutive units on one pipeline rank, with what each group is predicted to cost.

    ``costs.layers`` and ``parts`` (seconds by cause) have one entry for each group; where a plan does not tell units
    apart, one for the whole model.
    """

    rank: int
    groups: tuple[GroupPlan, ...]
    costs: ChunkCosts
    parts: tuple[LayerSeconds, ...] = ()

    @property
    def forward(self) -> float:
        """Predicted seconds of one micro-batch forward, without what the chunk receives."""
        return sum(layer.forward * count for layer, count in self.costs.layers)

    @property
    def backward(self) -> float:
        """Predicted seconds of one micro-batch backward, without what the chunk receives."""
        return sum(layer.backward * count for layer, count in self.costs.layers)


@dataclass(frozen=True)
class RankMemory:
    """Predicted bytes on each device of a pipeline rank when its memory peaks; ``host``: in its host's memory."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    transient: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient


@dataclass(frozen=True)
class StageDevice:
    """Of unequal devices, those of a pipeline rank: their name, and the bytes that the plan may take on each."""

    name: str
    memory_limit: float


@dataclass(frozen=True, repr=False)
class StepCosts(ShortRepr):
    """Predicted seconds of one step: the closed form by part, and what the simulator says.

    ``bubble``: share of the step that the busiest rank's compute stream has nothing to do, for want of micro-batches;
    ``exposed``: share of it that waits for communication that could have been hidden; ``flops``: model flops of a step
    (forward and backward, nothing computed twice), ``utilisation``: those over what all devices could do at their peak.
    """

    seconds: float
    pipeline: float
    tail: float
    update: float
    simulated: float
    bubble: float
    exposed: float
    flops: float
    utilisation: float
    samples_per_second: float


@dataclass(frozen=True)
class Alternative:
    """A runner-up: what it is, its seconds by the closed form and by the simulator, bytes on its fullest rank."""

    what: str
    seconds: float
    simulated: float
    memory: float


@dataclass(frozen=True, repr=False)
class StepPlan(ShortRepr):
    """How a training step runs.

    Attributes:
        axes: mesh axis → size over the whole cluster, outermost first.
        global_batch, local_batch, num_microbatches: samples of a step, of one micro-batch on one device, and how many.
        schedule, chunks_per_rank: of the pipeline; ``chunks`` in model order.
        optimizer, gradient_dtype, compiled: how parameters are trained (``""``: gradients in float32 or wider; with the
            optimizer ``CALLERS``, in the parameters' dtypes).
        memory: by pipeline rank; ``memory_limit``: bytes that were allowed, without ``headroom``, the share of a
            device that was left to the allocator, communicators and CUDA graphs.
        search: how many candidates were enumerated, and how many of them were solved, pruned by their bound, out of
            memory, and so on (each is one of these); how many shardings were searched.
        interval: seconds between which nine of ten measured steps lie, by runs published of such devices or by what
            was measured of the cluster; None where there are none, or the optimizer's time is not predicted.
        memory_interval: bytes between which nine of ten measured peaks of the fullest rank lie, by plans that filled
            such devices; None where there are none.
        forward_passes: how often a step computes forward; 2 where a pass without gradients first counts what the loss
            needs of the whole batch (how many tokens chose each expert). Seconds forward are those of all passes.
        stage_devices: by pipeline rank where devices are unequal, else nothing; ``memory_limit`` is then the largest.
        offload: ``"optimizer"``: the optimizer runs on the host, with its state in the host's memory
            (``planner.OffloadedOptimizer``); ``"activations"``: units may have the policy ``ON_HOST``; ``"all"``: both;
            ``""``: nothing is there.
        zero_ranks: over how many neighbours of the data ranks ZeRO divides (hybrid sharding): each such group holds all
            pieces, and what its ranks reduced is summed over the groups once a step; 0: over all data ranks. Of experts
            on an axis (``ep``), which fewer ranks hold alike, see ``zero_ranks_along``.
        overlap_tensor: whether products could exchange the shards of their rows on the tensor axis themselves.
    """

    axes: dict[str, int]
    global_batch: int
    local_batch: int
    num_microbatches: int
    schedule: str
    chunks_per_rank: int
    chunks: tuple[ChunkPlan, ...]
    optimizer: str
    gradient_dtype: str
    compiled: bool
    costs: StepCosts
    memory: tuple[RankMemory, ...]
    memory_limit: float
    search: dict[str, int] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    headroom: float = 0.0
    interval: tuple[float, float] | None = None
    memory_interval: tuple[float, float] | None = None
    forward_passes: int = 1
    stage_devices: tuple[StageDevice, ...] = ()
    offload: str = ""
    zero_ranks: int = 0
    overlap_tensor: bool = False

    @property
    def optimizer_on_host(self) -> bool:
        """Whether the optimizer runs on the host, with its state in the host's memory."""
        return self.offload in (OPTIMIZER, ALL)

    @property
    def offloads_activations(self) -> bool:
        """Whether units may keep activations on the host."""
        return self.offload in (ACTIVATIONS, ALL)

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same parameters, experts apart."""
        return self.sample_groups * self.axes.get("cp", 1)

    def zero_ranks_along(self, data_axes: Collection[str]) -> int:
        """``zero_ranks`` of what the ranks of these axes hold alike: of experts, the ranks of one place on ``ep``."""
        return self.zero_ranks // (1 if "ep" in data_axes else self.axes.get("ep", 1))

    @property
    def sample_groups(self) -> int:
        """Into how many parts the ranks of ``dp`` and ``ep`` divide the samples of a micro-batch."""
        return self.axes.get("dp", 1) * self.axes.get("ep", 1)

    @property
    def num_devices(self) -> int:
        total = 1
        for size in self.axes.values():
            total *= size
        return total

    @property
    def pipeline(self) -> PipelineStep:
        """The step as the closed form and the simulator take it."""
        schedule = self.schedule if self.schedule != "none" else "1f1b"
        return PipelineStep(
            schedule=schedule,
            num_microbatches=self.num_microbatches,
            num_ranks=self.axes.get("pp", 1),
            chunks=tuple(chunk.costs for chunk in self.chunks),
        )

    @property
    def fullest_rank(self) -> int:
        """The pipeline rank that takes most of what it may (where that has no bound, most bytes)."""
        return max(
            range(len(self.memory)),
            key=lambda rank: (self.memory[rank].total / (self.memory_limit_of(rank) or 1.0), self.memory[rank].total),
        )

    def rank_name(self, rank: int) -> str:
        """A pipeline rank's number, of unequal devices with theirs: ``1 (NVIDIA V100 SXM2 32GB)``."""
        return f"{rank} ({self.stage_devices[rank].name})" if self.stage_devices else str(rank)

    def memory_limit_of(self, rank: int) -> float:
        """Bytes that were allowed on each device of a pipeline rank."""
        return self.stage_devices[rank].memory_limit if self.stage_devices else self.memory_limit

    @property
    def decides_units(self) -> bool:
        """Whether each unit has a chunk, a recompute policy and a ZeRO stage of its own; else all run in one chunk,
        nothing is recomputed, and ZeRO shards nothing."""
        return any(chunk.groups for chunk in self.chunks)

    @property
    def recompute(self) -> tuple[str, ...]:
        """Policies in use, in model order."""
        return tuple(dict.fromkeys(group.recompute for chunk in self.chunks for group in chunk.groups))

    @property
    def zero(self) -> tuple[int, ...]:
        """ZeRO stages in use, in model order."""
        return tuple(dict.fromkeys(group.zero for chunk in self.chunks for group in chunk.groups))

    @property
    def zero_over(self) -> str:
        """What follows a ZeRO stage in text: over which of the data ranks it divides, if not over all."""
        return f" over {self.zero_ranks} of {self.data_ranks} data ranks" if self.zero_ranks else ""
