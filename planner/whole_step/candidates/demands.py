"""What the user fixes or forbids in a plan of a training step, and the other options of the search."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cost_models import Cluster
from cost_models.fields import suggest
from cost_models.schedules import SCHEDULES
from passes.plan.step_plan import ACTIVATIONS, ALL, ON_HOST, OPTIMIZER
from passes.plan.text_tables import format_bytes
from planner.solvers.pulp_solver import HIGHS
from planner.whole_step.candidates.mesh_layout import AXES
from planner.whole_step.candidates.training_options import POLICIES, ZERO_STAGES, TrainingOptions
from planner.whole_step.costs.step_prices import EXPERT, PIPELINE

#: Over how many neighbours of the data ranks ZeRO divides; 0: over all.
ZERO_RANKS = "zero_ranks"
#: What ``fix`` and ``forbid`` may name: the mesh axes, and these. None: any positive integer (``zero_ranks``: also 0).
CHOICES: Mapping[str, Collection[Any] | None] = {
    **dict.fromkeys(AXES),
    "micro_batch": None,
    "num_microbatches": None,
    "chunks_per_rank": None,
    "schedule": SCHEDULES.keys(),  # those that are registered later, too
    "recompute": (*POLICIES, ON_HOST),
    "zero": ZERO_STAGES,
    ZERO_RANKS: None,
}
#: What a certificate calls the framework whose layouts alone were searched, among its demands.
FRAMEWORK = "framework"
#: Plans that one search returns.
MAX_ALTERNATIVES = 1000
#: Chunks on each rank that interleaved schedules are tried with, unless the user says.
CHUNKS_PER_RANK = (2, 3, 4, 5, 6, 8)


#: Integer programs that a search may solve unless the user says, and that of a model with experts.
PROGRAMS, EXPERT_PROGRAMS = 900.0, 400.0
#: Seconds that a search may take unless the user says: programs are counted, so that the clock is only a guard.
TIME_LIMIT = 600.0


#: What ``offload`` may say is in the hosts' memory: nothing, whatever makes the step better, or what is named.
NEVER, AUTO = "never", "auto"
OFFLOADS = (NEVER, AUTO, OPTIMIZER, ACTIVATIONS, ALL)


@dataclass(frozen=True)
class Demands:
    """Requirements on a plan, and options of the search.

    Attributes:
        fixed: name → values allowed. The names: mesh axes (sizes), ``micro_batch`` (samples on one device at a time),
            ``num_microbatches``, ``schedule``, ``chunks_per_rank``, ``recompute``, ``zero``, ``zero_ranks`` (0, and as
            many as there are: all data ranks); and, not for users, ``order`` (of the axes on the links, see
            ``layout.ORDERS``).
        forbidden: name → values not allowed.
        headroom: share of each device's memory to leave free.
        memory_limit: bytes that a device may hold; None for its own memory.
        training: optimizer and gradient dtype.
        compiled: whether elementwise chains run as fused kernels, as ``torch.compile`` makes them.
        overlap_tensor: whether products may exchange the shards of their rows on the tensor axis themselves.
        num_alternatives: how many plans to return, the best first.
        gap: the search stops when no plan can be better by more than this share.
        time_limit: seconds; None: ``TIME_LIMIT``, long after what ``max_programs`` stops.
        max_programs: how many integer programs may be solved before the search stops; a stage program that is solved
            again with more effort counts as so many more. Unlike ``time_limit`` it stops at the same point every time.
            None: ``EXPERT_PROGRAMS`` for a model with experts, whose bounds seldom close the gap, else ``PROGRAMS``
            unless there is a ``time_limit``.
        solver: PuLP's name of the solver of integer programs.
        offload: one of ``OFFLOADS``; whether that is the optimizer is in ``training.offload``, too.
        left_out: search the pipeline schedules alone that are not tried otherwise, see ``candidates.is_offered``.
    """

    fixed: Mapping[str, frozenset[Any]] = field(default_factory=dict)
    forbidden: Mapping[str, frozenset[Any]] = field(default_factory=dict)
    headroom: float = 0.0
    memory_limit: float | None = None
    training: TrainingOptions = field(default_factory=TrainingOptions)
    compiled: bool = False
    overlap_tensor: bool = False
    num_alternatives: int = 1
    gap: float = 9.5e-3
    time_limit: float | None = None
    max_programs: float | None = None
    solver: str = HIGHS
    offload: str = NEVER
    left_out: bool = False

    @property
    def offloads_activations(self) -> bool:
        """Whether units may keep activations on the host."""
        return self.offload in (ACTIVATIONS, ALL) or ON_HOST in self.fixed.get("recompute", ())

    @property
    def seconds(self) -> float:
        """Seconds that the search may take."""
        return TIME_LIMIT if self.time_limit is None else self.time_limit

    def programs_of(self, num_experts: int) -> float:
        """Integer programs that the search of a model with so many experts may solve (1: it has none)."""
        if self.max_programs is not None:
            return self.max_programs
        if num_experts > 1:
            return EXPERT_PROGRAMS
        return PROGRAMS if self.time_limit is None else math.inf

    def memory_on(self, usable_bytes: float) -> float:
        """Bytes that a plan may take on a device of which tensors can have ``usable_bytes``."""
        limit = usable_bytes if self.memory_limit is None else min(usable_bytes, self.memory_limit)
        return limit * (1.0 - self.headroom)

    def allows(self, name: str, value: Any) -> bool:
        return value in self.fixed.get(name, (value,)) and value not in self.forbidden.get(name, ())

    def among(self, name: str, values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(value for value in values if self.allows(name, value))


#: Options of ``planner.plan`` that only a search of whole steps takes, with their defaults.
STEP_OPTIONS: Mapping[str, Any] = {
    "fix": None,
    "forbid": None,
    "headroom": None,
    "num_devices": None,
    "objective": "time",
    "target_seconds": None,
    "num_alternatives": 1,
    "optimizer": "adamw",
    "gradient_dtype": None,
    "compiled": False,
    "overlap_tensor": False,
    "offload": NEVER,
}


def said(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of whole steps that ask for something: neither their default nor nothing (None, ``{}``)."""
    asked = ((name, options.get(name), default) for name, default in STEP_OPTIONS.items())
    return {name: value for name, value, default in asked if value not in (default, None, {})}


