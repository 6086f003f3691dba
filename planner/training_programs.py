"""Programs that a phase of a training may run under: some compute its frozen layers, some read their output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cost_models import Cluster
from passes.plan import Plan
from planner.activation_cache.cached_step_prices import seconds_of_reading, with_pinned_output
from planner.changing.freezing import CacheRoom
from runtime.migration.move_price import step_seconds

if TYPE_CHECKING:
    from torch import nn

#: Options of ``planner.plan`` that say what the arguments of a step are.
_OF_EXAMPLE = ("example_inputs", "batch_size", "global_batch", "seq_len")


@dataclass(frozen=True)
class PhaseProgram:
    """A program that a phase may run under.

    Attributes:
        plan: of its step.
        behind: module whose output its steps read from the cache; empty: they compute the frozen layers.
        reading_seconds: of a step, to read that.
        filling_steps: in which every sample is seen once, and its output is computed and kept.
        filling_seconds: of such a step.
        converting_seconds: of such a step where the output of an earlier module is kept, by that module.
    """

    plan: Plan
    behind: str = ""
    reading_seconds: float = 0.0
    filling_steps: int = 0
    filling_seconds: float = 0.0
    converting_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step that computes, or of one whose samples are all kept."""
        return step_seconds(self.plan) + self.reading_seconds


class PhasePlanning:
    """The plans for what is frozen in a phase.

    Args:
        module: on meta, with its first layers frozen.
        options: of ``planner.plan``.
        after: path of the last frozen layer; empty where none is.
        before: the same of the phase before.
        example: arguments of a global batch by name; None without a cache.
        room: of the cache, ``steps_of_epoch`` say when samples come again.
    """

    def __init__(
        self,
        module: nn.Module,
        cluster: Cluster,
        options: Mapping[str, Any],
        *,
        after: str,
        before: str,
        example: Mapping[str, Any] | None,
        room: CacheRoom | None,
        steps_of_epoch: int,
    ) -> None:
        self.after, self._before = after, before
        self._module, self._cluster, self._options = module, cluster, dict(options)
        self._room, self._steps_of_epoch = room, steps_of_epoch
        self._plans: dict[tuple[str, tuple[tuple[str, int], ...]], Plan | None] = {}
        self._cached: dict[str, CachedStep] = {}
        self._obstacle = ""
        if room is not None and example is not None and after:
            self._look_at_outputs(example, room)
        self._programs: list[PhaseProgram] = []

    def _look_at_outputs(self, example: Mapping[str, Any], room: CacheRoom) -> None:
        """Which outputs can be read, or why none can."""
        from runtime.calls.skeleton import skeleton

        self._caching = skeleton(self._module)
        try:
            for behind in dict.fromkeys(filter(None, (self.after, self._before))):
                step = cached_step(self._caching, example, behind, self._options.get("loss_fn"))
                room.check_epoch(step.num_bytes, self._steps_of_epoch)
                self._cached[behind] = step
        except ValueError as error:
            self._obstacle = str(error)

    def fastest_layouts(self) -> list[dict[str, int]]:
        """Mesh sizes of the fastest plans: with the frozen layers computed, and with their output read.

        Raises:
            ValueError: if there is no plan that computes them.
        """
        best = self._plan("", {})
        assert best is not None
        cached = self._plan(self.after, {}) if self.after in self._cached else None
        return [dict(each.step.axes) for each in (best, cached) if each is not None]

    def programs(self, layouts: Sequence[Mapping[str, int]]) -> list[PhaseProgram]:
        """What the phase may run under on ``layouts`` and the best mesh, whose program that computes is the first."""
        best = self._plan("", {})
        assert best is not None
        own = dict(best.step.axes)
        for layout in (own, *(each for each in layouts if each != own)):
            computed = self._plan("", layout)
            if computed is not None:
                self._programs += [PhaseProgram(computed), *self._reading(layout, computed)]
        self._programs.sort(key=lambda program: bool(program.behind))
        return self._programs

    def _reading(self, layout: Mapping[str, int], computed: Plan) -> list[PhaseProgram]:
        """Programs that read outputs, on the mesh of ``computed``, which computes them."""
        programs: list[PhaseProgram] = []
        for behind in (self._before, self.after):
            plan = self._plan(behind, layout) if behind in self._cached else None
            if plan is None:
                continue
            assert self._room is not None
            reading = seconds_of_reading(plan, self._cached[behind].num_bytes, self._room.bytes_per_second)
            hit = step_seconds(plan) + reading
            converting = {one.behind: max(hit, one.step_seconds) for one in programs if one.behind != behind}
            filling = max(hit, step_seconds(computed))
            programs.append(PhaseProgram(plan, behind, reading, self._steps_of_epoch, filling, converting))
        return programs

    def hits(self) -> str:
        """What a step takes whose outputs are kept beside one that computes them, in words."""
        if not self.after:
            return ""
        if self._obstacle:
            return f"not cached behind {self.after}: {self._obstacle}"
        reading = [program for program in self._programs if program.behind == self.after]
        if not reading:
            return f"not cached behind {self.after}: there is no plan"
        hit = min(reading, key=lambda program: program.step_seconds)
        computed = min(program.step_seconds for program in self._programs if not program.behind)
        return (
            f"cached behind {self.after} a step takes {hit.step_seconds:.4g} s at best, {hit.reading_seconds:.4g} s of "
            f"it to read, computed {computed:.4g} s; an epoch of {self._steps_of_epoch:,} steps fills the cache"
        )

    def _plan(self, behind: str, layout: Mapping[str, int]) -> Plan | None:
        """The plan of a step on a mesh, or, for none, on the best; None where nothing fits a given one."""
        key = behind, tuple(layout.items())
        if key not in self._plans:
            try:
                self._plans[key] = self._searched(behind, layout)
            except ValueError:  # nothing fits so: one way less
                if not behind and not layout:
                    raise
                self._plans[key] = None
            found = self._plans[key]
            if found is not None and not layout:
                self._plans[behind, tuple(found.step.axes.items())] = found
        return self._plans[key]

    def _searched(self, behind: str, layout: Mapping[str, int]) -> Plan:
        from planner.planning import plan

        options = {**self._options, "fix": {**dict(self._options.get("fix") or {}), **layout}}
        if not behind:
            return plan(self._module, self._cluster, **options)
        step = self._cached[behind]
        options = {name: value for name, value in options.items() if name not in _OF_EXAMPLE}
        options = with_pinned_output(options, step.inputs_read)
        return plan(self._caching, self._cluster, example_inputs=step.example, **options)


