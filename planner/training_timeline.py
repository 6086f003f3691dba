"""A whole training whose first layers freeze on the way: which plan it runs under when, decided by predictions.

At each freeze the training goes on under the program it has (whose predicted seconds then are an upper bound), or under
another plan, for what is frozen now: the layout it has, that of a pipeline halved with replicas in its place, or any
that is the fastest at some freeze. The decision is a shortest path over these plans: seconds of the steps, of the state
on its way, and of making programs. To keep the first program is one of the paths, so that freezing never costs time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cost_models import Cluster
from passes.ir.types import shard_dim
from passes.plan import Plan
from planner.changing.freeze_schedule import FreezePhase, FreezeSchedule
from runtime.calls.skeleton import skeleton
from runtime.migration.move_price import REPLAN_SECONDS, axes_of, step_seconds

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TimelinePhase:
    """A phase of the training, and the plan that it runs under.

    Attributes:
        replanned: whether it begins with another plan; ``moving_seconds`` and ``replan_seconds`` are what that takes.
    """

    phase: FreezePhase
    plan: Plan
    replanned: bool
    moving_seconds: float = 0.0
    replan_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.phase.num_steps * step_seconds(self.plan) + self.moving_seconds + self.replan_seconds


@dataclass(frozen=True)
class TrainingTimeline:
    """All phases; ``unfrozen``: the plan without freezing, under which all steps would run."""

    phases: tuple[TimelinePhase, ...]
    unfrozen: Plan
    num_layers: int

    @property
    def seconds(self) -> float:
        """Of the whole training."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def unfrozen_seconds(self) -> float:
        """Of the whole training, if nothing were frozen."""
        return sum(phase.phase.num_steps for phase in self.phases) * step_seconds(self.unfrozen)

    def summary(self) -> str:
        """A line for each phase, and the totals."""
        lines = []
        for each in self.phases:
            phase = each.phase
            lines.append(
                f"step {phase.first_step:,}: {phase.frozen} of {self.num_layers} layers frozen, "
                f"{axes_of(each.plan)}{' (replanned)' if each.replanned else ''}: {each.seconds:.4g} s = "
                f"{phase.num_steps:,} × {step_seconds(each.plan):.4g} s + {each.moving_seconds:.4g} s of moving + "
                f"{each.replan_seconds:.4g} s of programs"
            )
        lines.append(
            f"total: {self.seconds:.4g} s; without freezing {self.unfrozen_seconds:.4g} s, "
            f"{self.unfrozen_seconds / self.seconds:.2f} times as long"
        )
        return "\n".join(lines) + "\n"


def plan_training(
    model: Any, cluster: Cluster | str | None, schedule: FreezeSchedule, *, dtype: str | None = None, **options: Any
) -> TrainingTimeline:
    """Plan every phase of a training.

    Args:
        model, cluster, dtype, options: as of ``planner.plan``; the model on meta is built anew.

    Raises:
        ValueError: as ``planner.plan``; for a model without a list of layers, or a schedule that does not fit it.
    """
    from planner.planning import as_cluster, as_module, plan

    hardware = as_cluster(cluster, num_devices=1)
    layers = layers_of(as_module(model, dtype=dtype))
    phases = schedule.phases(len(layers))
    fix = dict(options.pop("fix", None) or {})
    plans: list[list[Plan]] = []
    layouts: list[dict[str, int]] = []
    modules = []
    for phase in phases:
        module = skeleton(as_module(model, dtype=dtype))
        freeze_first(module, layers[: phase.frozen])
        modules.append(module)
        best = plan(module, hardware, fix=fix, **options)
        plans.append([best])
        for layout in (dict(best.step.axes), *(halved(best.step.axes) if phase is phases[0] else ())):
            if layout not in layouts and all(size in _sizes(fix, axis, size) for axis, size in layout.items()):
                layouts.append(layout)
    for module, own in zip(modules, plans):
        for layout in layouts:
            if layout == dict(own[0].step.axes):
                continue
            try:
                own.append(plan(module, hardware, fix={**fix, **layout}, **options))
            except ValueError:  # nothing fits so: one way less
                continue
    replan = REPLAN_SECONDS if schedule.replan_seconds is None else schedule.replan_seconds
    return TrainingTimeline(shortest(phases, plans, hardware, replan), plans[0][0], len(layers))


