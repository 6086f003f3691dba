"""What the planner's cost model says of each case that was measured, and the curves that would make it right."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.kernels_cases import BACKWARD, FORWARD, Case
from benchmarks.kernels_contestants import OURS
from benchmarks.kernels_measure import Row
from cost_models import Cluster, CostModel
from cost_models.efficiency import Curve
from cost_models.live import estimate, match_preset
from cost_models.presets import load_preset
from passes.ir.graph import Node, Ref, Value
from passes.ir.types import MeshShape, R
from passes.rules import forward_flops
from passes.rules.kinds import MATMUL, kind_of
from planner.whole_step.costs.operator_facts import Fusion
from planner.whole_step.costs.step_prices import StepPricing

_MESH = MeshShape(("dp", "cp", "tp"), (1, 1, 1))
_WHOLE = (R, R, R)


@dataclass(frozen=True)
class Prediction:
    """Of one pass of one case: seconds as the planner prices it, and as measured.

    Attributes:
        kind: whose efficiency curve priced it.
        traffic: bytes that the curve was asked for; 0 if operations decide.
    """

    label: str
    what: str
    kind: str
    predicted: float
    measured: float
    traffic: float

    @property
    def error(self) -> float:
        """Relative to what was measured; above 0 if the model is pessimistic."""
        return self.predicted / self.measured - 1.0


class _Asked:
    """A cost model that notes the bytes it was asked for."""

    def __init__(self, inner: CostModel) -> None:
        self.inner = inner
        self.traffic: list[float] = []

    def compute_seconds(self, *, flops: float, num_bytes: float, dtype: str, **rest: object) -> float:
        self.traffic.append(0.0 if flops else num_bytes)
        return self.inner.compute_seconds(flops=flops, num_bytes=num_bytes, dtype=dtype, **rest)  # type: ignore[arg-type]

    def collective_seconds(self, collective: str, *, num_bytes: float, axis: str) -> float:
        return self.inner.collective_seconds(collective, num_bytes=num_bytes, axis=axis)


def cluster_of(device: torch.device) -> Cluster:
    """The preset of the device, by its name and memory, else an estimate from its properties.

    Raises:
        ValueError: for a GPU that nothing is known of.
    """
    if device.type != "cuda":
        return Cluster.parse("cpu-local")
    properties = torch.cuda.get_device_properties(device)
    preset = match_preset(properties.name, properties.total_memory)
    return Cluster.from_dict(load_preset(preset) if preset else estimate(properties))


def predictions(measured: Iterable[tuple[Case, Sequence[Row]]], cluster: Cluster) -> list[Prediction]:
    """One for each pass of ours that was timed."""
    prices = CostModel(cluster, {"dp": cluster.num_devices})
    compared = []
    for case, rows in measured:
        times = {row.what: row.seconds for row in rows if row.contestant == OURS}
        for what, (seconds, traffic) in predicted(case, prices).items():
            actual = times.get(what)
            if actual is not None:
                compared.append(Prediction(case.label, what, kind_of(node_of(case)[0]), seconds, actual, traffic))
    return compared


def predicted(case: Case, prices: CostModel) -> dict[str, tuple[float, float]]:
    """Seconds and bytes of each pass, as the planner prices the operator when nothing is sharded."""
    node, values = node_of(case)
    asked = _Asked(prices)
    pricing = StepPricing(asked, _MESH, states=frozenset(), fusion=Fusion())
    seconds = pricing.compute(
        node,
        values,
        [_WHOLE] * len(node.inputs),
        [_WHOLE] * len(node.outputs),
        flops=forward_flops(node, values),
        cut=1.0,
        live=True,
    )
    return dict(zip((FORWARD, BACKWARD), zip(seconds, (asked.traffic[0], asked.traffic[-1]), strict=True)))


def node_of(case: Case) -> tuple[Node, dict[str, Value]]:
    """The operator as it stands in the planner's graph."""
    meta_tensors = case.tensors(torch.device("meta"))
    values = {name: _value(name, tensor) for name, tensor in meta_tensors.items()}
    first = next(iter(meta_tensors.values())) if case.operator.name != "embedding" else meta_tensors["weight"]
    outputs = tuple(
        Value(f"output_{place}", shape, _dtype_name(first), requires_grad=True)
        for place, shape in enumerate(_output_shapes(case, meta_tensors))
    )
    return Node("call", case.operator.op, (), {name: Ref(name) for name in meta_tensors}, outputs), values


