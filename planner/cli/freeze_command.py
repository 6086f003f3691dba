"""``planner plan --freeze``: the timeline of a whole training whose first layers freeze on the way."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any


def run_training_timeline(options: argparse.Namespace, request: Mapping[str, Any]) -> int:
    """Plan every phase, print the timeline; returns the exit code.

    Args:
        request: arguments of ``planner.plan``.
    """
    from planner.changing.freeze_schedule import FreezeSchedule
    from planner.training_timeline import plan_training

    schedule = FreezeSchedule.from_toml(options.freeze)
    arguments = {name: value for name, value in request.items() if name != "mesh"}
    print(plan_training(options.model, arguments.pop("cluster"), schedule, **arguments).summary(), end="")
    return 0
