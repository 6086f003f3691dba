"""``planner plan --freeze``: the timeline of a whole training whose first layers freeze on the way."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from planner.cli.shared_options import read_gib, seconds

if TYPE_CHECKING:
    from planner.changing.freezing import CacheRoom


def add_cache_arguments(group: Any) -> None:
    """Add the options of the cache."""
    group.add_argument("--cache-memory", metavar="GIB", help="of each node's memory, for outputs of frozen layers")
    group.add_argument("--cache-disk", metavar="GIB", help="of each node's disk, for outputs of frozen layers")
    group.add_argument(
        "--cache-speed", type=seconds, metavar="GB/S", help="that a node reads of its cache (default: 2, an assumption)"
    )


def _cache(options: argparse.Namespace) -> CacheRoom | None:
    from planner.changing.freezing import BYTES_PER_SECOND, CacheRoom

    sizes = {name: getattr(options, f"cache_{name}") for name in ("memory", "disk")}
    if not any(sizes.values()):
        if options.cache_speed is not None:
            raise ValueError("--cache-speed is of a cache that has room: give --cache-memory or --cache-disk")
        return None
    memory, disk = (0.0 if size is None else read_gib(size, option=f"--cache-{name}") for name, size in sizes.items())
    speed = BYTES_PER_SECOND if options.cache_speed is None else options.cache_speed * 1e9
    return CacheRoom(memory, disk, bytes_per_second=speed)


def run_training_timeline(options: argparse.Namespace, request: Mapping[str, Any]) -> int:
    """Plan every phase, print the timeline; returns the exit code.

    Args:
        request: arguments of ``planner.plan``.
    """
    from planner.changing.freeze_schedule import FreezeSchedule
    from planner.library.batch_sizes import check_batch_sizes

    schedule, cache = FreezeSchedule.from_toml(options.freeze), _cache(options)
    check_batch_sizes(options.model, batch_size=request["global_batch"], seq_len=request["seq_len"])
    from planner.training_timeline import plan_training  # imports torch

    arguments = {name: value for name, value in request.items() if name != "mesh"}
    timeline = plan_training(options.model, arguments.pop("cluster"), schedule, cache=cache, **arguments)
    print(timeline.summary(), end="")
    return 0
