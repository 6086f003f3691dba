"""The order of tests: what takes long comes first, so that no process of pytest is left alone with it at the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest

#: Files that take from a minute to ten seconds, the slowest first.
SLOWEST = tuple(
    f"test_{name}"
    for name in (
        "examples", "verify", "step_parity", "step_feasibility", "step_exhaustive", "hugging_face", "compiled_blocks",
        "compiled_kernels", "benchmark_gpu", "step_price", "plan_order", "expert_parallel", "step_api", "torch_tools",
        "experts", "cli", "docs", "gradients", "sweeps", "runtime_parity", "dropout_plans", "step_degenerate",
        "search_models", "launch", "weight_files_ranks", "uneven", "published_runs", "graph_cache", "value_guards",
        "expert_bounds", "robustness", "capture_shorten", "pipeline", "trainer", "step_runtime_accounts",
        "step_baselines", "checkpoint_steps", "stale_programs", "units", "search_brute_force", "exported_training",
        "terminal", "runtime_compile", "capture_models", "compiled_plan", "communication", "checkpoint_ranks",
        "autograd_memory", "benchmark_host_time", "unlike_ranks", "random_operators", "solvers",
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
