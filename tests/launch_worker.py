"""One process that joins its peers by ``planner.init(**arguments)`` and prints, as one line of JSON, how that ended."""

from __future__ import annotations

import json
import os

import torch.distributed as dist

import planner
from runtime.launch.place import LaunchError


def main() -> None:
    init = planner.init  # imports torch
    try:
        process = init(**json.loads(os.environ["MESHWRIGHT_TEST_INIT"]))
    except (LaunchError, ValueError) as error:
        results = {"error": str(error), "kind": type(error).__name__}
    else:
        results = {"rank": process.rank, "local_rank": process.local_rank, "again": init().rank}
        ranks = [None] * process.world_size
        dist.all_gather_object(ranks, process.rank)
        results["ranks"] = ranks
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
