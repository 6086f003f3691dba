"""How a trainer freezes layers: when it decides, what it may go on under, and where outputs of these are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.checked_numbers import check_whole_number
from planner.changing.freeze_policy import FreezePolicy

#: Bytes that a node reads of its cache in a second, unless said: an assumption, nothing is measured.
BYTES_PER_SECOND = 2e9


@dataclass(frozen=True)
class CacheRoom:
    """Room on each node for outputs of frozen layers.

    Attributes:
        memory_bytes: of host memory.
        disk_bytes: of a file in ``folder``, which has no name and is gone with the processes.
        folder: None: that of temporary files.
        bytes_per_second: that a node reads of the cache.

    Raises:
        ValueError: for no room at all, or negative sizes.
    """

    memory_bytes: float
    disk_bytes: float = 0
    folder: str | Path | None = None
    bytes_per_second: float = BYTES_PER_SECOND

    def __post_init__(self) -> None:
        sizes = self.memory_bytes, self.disk_bytes
        if min(sizes) < 0 or sum(sizes) <= 0 or not self.bytes_per_second > 0:
            raise ValueError(
                f"memory_bytes={self.memory_bytes}, disk_bytes={self.disk_bytes}, "
                f"bytes_per_second={self.bytes_per_second}: an activation cache has room in memory or on disk, and is "
                "read in some time"
            )

    def check_epoch(self, num_bytes: int, num_steps: int) -> None:
        """Raise ValueError unless there is room for outputs of ``num_bytes`` of each of the steps of an epoch."""
        needed, available = num_bytes * num_steps, int(self.memory_bytes) + int(self.disk_bytes)
        if needed > available:
            raise ValueError(
                f"an epoch's outputs take {needed:,} bytes on each node, the cache has {available:,}: they would be "
                "overwritten before they are read"
            )


@dataclass(frozen=True)
class Freezing:
    """Layers that ``planner.Trainer`` freezes on the way, from the first on, and with it what stands before it.

    Example:
        >>> policy = planner.FreezePolicy.adaptive(num_layers=12, alpha=1 / 3)
        >>> freezing = planner.Freezing(policy, targets=["pp=2,dp=2", "dp=4"], cache=planner.CacheRoom(64e9))
        >>> trainer = planner.Trainer(model, "pp=4", freeze=freezing, global_batch=64)

    Frozen layers are in evaluation mode: without dropout, as the cache needs it.

    Attributes:
        policy: how many layers are frozen after each decision.
        every: steps from one decision to the next; None: at the end of each epoch.
        layers: paths of the layers; none: the entries of the model's longest ``nn.ModuleList``.
        targets: meshes, clusters or plans that training may go on under after a decision, if the steps that are left,
            as predicted, then take less time with the move; none: the trainer's own mesh.
        cache: of outputs of the frozen layers, which is used where a hit is predicted to take less time than to compute
            them; None: they are computed.
        replan_seconds: of making programs for another plan; None: ``runtime.migration.move_price.REPLAN_SECONDS``.

    Raises:
        ValueError: for less than one step, another number of layers than the policy's, or seconds below zero.
    """

    policy: FreezePolicy
    every: int | None = None
    layers: Sequence[str] = ()
    targets: Sequence[Any] = ()
    cache: CacheRoom | None = None
    replan_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            check_whole_number("every", self.every, at_least=1)
        if isinstance(self.targets, str):
            raise ValueError(f"targets={self.targets!r}: give a list of meshes, such as ['pp=2,dp=2', 'dp=4']")
        if self.replan_seconds is not None and not self.replan_seconds >= 0:
            raise ValueError(f"replan_seconds={self.replan_seconds}: seconds of at least 0")
        if self.layers:
            self.check_layers(self.layers)

    def check_layers(self, layers: Sequence[str]) -> None:
        """Raise ValueError unless the policy is for as many layers."""
        if len(layers) != self.policy.num_layers:
            raise ValueError(
                f"the freeze policy is for num_layers={self.policy.num_layers}, but there are {len(layers)} layers "
                f"({layers[0]!r} to {layers[-1]!r}): give as many"
            )
