"""The order of tests: what takes long comes first, so that no process of pytest is left alone with it at the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest

#: Files that take from some minutes to ten seconds of a busy machine, the slowest first.
SLOWEST = tuple(
    f"test_{name}"
    for name in (
        "hugging_face", "torch_tools", "examples", "docs", "generation", "experts", "step_exhaustive", "elastic",
        "step_feasibility", "compiled_blocks", "step_parity", "coverage_sample", "plan_order", "activation_cache",
        "benchmark_gpu", "profile", "value_guards", "offload_training", "expert_parallel", "sweeps",
        "rows_masks_of_inputs_pick", "lightning", "compiled_kernels", "launch", "verify", "search", "rules",
        "weight_files_ranks", "step_api", "library", "step_price", "dropout_plans", "gradients", "capture_shorten",
        "uneven", "cli", "offload_planning", "joined_calls", "runtime_parity", "step_baselines", "trainer",
        "stale_programs", "checkpoint", "step_stages", "adoption", "islands_freezing", "checkpoint_steps",
        "graph_cache", "replan", "units", "stock_optimizer", "random_operators", "hybrid_sharding", "communication",
        "compiled_plan", "fuse_families", "step_runtime_accounts", "islands", "pipeline", "capture_models",
        "search_models", "stages", "search_brute_force", "published_runs", "step_degenerate", "runtime",
        "checkpoint_ranks", "measured_trace", "unlike_ranks", "exports", "kernels_rotary", "unequal_devices",
        "step_chunked_loss", "expert_regions", "fuse_plan", "runtime_compile", "step_lighter", "chain_kernels", "audit",
        "import_leaves_others_alone", "written_weights", "independent_samples", "inspection", "row_shards",
        "kernels_normalization",
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
