"""A whole training whose first layers freeze on the way: which plan it runs under when, decided by predictions.

At each freeze the training goes on under the program it has (whose predicted seconds then are an upper bound), or under
another plan, for what is frozen now: the layout it has, that of a pipeline halved with replicas in its place, or any
that is the fastest at some freeze. With room for a cache, each layout has two more plans: of a step that reads what the
frozen layers give, and of one that reads what those that were frozen at the freeze before give. The decision is a
shortest path over these plans: seconds of the steps, of the state on its way, and of making programs. To keep the first
program is one of the paths, so that freezing never costs time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cost_models import Cluster
from cost_models.text import counted
from passes.ir.types import shard_dim
from passes.plan import Plan
from planner.changing.freeze_schedule import FreezePhase, FreezeSchedule
from planner.changing.freezing import CacheRoom
from planner.training_programs import PhasePlanning, PhaseProgram, example_by_name
from runtime.migration.move_price import REPLAN_SECONDS, axes_of, step_seconds

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TimelinePhase:
    """A phase of the training, and the program that it runs under.

    Attributes:
        replanned: whether it begins with another program, after ``moving_seconds`` and ``replan_seconds``.
        filling_steps: its first steps, of ``filling_seconds`` each, which compute and keep what later ones read.
        unfilled_steps: such steps that are left behind it.
    """

    phase: FreezePhase
    program: PhaseProgram
    replanned: bool
    moving_seconds: float = 0.0
    replan_seconds: float = 0.0
    filling_steps: int = 0
    filling_seconds: float = 0.0
    unfilled_steps: int = 0

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def seconds(self) -> float:
        steps = (self.phase.num_steps - self.filling_steps) * self.program.step_seconds
        return self.filling_steps * self.filling_seconds + steps + self.moving_seconds + self.replan_seconds

    def summary(self, num_layers: int) -> str:
        """A line."""
        phase, program, filling = self.phase, self.program, ""
        if self.filling_steps:
            filling = f"{self.filling_steps:,} × {self.filling_seconds:.4g} s that fill the cache + "
        of_which = f" ({program.reading_seconds:.4g} s of it to read)" if program.behind else ""
        return (
            f"step {phase.first_step:,}: {phase.frozen} of {counted(num_layers, 'layer')} frozen, "
            f"{axes_of(self.plan)}{f', cached behind {program.behind}' if program.behind else ''}"
            f"{' (replanned)' if self.replanned else ''}: {self.seconds:.4g} s = {filling}"
            f"{phase.num_steps - self.filling_steps:,} × {program.step_seconds:.4g} s{of_which} + "
            f"{self.moving_seconds:.4g} s of moving + {self.replan_seconds:.4g} s of programs"
        )


@dataclass(frozen=True)
class TrainingTimeline:
    """All phases; ``unfrozen``: the plan without freezing, under which all steps would run.

    Attributes:
        hits: of each phase, what a step takes whose outputs are cached beside one that computes them, in words; empty
            without room for a cache.
    """

    phases: tuple[TimelinePhase, ...]
    unfrozen: Plan
    num_layers: int
    hits: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of the whole training."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def unfrozen_seconds(self) -> float:
        """Of the whole training, if nothing were frozen."""
        return sum(phase.phase.num_steps for phase in self.phases) * step_seconds(self.unfrozen)

    def summary(self) -> str:
        """A line for each phase, one more for what a cache saves of a step, and the totals."""
        lines = []
        for place, each in enumerate(self.phases):
            lines.append(each.summary(self.num_layers))
            lines += [f"    {line}" for line in self.hits[place : place + 1] if line]
        lines.append(
            f"total: {self.seconds:.4g} s; without freezing {self.unfrozen_seconds:.4g} s, "
            f"{self.unfrozen_seconds / self.seconds:.2f} times as long"
        )
        return "\n".join(lines) + "\n"


def plan_training(
    model: Any,
    cluster: Cluster | str | None,
    schedule: FreezeSchedule,
    *,
    dtype: str | None = None,
    cache: CacheRoom | None = None,
    **options: Any,
) -> TrainingTimeline:
    """Plan every phase of a training.

    Frozen layers are in evaluation mode, as ``planner.Trainer`` has them.

    Args:
        model, cluster, dtype, options: as of ``planner.plan``; the model on meta is built anew.
        cache: room on each node for outputs of the frozen layers; ``schedule.steps_of_epoch`` says when samples come
            again.

    Raises:
        ValueError: as ``planner.plan``; for a model without a list of layers, or a schedule that does not fit it; with
            a cache, for a schedule without epochs, and batches that are not passed by name.
    """
    from planner.planning import as_cluster, as_module
    from runtime.calls.skeleton import skeleton

    hardware = as_cluster(cluster, num_devices=1)
    whole = as_module(model, dtype=dtype)
    layers = layers_of(whole)
    phases = schedule.phases(len(layers))
    if cache is not None and schedule.steps_of_epoch is None:
        raise ValueError(
            "a cache is read when a sample comes again, and the freeze schedule says nothing of epochs: give it "
            "steps_of_epoch, the steps until each sample was seen once"
        )
    example = None if cache is None else example_by_name(whole, options)
    plannings: list[PhasePlanning] = []
    for phase in phases:
        module = skeleton(as_module(model, dtype=dtype))
        freeze_first(module, layers[: phase.frozen])
        evaluate_first(module, layers, phase.frozen)
        plannings.append(
            PhasePlanning(
                module,
                hardware,
                options,
                after=layers[phase.frozen - 1] if phase.frozen else "",
                before=plannings[-1].after if plannings else "",
                example=example,
                room=cache,
                steps_of_epoch=schedule.steps_of_epoch or 0,
            )
        )
    fix = dict(options.get("fix") or {})
    layouts: list[dict[str, int]] = []
    for planning in plannings:
        for axes in planning.fastest_layouts():
            for layout in (axes, *(halved(axes) if planning is plannings[0] else ())):
                if layout not in layouts and all(size in _sizes(fix, axis, size) for axis, size in layout.items()):
                    layouts.append(layout)
    programs = [planning.programs(layouts) for planning in plannings]
    replan = REPLAN_SECONDS if schedule.replan_seconds is None else schedule.replan_seconds
    hits = () if cache is None else tuple(planning.hits() for planning in plannings)
    return TrainingTimeline(shortest(phases, programs, hardware, replan), programs[0][0].plan, len(layers), hits)


def _sizes(fix: Mapping[str, Any], axis: str, size: int) -> Collection[int]:
    """Sizes that ``fix`` leaves an axis; ``size`` where it says nothing."""
    sizes = fix.get(axis, size)
    return (sizes,) if isinstance(sizes, int) else sizes


def shortest(
    phases: tuple[FreezePhase, ...], programs: Sequence[Sequence[PhaseProgram]], cluster: Cluster, replan_seconds: float
) -> tuple[TimelinePhase, ...]:
    """The phases under the programs with the least seconds in all; of equals the first, which replans least."""
    paths: list[tuple[TimelinePhase, ...]] = [(_begun((), phases[0], program),) for program in programs[0]]
    for phase, own in zip(phases[1:], programs[1:]):
        longer: list[tuple[TimelinePhase, ...]] = [(*path, _kept(path[-1], phase)) for path in paths]
        for program in own:
            ways = []
            for path in paths:
                moving = moving_bound(path[-1].plan, program.plan, cluster)
                begun = _begun(path, phase, program)
                moved = dataclasses.replace(begun, replanned=True, moving_seconds=moving, replan_seconds=replan_seconds)
                ways.append((*path, moved))
            longer.append(min(ways, key=_seconds))
        paths = longer
    return min(paths, key=_seconds)


def _begun(path: Sequence[TimelinePhase], phase: FreezePhase, program: PhaseProgram) -> TimelinePhase:
    """A phase that begins under a program, with what is kept at the end of ``path``."""
    left, seconds = program.filling_steps, program.filling_seconds
    if path and program.behind:
        before = path[-1]
        if before.program.behind == program.behind:
            left = before.unfilled_steps
        elif before.unfilled_steps == 0:
            seconds = min(seconds, program.converting_seconds.get(before.program.behind, seconds))
    return _filled(phase, program, left, seconds)


def _kept(before: TimelinePhase, phase: FreezePhase) -> TimelinePhase:
    """A phase that goes on under the program of the one before it."""
    return _filled(phase, before.program, before.unfilled_steps, before.filling_seconds)


def _filled(phase: FreezePhase, program: PhaseProgram, left: int, seconds: float) -> TimelinePhase:
    """A phase in which as many of the steps that are ``left`` to fill the cache are done as it has."""
    done = min(left, phase.num_steps)
    return TimelinePhase(phase, program, False, filling_steps=done, filling_seconds=seconds, unfilled_steps=left - done)


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


def evaluate_first(module: nn.Module, layers: Sequence[str], num_frozen: int) -> None:
    """Put the first ``num_frozen`` of ``layers`` into evaluation mode, and what stands before them and is frozen."""
    for path in frozen_modules(module, layers, num_frozen):
        module.get_submodule(path).eval()


def frozen_modules(module: nn.Module, layers: Sequence[str], num_frozen: int) -> list[str]:
    """Paths of the frozen layers, and of modules before the first whose parameters are frozen, or that have none."""
    if not num_frozen:
        return []
    names = first_parameters(module, layers[:num_frozen])
    paths = []
    for path, part in module.named_modules():
        if path == layers[0]:
            break
        is_around = layers[0].startswith(f"{path}.") or not path
        own = [f"{path}.{name}" for name, _ in part.named_parameters()]
        if not is_around and all(name in names for name in own):
            paths.append(path)
    return [*paths, *layers[:num_frozen]]