def example_by_name(module: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a global batch, as ``options`` of ``planner.plan`` say them.

    Raises:
        ValueError: for those that cannot be passed by name.
    """
    from passes.capture.call_arguments import arguments_of
    from planner.planning import example_inputs_of
    from runtime.calls.model_call import read_call

    inputs = options.get("example_inputs")
    if inputs is None:
        batch_size = options.get("global_batch") or options.get("batch_size")
        inputs = example_inputs_of(module, batch_size=batch_size, seq_len=options.get("seq_len"))
    call = read_call(module.forward, *arguments_of(inputs))
    if call.args:
        raise ValueError("activations are cached for models whose batches are passed by name: give example_inputs so")
    return call.kwargs


@dataclass(frozen=True)
class CachedStep:
    """A step that reads the output of a module, to be planned.

    Attributes:
        example: its arguments, without data.
        inputs_read: keys of those of them that it reads.
        num_bytes: of the output for a global batch.
    """

    example: Mapping[str, Any]
    inputs_read: tuple[str, ...]
    num_bytes: int


def cached_step(module: nn.Module, example: Mapping[str, Any], after: str, loss_fn: Any) -> CachedStep:
    """The step of ``module``, whose forward is changed for it, that reads the output of its module ``after``.

    Args:
        example: arguments of a global batch by name, without data.

    Raises:
        ValueError: for frozen layers whose output cannot be kept, see ``prefix_checks``.
    """
    import torch

    from passes.shard import input_key
    from planner.activation_cache.prefix_checks import checked_prefix
    from planner.planning import capture_for_planning
    from runtime.calls.frozen_prefix import AFTER, OUTPUT, take_frozen_outputs

    take_frozen_outputs(module)
    trains = {name: one.requires_grad for name, one in module.named_parameters(remove_duplicate=False)}
    graph = capture_for_planning(module, example_inputs={**example, AFTER: after})
    prefix = checked_prefix(graph, after, trains)
    output = torch.empty(prefix.shape, dtype=getattr(torch, prefix.dtype), device="meta")
    behind = {**example, AFTER: after, OUTPUT: output}
    step = capture_for_planning(module, example_inputs=behind, loss_fn=loss_fn)
    return CachedStep(behind, tuple(map(input_key, step.input_paths)), output.nbytes)
