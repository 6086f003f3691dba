"""A layout that somebody runs today, in words (``dp=8,tp=8,pp=16 v=2 zero=1``), priced as experts' layouts are.

What it leaves open is decided in its favour: recompute and ZeRO (one for all layers), micro-batches, schedule, cuts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_models import Cluster
from cost_models.fields import suggest
from passes.plan.step_plan import ON_HOST
from planner.whole_step.candidates.demands import CHOICES, Demands, read_demands
from planner.whole_step.candidates.expert_layouts import (
    BaselineSpace,
    Missing,
    Priced,
    Splitter,
    StepBaseline,
    best_of_rules,
    refusal_on_unequal,
)
from planner.whole_step.candidates.infeasible import infeasible, infeasible_on_unequal
from planner.whole_step.candidates.mesh_layout import AXES
from planner.whole_step.candidates.training_options import POLICIES, ZERO_STAGES
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.step_prices import DATA
from planner.whole_step.unequal_search import search_of

#: What other frameworks call choices of ours.
ALIASES: Mapping[str, str] = {
    "v": "chunks_per_rank",
    "vpp": "chunks_per_rank",
    "mbs": "micro_batch",
    "m": "num_microbatches",
    "gas": "num_microbatches",
    "ac": "recompute",
    "sp": "sequence_parallel",
}
SEQUENCE_PARALLEL = "sequence_parallel"
_SWITCH: Mapping[str, bool] = {"on": True, "1": True, "yes": True, "off": False, "0": False, "no": False}


@dataclass(frozen=True)
class UserLayout:
    """``text`` as the user wrote it; ``fixed``: choice → value; ``sequence``: sequence parallelism beside tp."""

    text: str
    fixed: Mapping[str, Any]
    sequence: bool = True

    def on(self, num_devices: int) -> Mapping[str, Any]:
        """All choices on so many devices: axes that are not named have size 1, the data axis takes what is left.

        Raises:
            ValueError: if the sizes do not make that number of devices.
        """
        sizes = {axis: self.fixed.get(axis, 1) for axis in AXES}
        product = math.prod(sizes.values())
        if DATA not in self.fixed and num_devices % product == 0:
            sizes[DATA] = num_devices // product
        product = math.prod(sizes.values())
        if product != num_devices:
            axes = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == DATA)
            raise ValueError(
                f"{axes} is {product:,} devices, the cluster has {num_devices:,}: change an axis, or leave out dp"
            )
        return {**self.fixed, **sizes}


def read_layout(text: str) -> UserLayout:
    """A layout in words: ``NAME=VALUE`` with commas or blanks between.

    Names are those of ``--fix`` and ``ALIASES``, with ``-`` or ``_``; ``sp=on`` or ``off`` says whether activations
    between split layers are sharded along the sequence.

    Raises:
        ValueError: for text that is none, a name that is not known, or a value that it cannot have.
    """
    fixed: dict[str, Any] = {}
    for word in re.split(r"[,\s]+", text.strip()):
        name, equals, value = word.partition("=")
        name = ALIASES.get(name.lower(), name.lower().replace("-", "_"))
        if not equals or not value:
            raise ValueError(f"--layout takes NAME=VALUE …, such as 'dp=8,tp=8,pp=16 v=2 zero=1', got {word!r}")
        if name not in (*CHOICES, SEQUENCE_PARALLEL):
            option_names = (*CHOICES, SEQUENCE_PARALLEL, *ALIASES)
            raise ValueError(
                f"--layout: unknown name {name!r}{suggest(name, option_names) or ': it has ' + ', '.join(option_names)}"
            )
        if name in fixed:
            raise ValueError(f"--layout: {name} is there twice in {text!r}")
        fixed[name] = int(value) if re.fullmatch(r"[0-9]{1,18}", value) and name != SEQUENCE_PARALLEL else value.lower()
    sequence = fixed.pop(SEQUENCE_PARALLEL, "on")
    if sequence not in _SWITCH:
        raise ValueError(f"--layout: sequence_parallel is on or off, got {sequence!r}")
    if fixed.get("recompute") == ON_HOST:
        raise ValueError(
            f"--layout: recompute={ON_HOST} is planned, not priced beside a plan: --fix recompute={ON_HOST}"
        )
    read_demands(fixed)
    return UserLayout(text, fixed, _SWITCH[sequence])


def best_of_layout(layout: UserLayout, space: BaselineSpace, cluster: Cluster, demands: Demands) -> Priced | Missing:
    """The layout as a solution, or the reason why it is none."""
    try:
        fixed = {name: (value,) for name, value in layout.on(cluster.num_devices).items()}
    except ValueError as error:
        return Missing(layout.text, str(error))
    open_choices: dict[str, tuple[Any, ...]] = {"recompute": POLICIES[:-1], "zero": ZERO_STAGES}
    tensor: Splitter = "megatron" if layout.sequence else "megatron without sequence parallelism"
    row = StepBaseline({**open_choices, **fixed}, tensor=tensor)
    level_one = space.level_one(row.tensor, cluster)
    best = best_of_rules(layout.text, row, level_one, cluster, demands, within_node=False)
    return best if isinstance(best, Priced) else Missing(layout.text, _reason(row, level_one, cluster, demands))


def _reason(row: StepBaseline, level_one: LevelOne, cluster: Cluster, demands: Demands) -> str:
    """Why nothing meets the layout, and what would help."""
    refused = refusal_on_unequal(row, cluster, demands)
    if refused is not None:
        return refused
    fixed = {name: frozenset(values) for name, values in row.fixed.items()}
    only_these = Demands(fixed, headroom=demands.headroom, memory_limit=demands.memory_limit)
    search = search_of(level_one, cluster, only_these)
    outcome = search.run()
    if outcome.solutions:
        return "no recompute policy and ZeRO stage for all layers fits"
    if cluster.has_unequal_devices:
        return str(infeasible_on_unequal(cluster, (outcome,)))
    return str(infeasible(search, outcome))