def _output_shapes(case: Case, meta_tensors: dict[str, torch.Tensor]) -> list[tuple[int, ...]]:
    name = case.operator.name
    if name in ("cross_entropy", "linear_cross_entropy"):
        return [tuple(meta_tensors["target"].shape)]
    if name == "embedding":
        return [(*meta_tensors["indices"].shape, meta_tensors["weight"].shape[1])]
    shapes = [tuple(tensor.shape) for tensor in meta_tensors.values()]
    return shapes[:2] if name.startswith("add_") or name == "rotary_pair" else shapes[:1]


def _value(name: str, tensor: torch.Tensor) -> Value:
    return Value(name, tuple(tensor.shape), _dtype_name(tensor), requires_grad=tensor.requires_grad)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def median_error(compared: Sequence[Prediction]) -> float | None:
    """Median of the sizes of the relative errors."""
    return statistics.median(abs(one.error) for one in compared) if compared else None


def fitted_curves(compared: Iterable[Prediction], bandwidth: float) -> dict[str, Curve]:
    """For each kind of work that memory bounds, the curve of efficiency by bytes that fits best.

    Points are made monotone by pooling neighbours that violate the order (Ayer et al., "An empirical distribution
    function for sampling with incomplete information", 1955), and their rise is held to what ``Curve`` allows.

    Args:
        bandwidth: bytes per second that the device's efficiency is relative to.
    """
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in compared:
        if one.kind != MATMUL and one.traffic:
            points[one.kind].append((one.traffic, min(1.0, one.traffic / bandwidth / one.measured)))
    return {kind: Curve(_limited(_pooled(sorted(pairs)))) for kind, pairs in sorted(points.items())}


def _pooled(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """One point for each size within a tenth, of pooled efficiencies that do not fall."""
    pools: list[list[tuple[float, float]]] = []
    for size, efficiency in points:
        if pools and size <= 1.1 * pools[-1][0][0]:
            pools[-1].append((size, efficiency))
        else:
            pools.append([(size, efficiency)])
        while len(pools) > 1 and _middle(pools[-1], 1) < _middle(pools[-2], 1):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [(_middle(pool, 0), _middle(pool, 1)) for pool in pools]


def _middle(pool: list[tuple[float, float]], entry: int) -> float:
    return statistics.median(point[entry] for point in pool)


def _limited(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Rounded to what a file should hold; from the largest size down, each is raised until the next may follow it."""
    curve_points: list[tuple[float, float]] = []
    for size, efficiency in reversed([(float(f"{size:.3g}"), efficiency) for size, efficiency in points]):
        if curve_points:
            larger, above = curve_points[-1]
            if size >= larger:
                continue
            efficiency = min(above, max(efficiency, above / (1.0 + math.log(larger / size))))
        curve_points.append((size, min(1.0, math.ceil(efficiency * 1000) / 1000)))
    return tuple(reversed(curve_points))


def as_toml(curves: dict[str, Curve]) -> str:
    """As ``cost_models/presets/efficiency/*.toml`` has them."""
    lines = []
    for kind, curve in curves.items():
        points = ", ".join(f"[{size:.3g}, {efficiency:.3g}]" for size, efficiency in curve.points)
        lines.append(f"[{kind}]\nbytes = [{points}]")
    return "\n\n".join(lines)
