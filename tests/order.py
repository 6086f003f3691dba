"""The order of tests: what takes long comes first, so that no process of pytest is left alone with it at the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest

#: Files that take from a minute to ten seconds, the slowest first.
SLOWEST = tuple(
    f"test_{name}"
    for name in (
        "capture_shorten", "step_price", "benchmark_gpu", "search_models", "library", "docs", "step_exhaustive",
        "examples", "hugging_face", "published_runs", "graph_cache", "rules", "capture_models", "robustness",
        "coverage_sample", "stages", "launch", "fuse_families", "step_feasibility", "step_parity", "step_baselines",
        "verify", "weight_files_ranks", "search_brute_force", "value_guards", "sweeps", "trainer", "search",
        "stale_programs", "compiled_kernels", "checkpoint", "islands", "cli", "step_api", "fuse_plan", "experts",
        "generation", "kernels_rotary", "terminal", "random_operators", "pipeline", "benchmark_host_time",
        "autograd_memory", "step_runtime_accounts", "chain_kernels", "plan_order", "exports", "compiled_blocks",
        "step_chunked_loss", "step_degenerate", "architecture", "kernels_normalization", "dropout_plans",
        "unlike_ranks", "inspection", "audit", "kernels_cross_entropy", "causal_masks", "gradients", "expert_parallel",
        "checkpoint_ranks", "torch_tools", "expert_bounds", "exported_training", "runtime_parity", "adoption", "units",
        "replan", "bags_and_losses", "runtime", "import_leaves_others_alone", "emit", "search_folding", "uneven",
        "operator_reasons", "emitted_models", "extension", "runtime_compile",
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