def _sizes(fix: Mapping[str, Any], axis: str, size: int) -> Collection[int]:
    """Sizes that ``fix`` leaves an axis; ``size`` where it says nothing."""
    sizes = fix.get(axis, size)
    return (sizes,) if isinstance(sizes, int) else sizes


def shortest(
    phases: tuple[FreezePhase, ...], plans: list[list[Plan]], cluster: Cluster, replan_seconds: float
) -> tuple[TimelinePhase, ...]:
    """The phases under the plans with the least seconds in all; of equals the one found first, which replans least."""
    paths: list[tuple[TimelinePhase, ...]] = [(TimelinePhase(phases[0], plan, replanned=False),) for plan in plans[0]]
    for phase, own in zip(phases[1:], plans[1:]):
        longer: list[tuple[TimelinePhase, ...]] = [
            (*path, TimelinePhase(phase, path[-1].plan, replanned=False)) for path in paths
        ]
        for plan in own:
            ways = [
                (*path, TimelinePhase(phase, plan, True, moving_bound(path[-1].plan, plan, cluster), replan_seconds))
                for path in paths
            ]
            longer.append(min(ways, key=_seconds))
        paths = longer
    return min(paths, key=_seconds)


def _seconds(path: tuple[TimelinePhase, ...]) -> float:
    return sum(phase.seconds for phase in path)


def moving_bound(before: Plan, after: Plan, cluster: Cluster) -> float:
    """Seconds of a move, at most: all weights and optimizer state of a rank's new shard come over the slowest link.

    No time where mesh, stages and placements are those of before.
    """
    if _places(before) == _places(after):
        return 0.0
    most = max(memory.parameters + memory.optimizer for memory in after.step.memory)
    slowest = min(level.slowest_link(cluster.num_devices)[1] for level in cluster.levels)
    return most / slowest


def _places(plan: Plan) -> tuple[Any, ...]:
    """Where a plan has every weight and its state."""
    chunks = [(chunk.rank, [(g.unit, g.first, g.count, g.zero) for g in chunk.groups]) for chunk in plan.step.chunks]
    cuts = {path: tuple(map(shard_dim, state.placement)) for path, state in plan.states.items()}
    return plan.step.axes, plan.step.zero_ranks, chunks, cuts


def halved(axes: Mapping[str, int]) -> list[dict[str, int]]:
    """A pipeline of half as many stages and twice as many replicas, and so on down to one stage."""
    layouts, layout = [], {"pp": 1, "dp": 1, **axes}
    while layout["pp"] % 2 == 0:
        layout = {**layout, "pp": layout["pp"] // 2, "dp": layout["dp"] * 2}
        layouts.append(layout)
    return layouts


def layers_of(module: nn.Module) -> list[str]:
    """Names of the layers: the entries of the longest list of modules.

    Raises:
        ValueError: if there is none.
    """
    from torch import nn

    lists = [(name, each) for name, each in module.named_modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
    if not lists:
        raise ValueError(f"{type(module).__name__} has no nn.ModuleList of layers, so none can be the first to freeze")
    name, longest = max(lists, key=lambda entry: len(entry[1]))
    return [f"{name}.{index}" for index in range(len(longest))]


def freeze_first(module: nn.Module, layers: list[str]) -> None:
    """Freeze layers, and with the first what stands before it (embeddings), unless it is used behind it, too."""
    frozen = first_parameters(module, layers)
    for name, parameter in module.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)


def first_parameters(module: nn.Module, layers: Sequence[str]) -> frozenset[str]:
    """Names, all that it has, of each parameter that freezes with ``layers``: see ``freeze_first``."""
    if not layers:
        return frozenset()
    prefixes = tuple(f"{layer}." for layer in layers)
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    order = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    first = next((place for place, name in enumerate(order) if name.startswith(prefixes)), math.inf)
    return frozenset(
        name
        for own in names.values()
        if all(each.startswith(prefixes) or order.index(each) < first for each in own)
        for name in own
    )
