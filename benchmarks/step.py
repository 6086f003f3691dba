"""Whether the planner's training steps are at least as fast as experts' ones, by the simulator.

    python -m benchmarks.step                                    # all pairs: takes minutes
    python -m benchmarks.step --only llama-3.1-8b --markdown benchmarks/results/step_baselines.md
    python -m benchmarks.step tiny-llama cpu-local:8 --global-batch 8 --seq-len 32

One line for each pair of model and cluster: simulated seconds of the chosen plan and of every baseline of
``planner.whole_step.candidates.expert_layouts`` at its best, the ratio to the best of them, and what the planner does
differently.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cost_models import Cluster
from passes.plan import Plan
from passes.plan.step_plan import StepPlan
from planner.library import load_config
from planner.planning import capture_for_planning
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.candidates.expert_layouts import BASELINES, BaselineSpace, Missing, Priced, best_of_baseline
from planner.whole_step.plan_step import plan_step

#: Ratios this near 1 count as equal.
EQUAL = 1e-6


@dataclass(frozen=True)
class Pair:
    """A model on a cluster; ``global_batch`` samples of ``seq_len`` tokens (images: not used)."""

    model: str
    cluster: str
    global_batch: int
    seq_len: int | None = None


PAIRS = (
    Pair("bert-large", "8x1080ti", 64, 512),
    Pair("gpt2-xl", "8x-rtx3090", 64, 1024),
    Pair("llama-3.1-8b", "dgx-h100:1", 32, 8192),
    Pair("llama-3.1-8b", "dgx-h100:8", 128, 8192),
    Pair("opt-13b", "dgx-v100-32g:4", 64, 1024),
    Pair("llama-2-13b", "aws-p4d:4", 128, 4096),
    Pair("qwen2.5-32b", "dgx-a100-80g:8", 128, 4096),
    Pair("t5-xxl", "dgx-a100-40g:8", 256, 512),
    Pair("vit-gigantic", "dgx-a100-40g:8", 1024),
    Pair("gpt3-175b", "dgx-a100-80g:16", 256, 2048),
    Pair("bloom-176b", "dgx-a100-80g:48", 1536, 2048),
    Pair("llama-3.1-70b", "dgx-h100:64", 512, 8192),
    Pair("gpt3-175b", "dgx-a100-80g:128", 1536, 2048),
    Pair("llama-3.1-405b", "dgx-h100:256", 1024, 8192),
)


@dataclass(frozen=True)
class Row:
    """One pair: the plan, the baselines by name, and seconds that the planner and the baselines took."""

    pair: Pair
    num_devices: int
    plan: Plan
    baselines: dict[str, Priced | Missing]
    planning_seconds: float
    baseline_seconds: float

    @property
    def step(self) -> StepPlan:
        assert self.plan.step is not None
        return self.plan.step

    @property
    def best(self) -> Priced | None:
        """The fastest baseline by the simulator, None if none of them can run."""
        priced = [each for each in self.baselines.values() if isinstance(each, Priced)]
        return min(priced, key=lambda each: each.simulated, default=None)

    @property
    def ratio(self) -> float:
        """Simulated seconds of the plan over those of the best baseline."""
        return self.step.costs.simulated / self.best.simulated if self.best is not None else 0.0


def measure(pair: Pair, *, time_limit: float, names: Iterable[str] = tuple(BASELINES)) -> Row:
    """Plan the pair and price the baselines."""
    config, cluster = load_config(pair.model), Cluster.parse(pair.cluster)
    graph = capture_for_planning(config, batch_size=pair.global_batch, seq_len=pair.seq_len)
    demands = Demands(time_limit=time_limit)
    start = time.perf_counter()
    plan = plan_step(graph, cluster, demands)
    planned = time.perf_counter()
    space = BaselineSpace(graph, config=config)
    baselines = {name: best_of_baseline(name, space, cluster, demands) for name in names}
    done = time.perf_counter()
    return Row(pair, cluster.num_devices, plan, baselines, planned - start, done - planned)


def differences(plan: Plan, other: Plan) -> list[str]:
    """What ``plan`` does otherwise than ``other``, in words: from → to."""
    ours, theirs = plan.step, other.step
    assert ours is not None and theirs is not None
    pairs = (
        ("mesh", _axes(theirs), _axes(ours)),
        ("micro-batches", _batches(theirs), _batches(ours)),
        ("schedule", _schedule(theirs), _schedule(ours)),
        ("recompute", "+".join(theirs.recompute), "+".join(ours.recompute)),
        ("ZeRO", _zero(theirs), _zero(ours)),
        ("units on each rank", _cuts(theirs), _cuts(ours)),
    )
    found = [f"{what} {before} → {after}" for what, before, after in pairs if before != after]
    keys = plan.nodes.keys() & other.nodes.keys()
    changed = sum(plan.nodes[key].strategy != other.nodes[key].strategy for key in keys)
    if changed and ours.axes == theirs.axes:
        found.append(f"{changed} of {len(keys)} operators sharded otherwise")
    return found


def _axes(step: StepPlan) -> str:
    return "×".join(f"{axis}{size}" for axis, size in step.axes.items() if size > 1) or "one device"


def _batches(step: StepPlan) -> str:
    return f"{step.num_microbatches}×{step.local_batch}"


def _schedule(step: StepPlan) -> str:
    return step.schedule + (f"×{step.chunks_per_rank}" if step.chunks_per_rank > 1 else "")


def _zero(step: StepPlan) -> str:
    stages = sorted({group.zero for chunk in step.chunks for group in chunk.groups})
    return "+".join(map(str, stages))


def _cuts(step: StepPlan) -> str:
    """Units by rank; where all is on one rank or the ranks differ between the plans, nothing to compare."""
    held: dict[int, int] = {}
    for chunk in step.chunks:
        held[chunk.rank] = held.get(chunk.rank, 0) + sum(group.count for group in chunk.groups)
    counts = sorted(set(held.values()))
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"


def verdict(row: Row) -> str:
    """The comparison with the best baseline in words."""
    if row.best is None:
        return "no baseline runs"
    found = differences(row.plan, row.best.plan())
    if abs(row.ratio - 1.0) <= EQUAL:
        return f"equals {row.best.name}" + (f" ({'; '.join(found)})" if found else "")
    return f"against {row.best.name}: {'; '.join(found) or 'the same choices, other links'}"


def table(rows: Iterable[Row]) -> Iterator[str]:
    """The rows as a markdown table."""
    heads = ["model", "cluster", "devices", "batch × length", "plan (s)", *BASELINES, "ratio", "what differs"]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        pair = row.pair
        batch = f"{pair.global_batch}" + (f" × {pair.seq_len}" if pair.seq_len else "")
        baselines = [_cell(row.baselines[name]) if name in row.baselines else "" for name in BASELINES]
        cells = [pair.model, pair.cluster, str(row.num_devices), batch, f"{row.step.costs.simulated:.4g}", *baselines]
        yield "| " + " | ".join([*cells, f"{row.ratio:.3f}", verdict(row)]) + " |"


def _cell(found: Priced | Missing) -> str:
    return found.reason if isinstance(found, Missing) else f"{found.simulated:.4g}"


def line(row: Row) -> str:
    """One pair as text."""
    baselines = ", ".join(f"{name} {_cell(found)}" for name, found in row.baselines.items())
    costs, status = row.step.costs, row.plan.certificate.status
    return (
        f"{row.pair.model} on {row.pair.cluster} ({row.num_devices} devices), batch {row.pair.global_batch}\n"
        f"  plan {costs.simulated:.4g} s ({costs.seconds:.4g} by the objective, {status}, "
        f"gap {row.plan.certificate.gap:.2%}; {_axes(row.step)}, {_batches(row.step)}, {_schedule(row.step)})\n"
        f"  baselines: {baselines}\n"
        f"  ratio {row.ratio:.4f} {verdict(row)}\n"
        f"  planned in {row.planning_seconds:.1f} s, baselines in {row.baseline_seconds:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a config name; without it the standard pairs are compared")
    parser.add_argument("cluster", nargs="?", default="cpu-local:8")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--only", default="", help="standard pairs in whose model or cluster this occurs")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each search")
    parser.add_argument("--markdown", type=Path, help="where to write the table")
    given = parser.parse_args()
    pairs = tuple(pair for pair in PAIRS if given.only in f"{pair.model} {pair.cluster}")
    if given.model:
        pairs = (Pair(given.model, given.cluster, given.global_batch, given.seq_len),)
    rows = []
    for pair in pairs:
        rows.append(measure(pair, time_limit=given.time_limit))
        print(line(rows[-1]), flush=True)
    if given.markdown is not None:
        given.markdown.parent.mkdir(parents=True, exist_ok=True)
        given.markdown.write_text("\n".join(table(rows)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
