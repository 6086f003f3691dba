"""One of four ranks of the tests of groups of mesh axes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from passes.ir.types import MeshShape
from runtime.checkpoint.manager import CheckpointManager
from runtime.execution.rank_mapping import RankPlaces
from runtime.launch.groups import flattened_group, mesh_along, mesh_of_axes
from runtime.torch_compat.process_groups import set_group_timeout
from tests.ranks import answer, task

PATIENT = timedelta(seconds=4321)


def sum_of_ranks(group: ProcessGroup | None) -> float | None:
    if group is None:
        return None
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=group)
    return float(total)


def timeout_of(group: ProcessGroup) -> timedelta:
    options = group._get_backend(torch.device("cpu")).options
    return timedelta(seconds=options._timeout.total_seconds())


def turned_mesh(mesh: DeviceMesh) -> tuple[Any, ...]:
    """Names and ranks of two axes in the other order, and the sums of ranks along each."""
    turned = mesh_along(mesh, ("tp", "dp"))
    return (
        turned.mesh_dim_names,
        turned.mesh.tolist(),
        *(sum_of_ranks(turned.get_group(name)) for name in ("tp", "dp")),
    )


def turned_mesh_of_torch_2_11(mesh: DeviceMesh) -> tuple[Any, ...]:
    """The same where torch takes axes in the order of the mesh alone."""

    def refuse(self: DeviceMesh, names: Any) -> DeviceMesh:
        raise KeyError(f"Invalid mesh_dim_names {names}: indices should be in ascending order.")

    with mock.patch.object(DeviceMesh, "__getitem__", refuse):
        return turned_mesh(mesh)


def main() -> None:
    task()
    set_group_timeout(PATIENT)
    rank = dist.get_rank()
    # A script's own groups, of which ranks 0 and 1 are in three.
    for members in ([0, 1], [0, 1], [0, 1, 2]):
        dist.new_group(members)
    mesh = mesh_of_axes("cpu", torch.arange(4).reshape(2, 1, 2), ("dp", "cp", "tp"))
    groups = {name: mesh.get_group(name) for name in ("dp", "cp", "tp")}
    groups["ranks"], groups["both"] = flattened_group(mesh, "ranks"), flattened_group(mesh["dp", "tp"], "both")
    sums = [sum_of_ranks(group) for group in groups.values()]
    again = mesh_of_axes("cpu", torch.arange(4).reshape(2, 2).T, ("tp", "dp"))
    turned = [turned_mesh(mesh), turned_mesh_of_torch_2_11(mesh)]
    places = RankPlaces(
        mesh_of_axes("cpu", torch.arange(4).reshape(4, 1, 1, 1), ("pp", "dp", "cp", "tp")), MeshShape(("dp",), (1,))
    )
    tied = [(0, 3), (0, 1), (1, 2, 3), (0, 1, 2, 3)]
    checkpoints = CheckpointManager("unused")._group
    assert checkpoints is not None
    answers = {
        "sums": sums == [{0: 2.0, 1: 4.0}[rank % 2], float(rank), {0: 1.0, 1: 5.0}[rank // 2], 6.0, 6.0],
        "time-outs": all(timeout_of(group) == PATIENT for group in (*groups.values(), checkpoints)),
        "another order": all(axes == (("tp", "dp"), [[0, 2], [1, 3]], sums[2], sums[0]) for axes in turned),
        "stages": [sum_of_ranks(places.stage_group(stages)) for stages in tied]
        == [float(sum(stages)) if rank in stages else None for stages in tied],
        "second mesh": [sum_of_ranks(again.get_group(name)) for name in ("dp", "tp")] == [sums[0], sums[2]],
    }
    seen: list[dict[str, bool]] = [{} for _ in range(4)]
    dist.all_gather_object(seen, answers)
    answer({name: all(results[name] for results in seen) for name in answers})


if __name__ == "__main__":
    main()
