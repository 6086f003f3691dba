"""One rank of the tests of ``planner profile``: few calls, and one rank slower than the other."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from cost_models import Cluster
from planner.calibration import call_timing, collective_cases, measure_machine, profile_machine
from planner.calibration.operator_cases import operator_cases
from tests.ranks import answer, task


def main() -> None:
    path = task()["path"]
    few: dict[str, list[Any]] = {}
    for case in operator_cases():
        few.setdefault(case.kind, []).append(case)
    measure_machine.operator_cases = lambda: iter([case for cases in few.values() for case in cases[:4]])
    measure_machine.PEAK_SIDES, measure_machine.OVERLAP_BYTES = (16, 32), 2**12
    collective_cases.SIZES = collective_cases.SIZES[:6]
    call_timing.CHAINS_SECONDS, call_timing.ROUND_SECONDS, call_timing.NUM_PRODUCTS = 0.02, 2e-3, 1
    if dist.get_rank() == 1:
        quick = call_timing._round
        call_timing._round = lambda *arguments: time.sleep(1e-3) or quick(*arguments) + 1e-3
    profile_machine(path, device="cpu", listener=lambda line: None)
    profile = Cluster.from_toml(path).profile
    assert profile is not None
    answer({name: each.median for name, each in profile.ranges.items()})


if __name__ == "__main__":
    main()
