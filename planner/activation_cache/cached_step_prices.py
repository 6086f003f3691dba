"""What a step takes that reads the outputs of frozen layers, and what its plan is asked for."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cost_models import Cluster
from passes.plan import Plan
from runtime.calls.frozen_prefix import OUTPUT


@dataclass(frozen=True)
class CachePrice:
    """Predicted seconds of a step.

    Attributes:
        computed: of one that computes the frozen layers.
        cached: of one that takes their output; ``reading`` is what it takes to read that.
        converted: of one that reads what is kept of an earlier boundary and computes the frozen layers behind that;
            None where nothing is kept of which these outputs can be made.
    """

    computed: float
    cached: float
    reading: float
    converted: float | None = None

    @property
    def pays(self) -> bool:
        """Whether a hit takes less time than computing it."""
        return self.cached + self.reading < self.computed

    @property
    def converts(self) -> bool:
        """Whether an output takes less time to make of an earlier boundary's than from the start."""
        return self.converted is not None and self.converted < self.computed


def cached_behind(after: str) -> str:
    """Words that say so of a plan."""
    return f", cached behind {after}"


def seconds_of_reading(plan: Plan, num_bytes: int, bytes_per_second: float) -> float:
    """Of the output for a global batch: each process of a node reads its samples' rows, one after the other."""
    cluster = Cluster.from_dict(plan.cluster)
    processes = min(cluster.devices_per_node, cluster.num_devices)
    groups = max(1, plan.step.sample_groups)
    return num_bytes / groups * processes / bytes_per_second


def with_pinned_output(options: Mapping[str, Any], inputs_read: Collection[str]) -> dict[str, Any]:
    """Options of a step that takes the output of frozen layers: that is cut as inputs with samples are, if one is.

    Args:
        inputs_read: keys of the inputs that such a step still reads; pins of others would match nothing.
    """
    constraints = dict(options.get("constraints") or {})
    pins = {pattern: pin for pattern, pin in constraints.items() if pattern.startswith("input:")}
    cut = next((pin for pin in pins.values() if "S(0)" in dict(pin).values()), None)
    if cut is None:
        return dict(options)
    keys = [f"input:{key}" for key in inputs_read]
    for pattern in pins:
        if not any(fnmatch.fnmatchcase(key, pattern) for key in keys):
            del constraints[pattern]
    if not any(fnmatch.fnmatchcase(f"input:{OUTPUT}", pattern) for pattern in constraints):
        constraints[f"input:{OUTPUT}"] = cut
    return {**options, "constraints": constraints}
