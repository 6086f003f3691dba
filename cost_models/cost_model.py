"""``CostModel``: what computing and communicating cost on one cluster under one mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import lru_cache

from cost_models.cluster import Cluster
from cost_models.collectives import seconds_over
from cost_models.dtypes import TFLOAT32
from cost_models.efficiency import ANY_ROWS, MatmulShape
from cost_models.hardware import LinkLevel, crossed_levels
from cost_models.measured_profile import Extrapolation
from cost_models.routes import Span, route
from cost_models.text import counted


class CostModel:
    """Prices for a cluster and a mesh laid out row-major over its ranks.

    Args:
        cluster: the devices and links.
        axes: size of each mesh axis by name, outermost first: the last axis joins neighbouring ranks.
        allow_tf32: float32 matmuls run as TF32 where the device can (``torch.set_float32_matmul_precision("high")``).

    Attributes:
        prices_joint_axes: a collective may be over several axes.
        cluster, axes: as given.
        extrapolation: notes how far what is priced lies beyond what was measured; None: nobody asks.
        device: the device, of a mixed cluster the worst of each figure.

    Raises:
        ValueError: if the mesh has another number of devices than the cluster.
    """

    prices_joint_axes = True

    def __init__(self, cluster: Cluster, axes: Mapping[str, int], *, allow_tf32: bool = False) -> None:
        self.cluster = cluster
        self.axes = dict(axes)
        self.device = cluster.device
        self._allow_tf32 = allow_tf32
        _check_axes(cluster, self.axes)
        self._devices = cluster.kinds
        self.extrapolation: Extrapolation | None = None
        self._collectives: dict[str, dict[tuple[str, float, str | None], float]] = {}
        strides = {axis: self._stride(axis) for axis in self.axes}
        self._levels = {
            axis: crossed_levels(cluster.levels, stride=strides[axis], size=size) for axis, size in self.axes.items()
        }
        self._routes = {
            axis: route(cluster.levels, stride=strides[axis], size=size) for axis, size in self.axes.items()
        }
        self._links = {axis: self._slowest(levels) for axis, levels in self._levels.items()}

    @property
    def memory_bytes(self) -> float:
        """Memory that tensors can use, on each device."""
        return self.device.usable_bytes

    @property
    def overlap_slowdown(self) -> float:
        """Seconds that computing loses for each second of communication beside it."""
        return self.device.overlap_slowdown

    @property
    def host_seconds(self) -> float:
        """Seconds that the host needs to launch one operator or collective; 0 where that is not priced."""
        return self.device.host_seconds

    def compute_seconds(
        self,
        *,
        flops: float,
        num_bytes: float,
        dtype: str,
        kind: str | None = None,
        shape: MatmulShape | None = None,
        row_step: int = ANY_ROWS,
    ) -> float:
        """Seconds of one operator on one device: the longest of arithmetic, memory traffic and the launch.

        Of a mixed cluster the slowest device's. No work at all (a view) costs nothing.

        Args:
            flops: operations, of this device's part.
            num_bytes: bytes read and written, of this device's part.
            dtype: what is computed in.
            kind: one of ``efficiency.KIND_STAND_IN``; None: a matmul if there are operations, else elementwise.
            shape: (batch, m, n, k) of this device's part, where the kind is a matmul or works as one.
            row_step: a power of two that divides the elements of all rows that it reads or writes, see ``Efficiency``.

        Raises:
            ValueError: if the kind is not known.
        """
        if not flops and not num_bytes:
            return 0.0
        if dtype == "float32" and self._allow_tf32:
            dtype = TFLOAT32
        if kind is None:
            kind = "matmul" if flops else "elementwise"
        if self.extrapolation is not None:
            self.extrapolation.note(kind, flops or num_bytes)
        return max(
            device.seconds(flops=flops, num_bytes=num_bytes, dtype=dtype, kind=kind, shape=shape, row_step=row_step)
            for device in self._devices
        )

    def collective_seconds(
        self, collective: str, *, num_bytes: float, axis: str, algorithm: str | None = None
    ) -> float:
        """Seconds of one collective over mesh axis ``axis``, while all groups of the axis run theirs.

        Axes side by side are one group by their names with ``_`` between them (``"dp_tp"``).

        By the fastest algorithm over the levels of links that the groups cross, see ``cost_models.collectives``;
        ``algorithm`` forces one. ``num_bytes`` is the tensor's size where it is whole on this axis.

        Raises:
            ValueError: if the axis or the collective is not known, or the algorithm cannot do it.
        """
        if self.extrapolation is not None:
            for level in self._levels.get(axis, ()):
                self.extrapolation.note(f"{level.name}: {collective}", num_bytes)
        if axis not in self._collectives:
            self._collectives[axis] = _priced_over(self.spans(axis))
        prices, key = self._collectives[axis], (collective, num_bytes, algorithm)
        if key not in prices:
            prices[key] = seconds_over(collective, num_bytes=num_bytes, spans=self.spans(axis), algorithm=algorithm)
        return prices[key]

    def p2p_seconds(self, *, num_bytes: float, axis: str) -> float:
        """Seconds for every rank to pass ``num_bytes`` to the next one along ``axis``, as a pipeline does.

        Raises:
            ValueError: if the axis is not known.
        """
        return self.collective_seconds("send_recv", num_bytes=num_bytes, axis=axis)

    def link(self, axis: str) -> tuple[float, float]:
        """(latency in s, bandwidth in bytes/s) of the slowest link that the groups of ``axis`` cross.

        Raises:
            ValueError: if the axis is not known.
        """
        self.spans(axis)
        return self._links[axis]

    def levels(self, axis: str) -> tuple[LinkLevel, ...]:
        """The link levels that the groups of ``axis`` cross, innermost first; none if its size is 1."""
        return self._levels[axis]

    def spans(self, axis: str) -> tuple[Span, ...]:
        """What each of those levels does for a group: what ``cost_models.collectives`` prices.

        Raises:
            ValueError: if the axis is not known.
        """
        if axis not in self._routes:
            self._add_joint(axis)
        if axis not in self._routes:
            raise ValueError(f"unknown mesh axis {axis!r}: the mesh has {', '.join(self.axes)}")
        return self._routes[axis]

    def _add_joint(self, name: str) -> None:
        """Know ``name`` if it is axes side by side with ``_`` between them (those of size 1 do not count)."""
        several = [axis for axis, size in self.axes.items() if size > 1]
        for first, end in itertools.combinations(range(len(several) + 1), 2):
            axes = several[first:end]
            if len(axes) > 1 and "_".join(axes) == name:
                stride, size = self._stride(axes[-1]), math.prod(self.axes[axis] for axis in axes)
                self._levels[name] = crossed_levels(self.cluster.levels, stride=stride, size=size)
                self._routes[name] = route(self.cluster.levels, stride=stride, size=size)
                self._links[name] = self._slowest(self._levels[name])

    def _stride(self, axis: str) -> int:
        names = list(self.axes)
        return math.prod(self.axes[name] for name in names[names.index(axis) + 1 :])

    def _slowest(self, levels: tuple[LinkLevel, ...]) -> tuple[float, float]:
        """The link of least bandwidth, of equal ones that of most latency; a free one if none is crossed."""
        links = [level.slowest_link(self.cluster.num_devices) for level in levels]
        return min(links, key=lambda link: (link[1], -link[0]), default=(0.0, math.inf))


@lru_cache(maxsize=4096)
def _priced_over(spans: tuple[Span, ...]) -> dict[tuple[str, float, str | None], float]:
    """The seconds over these spans that have been asked for: axes of many meshes take the same route."""
    return {}


class BestPlacedCostModel(CostModel):
    """Lower bounds on a mesh's prices: every axis lies where its collective is fastest, at whatever stride.

    Neighbouring ranks are not best off on a torus where a dimension further out is longer, or closed into a ring.
    """

    def collective_seconds(
        self, collective: str, *, num_bytes: float, axis: str, algorithm: str | None = None
    ) -> float:
        """Seconds of one collective over an axis of that size, on the links that suit it best."""
        size, total = math.prod(span.parts for span in self.spans(axis)), self.cluster.num_devices
        strides = [stride for stride in range(1, total // size + 1) if total % (stride * size) == 0]
        routes = {route(self.cluster.levels, stride=stride, size=size) for stride in strides}
        return min(seconds_over(collective, num_bytes=num_bytes, spans=spans, algorithm=algorithm) for spans in routes)


def _check_axes(cluster: Cluster, axes: dict[str, int]) -> None:
    mesh = ",".join(f"{name}={size}" for name, size in axes.items())
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh axis {name!r} must have an integer size of at least 1, got {size!r}")
    num_devices = math.prod(axes.values())
    if num_devices != cluster.num_devices:
        raise ValueError(
            f"the mesh {mesh or '(no axes)'} has {counted(num_devices, 'device')} but cluster {cluster.name!r} has"
            f" {cluster.num_devices}: change the mesh sizes or the cluster's size (such as cpu-local:{num_devices})"
        )
