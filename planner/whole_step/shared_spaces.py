"""What all plans of one graph have in common, whatever the cluster, kept with the graph that it is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from cost_models.registrations import registrations_in_words
from passes.plan.step_plan import CHUNKED_LOSS
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.costs.sharding import ShardingSpace
from planner.whole_step.costs.unit_costs import StepUnits

#: By all that they depend on beside the graph.
Spaces: TypeAlias = dict[tuple[object, ...], tuple[ShardingSpace, StepUnits]]


def shared_space(
    spaces: Spaces | None, demands: Demands, pose: Callable[[], tuple[ShardingSpace, StepUnits]]
) -> tuple[ShardingSpace, StepUnits]:
    """What ``pose`` makes for ``demands``, without pins and of all blocks; the same object if it was made before."""
    if spaces is None or demands.fixed.get("recompute") == {CHUNKED_LOSS}:
        return pose()
    registered = tuple(registrations_in_words().items())
    key = registered, demands.solver, demands.compiled, demands.overlap_tensor, demands.offloads_activations
    if key not in spaces:
        spaces[key] = pose()
    return spaces[key]
