"""``CostModel``: what computing and communicating cost on one cluster under one mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cost_models.cluster import Cluster
from cost_models.collectives import collective_seconds
from cost_models.dtypes import TFLOAT32
from cost_models.hardware import LinkLevel, crossed_levels


class CostModel:
    """Prices for a cluster and a mesh laid out row-major over its ranks.

    Args:
        cluster: the devices and links.
        axes: size of each mesh axis by name, outermost first: the last axis joins neighbouring ranks.
        allow_tf32: float32 matmuls run as TF32 where the device can (``torch.set_float32_matmul_precision("high")``).

    Attributes:
        cluster, axes: as given.
        device: the device that prices are for.

    Raises:
        ValueError: if the mesh has another number of devices than the cluster.
    """

    def __init__(self, cluster: Cluster, axes: Mapping[str, int], *, allow_tf32: bool = False) -> None:
        self.cluster = cluster
        self.axes = dict(axes)
        self.device = cluster.device
        self._allow_tf32 = allow_tf32
        _check_axes(cluster, self.axes)
        self._levels = {axis: self._crossed(axis) for axis in self.axes}
        self._links = {axis: self._slowest(levels) for axis, levels in self._levels.items()}

    @property
    def memory_bytes(self) -> float:
        """Memory of each device."""
        return self.device.memory_bytes

    def compute_seconds(self, *, flops: float, num_bytes: float, dtype: str) -> float:
        """Seconds of one operator on one device: the longer of arithmetic and memory traffic, or the launch.

        ``flops`` and ``num_bytes`` (read and written) are of this device's part. No work at all (a view) costs nothing.
        """
        if not flops and not num_bytes:
            return 0.0
        if dtype == "float32" and self._allow_tf32:
            dtype = TFLOAT32
        arithmetic = flops / self.device.peak_flops(dtype)
        return max(arithmetic, num_bytes / self.device.memory_bandwidth, self.device.launch_overhead)

    def collective_seconds(self, collective: str, *, num_bytes: float, axis: str) -> float:
        """Seconds of one collective over mesh axis ``axis``, on the slowest link that its groups cross.

        ``num_bytes`` is the tensor's size where it is whole on this axis, see ``cost_models.collectives``.

        Raises:
            ValueError: if the axis or the collective is not known.
        """
        latency, bandwidth = self.link(axis)
        return collective_seconds(
            collective, num_bytes=num_bytes, group_size=self.axes[axis], latency=latency, bandwidth=bandwidth
        )

    def link(self, axis: str) -> tuple[float, float]:
        """(latency in s, bandwidth in bytes/s) of the slowest link that the groups of ``axis`` cross.

        Raises:
            ValueError: if the axis is not known.
        """
        if axis not in self._links:
            raise ValueError(f"unknown mesh axis {axis!r}: the mesh has {', '.join(self.axes)}")
        return self._links[axis]

    def levels(self, axis: str) -> tuple[LinkLevel, ...]:
        """The link levels that the groups of ``axis`` cross, innermost first; none if its size is 1."""
        return self._levels[axis]

    def _crossed(self, axis: str) -> tuple[LinkLevel, ...]:
        names = list(self.axes)
        stride = math.prod(self.axes[name] for name in names[names.index(axis) + 1 :])
        return crossed_levels(self.cluster.levels, stride=stride, size=self.axes[axis])

    def _slowest(self, levels: tuple[LinkLevel, ...]) -> tuple[float, float]:
        """The link of least bandwidth, of equal ones that of most latency; a free one if none is crossed."""
        links = [level.slowest_link(self.cluster.num_devices) for level in levels]
        return min(links, key=lambda link: (link[1], -link[0]), default=(0.0, math.inf))


def _check_axes(cluster: Cluster, axes: dict[str, int]) -> None:
    mesh = ",".join(f"{name}={size}" for name, size in axes.items())
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh axis {name!r} must have an integer size of at least 1, got {size!r}")
    num_devices = math.prod(axes.values())
    if num_devices != cluster.num_devices:
        raise ValueError(
            f"the mesh {mesh or '(no axes)'} has {num_devices} devices but cluster {cluster.name!r} has"
            f" {cluster.num_devices}: change the mesh sizes or the cluster's size (such as cpu-local:{num_devices})"
        )
