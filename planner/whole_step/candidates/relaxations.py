"""Changes that would make a model fit: demands to drop, more devices, more memory on each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from cost_models import Cluster
from cost_models.hardware import DeviceGroup
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.conflicts import without
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.candidates.nearest_feasible import Closest, Looks, closest, enough_text, size_text
from planner.whole_step.candidates.training_options import POLICIES, ZERO_STAGES
from planner.whole_step.costs.level_one import LevelOne

#: Multiples of the cluster that are tried.
TIMES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
#: Larger clusters are not suggested: nobody has them, and pricing links of tori takes long beyond.
MOST_DEVICES = 2**15


def relaxations(search: Search, nearest: Closest, *, looks: Looks) -> Iterator[str]:
    """Changes each of which, by itself, lets a plan fit; the last names the memory that devices would need."""
    by_demand = [*_policies(search, looks), *_others(search, looks)]
    if not by_demand and (search.demands.fixed or search.demands.forbidden):
        free = replace(search.demands, fixed={}, forbidden={})
        fitting = _fits(_relaxed(search, free), looks)
        by_demand = [f"dropping all of fix and forbid: {fitting.candidate}"] if fitting else []
    yield from by_demand
    yield from _devices(search, looks)
    yield _memory(search, nearest)


def _policies(search: Search, looks: Looks) -> Iterator[str]:
    """Yield the first excluded value of recompute and of ZeRO that would help (it costs least time)."""
    for name, values in (("recompute", POLICIES), ("zero", ZERO_STAGES)):
        for value in values:
            if search.demands.allows(name, value):
                continue
            allowed = frozenset((*search.demands.among(name, values), value))
            demands = without(search.demands, name)
            if _fits(_relaxed(search, replace(demands, fixed={**demands.fixed, name: allowed})), looks):
                yield f"allowing {name}={value}"
                break


def _others(search: Search, looks: Looks) -> Iterator[str]:
    """Yield other demands whose removal would help, with the value that would be chosen."""
    named = {*search.demands.fixed, *search.demands.forbidden} - {"recompute", "zero", "order"}
    for name in sorted(named):
        fitting = _fits(_relaxed(search, without(search.demands, name)), looks)
        if fitting is not None:
            yield f"{name}={fitting.candidate.value_of(name)}"


def _devices(search: Search, looks: Looks) -> Iterator[str]:
    """The fewest times as many devices of this kind on which a plan fits, else on which one without demands does.

    None where the outermost links are named one by one: nobody said how more devices would be linked.
    """
    if search.cluster.levels[-1].wires:
        return
    asked = [(search.demands, "devices of this kind")]
    if search.demands.fixed or search.demands.forbidden:
        free = replace(search.demands, fixed={}, forbidden={})
        asked.append((free, "devices of this kind and no fix or forbid"))
    for demands, what in asked:
        for times in TIMES:
            if looks.left <= 0:
                return
            if search.cluster.num_devices * times > MOST_DEVICES:
                break
            level = LevelOne(_grown(search.cluster, times), search.level_one.space, search.level_one.step_units)
            fitting = _fits(Search(level, level.cluster, demands), looks)
            if fitting is not None:
                yield f"{level.cluster.num_devices} {what} ({fitting.candidate})"
                return


def _memory(search: Search, nearest: Closest) -> str:
    """The memory that devices would need, as text."""
    needed = search.memory + nearest.missing
    demands, device = search.demands, search.cluster.device
    usable = device.usable_bytes * (1.0 - demands.headroom)
    if demands.memory_limit is not None and needed <= usable:
        limit = math.ceil(needed / (1.0 - demands.headroom))
        return f"memory_limit={limit} ({enough_text(limit)})"
    if demands.headroom and demands.memory_limit is None and needed <= device.usable_bytes:
        share = math.floor(1000 * (1.0 - needed / device.usable_bytes)) / 1000
        return f"a headroom of {share:g} instead of {demands.headroom:g}"
    whole = needed / (1.0 - demands.headroom) + device.memory_bytes - device.usable_bytes
    return f"devices with {enough_text(whole)} of memory instead of {size_text(device.memory_bytes)}"


def _relaxed(search: Search, demands: Demands) -> Search:
    return Search(search.level_one, search.cluster, demands)


def _fits(search: Search, looks: Looks) -> Closest | None:
    """A candidate that fits, None if none is found."""
    nearest = closest(search, looks=looks, only_fitting=True)
    return nearest if nearest is not None and nearest.missing == 0 else None


def _grown(cluster: Cluster, times: int) -> Cluster:
    """``times`` as many devices: more groups at the outermost level."""
    outer = cluster.levels[-1]
    levels = (*cluster.levels[:-1], replace(outer, group_size=outer.group_size * times))
    groups = tuple(DeviceGroup(group.device, group.count) for _ in range(times) for group in cluster.groups)
    return Cluster(f"{cluster.name}*{times}", groups, levels, unequal=cluster.unequal, host=cluster.host)
