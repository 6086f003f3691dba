"""A cluster fitted to measured calls, and how far its prices are from the calls that were kept back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from cost_models import Cluster
from cost_models.collectives import ALGORITHMS
from cost_models.efficiency import KIND_STAND_IN, Efficiency
from cost_models.hardware import Device, DeviceGroup, LinkLevel
from cost_models.measured_profile import SAME_CALL, MeasuredRange, Profile, SizeUnit
from cost_models.presets import load_preset
from planner.calibration.collective_cases import ALONE
from planner.calibration.curve_fit import fit_curve
from planner.calibration.levels_fit import fit_levels, predicted_seconds
from planner.calibration.measured_call import SAME, MeasuredCall

#: Kinds of which operations decide; of all others the bytes do.
ARITHMETIC = ("matmul", "convolution", "attention", "attention_backward")
#: Of calls shorter than so many launches nothing is said about rates, nor of products that memory holds up so long.
LAUNCH_BOUND, MEMORY_BOUND = 1.5, 0.5
QUANTILES = (0.05, 0.5, 0.95)


def fit_cluster(
    calls: Sequence[MeasuredCall],
    *,
    name: str,
    machine: str,
    device_name: str,
    memory: tuple[float, float],
    main_dtype: str,
    world_size: int,
    per_host: int,
) -> Cluster:
    """The cluster whose prices are close to the calls that may be fitted.

    Args:
        memory: bytes of a device, and of those what tensors cannot have.
        main_dtype: of the calls that curves are fitted to; of other dtypes only peaks are read.
        world_size, per_host: processes in all, and on one host.
    """
    operators = [call for call in calls if call.kind in KIND_STAND_IN]
    device = _device([call for call in operators if call.is_fitted], calls, device_name, memory, main_dtype)
    levels = fit_levels(calls, world_size=world_size, per_host=per_host)
    profile = Profile(machine, dict(_ranges(operators, device, calls, levels)))
    return Cluster(name, (DeviceGroup(device, world_size),), levels or (_link_of_processes(),), profile)


def _device(
    fitted: Sequence[MeasuredCall],
    calls: Sequence[MeasuredCall],
    name: str,
    memory: tuple[float, float],
    main_dtype: str,
) -> Device:
    launch = next(call.seconds for call in calls if call.kind == "launch")
    streams = [call for call in fitted if call.kind not in ARITHMETIC]
    bandwidth = max(call.num_bytes / call.seconds for call in streams)
    dtypes = dict.fromkeys(call.place for call in fitted if call.kind in ARITHMETIC)
    peaks = {
        dtype: max(call.flops / call.seconds for call in fitted if call.place == dtype and call.flops)
        for dtype in dtypes
    }
    efficiency = {}
    for kind in KIND_STAND_IN:
        mine = [
            call
            for call in fitted
            if call.kind == kind and call.place == main_dtype and call.seconds > LAUNCH_BOUND * launch
        ]
        if kind in ARITHMETIC:
            busy = [call for call in mine if call.num_bytes / bandwidth < MEMORY_BOUND * call.seconds]
            points = [(call.flops, call.flops / call.seconds / peaks[main_dtype]) for call in busy]
        else:
            points = [(call.num_bytes, min(1.0, call.num_bytes / call.seconds / bandwidth)) for call in mine]
        if points:
            curve = fit_curve(points)
            efficiency[kind] = Efficiency(flops=curve) if kind in ARITHMETIC else Efficiency(bytes=curve)
    return Device(
        name=name,
        flops={"float32": peaks[main_dtype], **peaks},
        memory_bytes=memory[0],
        memory_bandwidth=bandwidth,
        launch_overhead=launch,
        reserved_bytes=memory[1],
        overlap_slowdown=_overlap_slowdown(calls),
        host_seconds=next((call.seconds for call in calls if call.kind == "host"), 0.0),
        efficiency=efficiency,
    )


def _overlap_slowdown(calls: Sequence[MeasuredCall]) -> float:
    """Seconds that computing loses for each second of communication beside it, from both alone and together."""
    seconds = {call.shape: call.seconds for call in calls if call.kind == "overlap"}
    if not seconds:
        return 0.0
    return min(0.95, max(0.0, (seconds["together"] - seconds["compute"]) / seconds["communication"]))


def _link_of_processes() -> LinkLevel:
    """Of a single process: the link of processes on a host, as the preset has it."""
    link = load_preset("cpu-local")["levels"][0]
    return LinkLevel("not measured", 1, latency=link["latency"], bandwidth=link["bandwidth"])


def _ranges(
    operators: Sequence[MeasuredCall], device: Device, calls: Sequence[MeasuredCall], levels: Sequence[LinkLevel]
) -> Iterator[tuple[str, MeasuredRange]]:
    yield from _same_call(calls)
    for kind in KIND_STAND_IN:
        mine = [call for call in operators if call.kind == kind]
        unit: SizeUnit = "flops" if kind in ARITHMETIC else "bytes"
        yield from _range(kind, unit, mine, functools.partial(_operator_seconds, device))
    collectives = [call for call in calls if call.kind in ALGORITHMS and call.place != ALONE]
    for place, collective in dict.fromkeys((call.place, call.kind) for call in collectives):
        mine = [call for call in collectives if (call.place, call.kind) == (place, collective)]
        predict = functools.partial(predicted_seconds, levels)
        yield from _range(f"{place}: {collective}", "bytes", mine, predict)


def _same_call(calls: Sequence[MeasuredCall]) -> Iterator[tuple[str, MeasuredRange]]:
    """One call that was timed again and again over its median."""
    again = sorted(call.seconds for call in calls if call.kind == SAME)
    if again:
        low, middle, high = (_quantile(again, share) for share in QUANTILES)
        flops = next(call.flops for call in calls if call.kind == SAME)
        yield SAME_CALL, MeasuredRange("flops", flops, flops, len(again), low / middle, 1.0, high / middle)


def _operator_seconds(device: Device, call: MeasuredCall) -> float:
    return device.seconds(flops=call.flops, num_bytes=call.num_bytes, dtype=call.place, kind=call.kind)


def _range(
    name: str, unit: SizeUnit, calls: Sequence[MeasuredCall], predict: Callable[[MeasuredCall], float]
) -> Iterator[tuple[str, MeasuredRange]]:
    ratios = sorted(call.seconds / predict(call) for call in calls if not call.is_fitted)
    sizes = [call.flops if unit == "flops" else call.num_bytes for call in calls]
    if ratios:
        low, median, high = (_quantile(ratios, share) for share in QUANTILES)
        yield name, MeasuredRange(unit, min(sizes), max(sizes), len(ratios), low, median, high)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
