"""The time-outs of all groups that a step of a pipeline uses."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from planner.targets import as_device_mesh, read_target
from runtime.execution.rank_mapping import RankPlaces
from runtime.torch_compat.process_groups import set_group_timeout
from tests import ranks


def main() -> None:
    set_group_timeout(timedelta(seconds=ranks.task()["seconds"]))
    device_mesh, shape = as_device_mesh(read_target("pp=1,dp=2,cp=2"))
    places = RankPlaces(device_mesh, shape)
    groups = [device_mesh.get_group(name) for name in shape.names] + [places.group_over(("dp", "cp")), places._everyone]
    groups.append(dist.group.WORLD)
    cpu = torch.device("cpu")
    ranks.answer({"seconds": [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]})


if __name__ == "__main__":
    main()
