"""The order of tests: what takes long comes first, so that no process of pytest is left alone with it at the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest

#: Files that take from a minute to ten seconds, the slowest first.
SLOWEST = tuple(
    f"test_{name}"
    for name in (
        "examples", "step_parity", "step_feasibility", "compiled_kernels", "step_exhaustive", "verify",
        "compiled_blocks", "runtime_parity", "torch_tools", "benchmark_gpu", "dropout_plans", "plan_order",
        "gradients", "published_runs", "capture_shorten", "experts", "expert_parallel", "step_runtime_accounts",
        "weight_files_ranks", "pipeline", "graph_cache", "step_api", "trainer", "search_models", "checkpoint_steps",
        "uneven", "stale_programs", "units", "search_brute_force", "runtime_compile", "cli", "launch",
        "capture_models", "compiled_plan", "communication", "checkpoint_ranks", "autograd_memory",
        "benchmark_host_time", "unlike_ranks", "random_operators", "solvers",
    )
)  # fmt: skip


def dealt_out(items: Sequence[pytest.Item], num_processes: int) -> list[pytest.Item]:
    """``items`` so that each process of pytest begins with slow files, none of them another's.

    ``--dist worksteal`` deals out equal shares in this order; who is done takes half of what another has left, from the
    end. The tests of a slow file stay together: the first often runs processes of which the others read the results.
    """
    ranks = {stem: rank for rank, stem in enumerate(SLOWEST)}
    slow = sorted((item for item in items if item.path.stem in ranks), key=lambda item: ranks[item.path.stem])
    stems = list(dict.fromkeys(item.path.stem for item in slow))
    quick = iter([item for item in items if item.path.stem not in ranks])
    dealt: list[pytest.Item] = []
    for number in range(num_processes):
        own = set(stems[number::num_processes])
        share = (len(items) - len(dealt)) // (num_processes - number)
        first = [item for item in slow if item.path.stem in own]
        dealt += [*first, *islice(quick, max(0, share - len(first)))]
    return [*dealt, *quick]