def without_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` but for those of whole steps that ask for nothing, which any mesh may be given."""
    asked = said(options)
    return {name: value for name, value in options.items() if name in asked or name not in STEP_OPTIONS}


def asks_for_step(axes: Iterable[str], options: Mapping[str, Any]) -> bool:
    """Whether to search a whole step on a fixed mesh: it has an axis for a pipeline or for experts, or some option is
    about steps."""
    asks_by_axis = not {PIPELINE, EXPERT}.isdisjoint(axes)
    return asks_by_axis or bool(said(options))


def fixed_axes(sizes: Mapping[str, int], fix: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``fix`` with the axis sizes of a mesh; an axis that it does not have has size 1.

    Raises:
        ValueError: for an axis that steps do not have, or whose size in ``fix`` differs.
    """
    unknown = [name for name in sizes if name not in AXES]
    if unknown:
        raise ValueError(f"a step has no mesh axis {unknown[0]!r}: its axes are {', '.join(AXES)}")
    fixed = {axis: sizes.get(axis, 1) for axis in AXES if axis != EXPERT or axis in sizes}
    for axis, size in fixed.items():
        if (fix or {}).get(axis, size) != size:
            raise ValueError(f"fix says {axis}={(fix or {})[axis]}, but the mesh has {axis}={size}: drop one of them")
    return {**(fix or {}), **fixed}


def recorded_offload(demands: Demands) -> str:
    """What a step of such ``demands`` says of its hosts (``StepPlan.offload``)."""
    optimizer, activations = demands.training.offload, demands.offloads_activations
    return {(True, True): ALL, (True, False): OPTIMIZER, (False, True): ACTIVATIONS}.get((optimizer, activations), "")


def recorded(demands: Demands) -> dict[str, Any]:
    """What a certificate says of ``demands``, for ``read_demands``: all that a plan does not say elsewhere, but time.

    Nothing if there are demands that are not for users.
    """
    if not demands.fixed.keys() | demands.forbidden.keys() <= CHOICES.keys():
        return {}
    return {
        "fix": {name: sorted(values) for name, values in sorted(demands.fixed.items())},
        "forbid": {name: sorted(values) for name, values in sorted(demands.forbidden.items())},
        "memory_limit": demands.memory_limit,
        "num_alternatives": demands.num_alternatives,
        "gap": demands.gap,
    }


def read_demands(
    fix: Mapping[str, Any] | None = None, forbid: Mapping[str, Any] | None = None, **options: Any
) -> Demands:
    """Demands from ``{"tp": 8, "schedule": ["1f1b", "gpipe"], …}``; a value or a collection of them.

    Raises:
        ValueError: for an unknown name, or a value that it cannot have.
    """
    check_share("headroom", options.get("headroom", 0.0))
    check_count("num_alternatives", options.get("num_alternatives", 1), at_most=MAX_ALTERNATIVES)
    check_memory_limit(options.get("memory_limit"))
    check_time_limit(options.get("time_limit"))
    check_max_programs(options.get("max_programs"))
    check_offload(options.get("offload", NEVER))
    if "headroom" in options:
        options["headroom"] = float(options["headroom"])  # 0 is written as a plan is read again
    demands = Demands(_read(fix or {}, "fix"), _read(forbid or {}, "forbid"), **options)
    for name in demands.forbidden:
        values = demands.fixed.get(name, CHOICES.get(name))
        if values is not None and not demands.among(name, values):
            listed = ", ".join(map(str, values))
            raise ValueError(f"fix and forbid leave no value of {name!r}: of {listed} all are forbidden")
    if demands.fixed.get("zero") == {0} and 0 not in demands.fixed.get(ZERO_RANKS, {0}):
        raise ValueError(
            "fix says zero=0, which divides nothing, and zero_ranks, over which it divides: drop one of them"
        )
    return demands


def check_share(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is a share of memory that leaves some."""
    if not is_number(value) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a share of memory from 0 to below 1, got {value!r}")


def check_count(name: str, value: Any, *, at_most: int | None = None) -> None:
    """Raise ValueError unless ``value`` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be at least 1, a whole number, got {value!r}")
    if at_most is not None and value > at_most:
        raise ValueError(f"{name} must be at most {at_most:,}, got {value!r}")


def check_offload(value: Any) -> None:
    """Raise ValueError unless ``value`` says what may be on the hosts."""
    if value not in OFFLOADS:
        raise ValueError(f"offload must be one of {', '.join(OFFLOADS)}, got {value!r}")


def check_memory_limit(value: Any) -> None:
    """Raise ValueError unless ``value`` is bytes, or None for no limit."""
    if value is not None and (not is_number(value) or not 0 < value < math.inf):
        raise ValueError(f"memory_limit must be a positive number of bytes (None: all there is), got {value!r}")


def refuse_beyond_devices(memory_limit: float, cluster: Cluster, *, instead: str) -> None:
    """Raise ValueError for a bound above the memory of every device; ``instead``: what to do, for the message."""
    most = max(group.device.memory_bytes for group in cluster.groups)
    if memory_limit > most:
        raise ValueError(
            f"a bound of {format_bytes(memory_limit)} is more than the {format_bytes(most)} that devices of "
            f"{cluster.name} have: {instead}"
        )


def check_time_limit(value: Any) -> None:
    """Raise ValueError unless ``value`` is seconds, or None for the model's own limit."""
    if value is not None and (not is_number(value) or not value >= 0):
        raise ValueError(f"time_limit must be at least 0 seconds, got {value!r}")


def check_max_programs(value: Any) -> None:
    """Raise ValueError unless ``value`` is a number of programs, at least 1, or None for the model's own limit."""
    if value is not None and (not is_number(value) or not value >= 1):
        raise ValueError(f"max_programs must be at least 1 (math.inf: no limit), got {value!r}")


def is_number(value: Any) -> bool:
    """Whether ``value`` is an int or a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read(demands_by_name: Mapping[str, Any], where: str) -> dict[str, frozenset[Any]]:
    if not isinstance(demands_by_name, Mapping):
        raise ValueError(f'{where} must be {{name: value or values}}, such as {{"tp": 8}}, got {demands_by_name!r}')
    values_by_name = {}
    for name, value in demands_by_name.items():
        if name not in CHOICES:
            hint = suggest(name, CHOICES) or f": expected one of {', '.join(CHOICES)}"
            raise ValueError(f"{where}: unknown name {name!r}{hint}")
        values = value if isinstance(value, (list, tuple, set, frozenset)) else (value,)
        if not values:
            raise ValueError(f"{where}: {name!r} has no values")
        values_by_name[name] = frozenset(_checker(name)(name, where, item) for item in values)
    return values_by_name


def _checker(name: str) -> Callable[[str, str, Any], Any]:
    return _positive if CHOICES[name] is None else _listed


def _positive(name: str, where: str, value: Any) -> int:
    if name == ZERO_RANKS and value == 0 and not isinstance(value, bool):
        return 0
    if name == ZERO_RANKS and value == 1:
        raise ValueError(
            f"{where}: 'zero_ranks' must be 2 or more neighbours, over which ZeRO divides, or 0 for all data ranks, "
            "got 1: for nothing divided say zero=0"
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {name!r} must be an integer of at least 1, got {value!r}")
    return value


def _listed(name: str, where: str, value: Any) -> Any:
    choices = CHOICES[name] or ()
    if value not in choices or isinstance(value, bool):
        raise ValueError(f"{where}: {name!r} must be one of {', '.join(map(str, choices))}, got {value!r}")
    return value
