"""One process that joins its peers by ``planner.init(**arguments)`` and prints, as JSON, how that ended."""

from __future__ import annotations

import json
import sys
import time

import torch.distributed as dist

import planner
from runtime.launch.place import LaunchError


def main() -> None:
    init = planner.init  # imports torch
    started = time.monotonic()
    try:
        process = init(**json.loads(sys.argv[1]))
    except (LaunchError, ValueError) as error:
        found = {"error": str(error), "kind": type(error).__name__, "seconds": time.monotonic() - started}
    else:
        found = {"rank": process.rank, "local_rank": process.local_rank, "again": init().rank}
        ranks = [None] * process.world_size
        if process.rank == 0:
            time.sleep(3.5)  # longer than the time-out of the start, which must not be that of collectives
        dist.all_gather_object(ranks, process.rank)
        found["ranks"] = ranks
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
