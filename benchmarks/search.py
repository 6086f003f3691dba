"""How long the sharding search takes, and how large its problems are.

    python -m benchmarks.search                      # depth, mesh and memory on Llama-3-8B, and a tiny model
    python -m benchmarks.search tiny-llama --mesh dp=2,cp=2,tp=2 --cluster cpu-local:8 --batch-size 8 --seq-len 32

One line per problem: seconds of capture, search (build and solve) and re-pricing, variables and constraints of the
ILP, gap, and how far the re-priced plan is from the objective. Peak memory is that of the whole process so far.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from cost_models import Cluster, CostModel
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from planner.auditing.graph_walk import price
from planner.library import load_config
from planner.planning import capture_for_planning
from planner.sharding_ilp import search

Result = TypeVar("Result")


@dataclass(frozen=True)
class Problem:
    """A model on a mesh; ``layers`` overrides its depth, ``memory`` bounds bytes per device, in GiB."""

    model: str
    cluster: str
    mesh: str
    batch_size: int
    seq_len: int
    layers: int | None = None
    memory: float | None = None
    baseline: str | None = None


DEFAULT = (
    Problem("tiny-llama", "cpu-local:4", "dp=2,tp=2", 8, 32),
    Problem("tiny-llama", "cpu-local:8", "dp=2,cp=2,tp=2", 8, 32),
    Problem("llama-3-8b", "dgx-h100:1", "tp=8", 8, 4096),
    Problem("llama-3-8b", "dgx-h100:32", "dp=32,tp=8", 64, 4096, layers=8),
    Problem("llama-3-8b", "dgx-h100:32", "dp=32,tp=8", 64, 4096),
    Problem("llama-3-8b", "dgx-h100:32", "dp=32,tp=8", 64, 4096, layers=80),
    Problem("llama-3-8b", "dgx-h100:32", "dp=32,tp=8", 64, 4096, memory=28.0),
    Problem("llama-3-8b", "dgx-h100:32", "dp=32,tp=8", 64, 4096, memory=16.0),
)


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def capture_problem(problem: Problem) -> Graph:
    config: Any = load_config(problem.model)
    if problem.layers is not None:
        config.num_hidden_layers = problem.layers
    return capture_for_planning(config, batch_size=problem.batch_size, seq_len=problem.seq_len)


def measure(problem: Problem, *, time_limit: float) -> str:
    """One line of figures."""
    graph, capture_seconds = timed(lambda: capture_problem(problem))
    mesh = MeshShape.parse(problem.mesh)
    cost_model = CostModel(Cluster.parse(problem.cluster), mesh.as_dict())
    limit = None if problem.memory is None else problem.memory * 2**30
    options: dict[str, Any] = {"memory_limit": limit, "baseline": problem.baseline, "time_limit": time_limit}
    plan, search_seconds = timed(lambda: search(graph, mesh=mesh, cost_model=cost_model, cluster_info={}, **options))
    (costs, _), price_seconds = timed(lambda: price(graph, plan, cost_model))
    certificate = plan.certificate
    name = problem.model + (f" x{problem.layers}" if problem.layers else "")
    name += f" {problem.baseline}" if problem.baseline else ""
    bound = f" in {problem.memory:g} GiB" if problem.memory else ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"{name + ' ' + problem.mesh + bound:42}{len(graph.nodes):6} nodes  capture {capture_seconds:6.2f} s  "
        f"search {search_seconds:6.2f} s  price {price_seconds:5.2f} s  {certificate.num_variables:7,} variables  "
        f"{certificate.num_constraints:6,} constraints  step {certificate.objective * 1e3:9.3f} ms  "
        f"gap {certificate.gap:7.1e}  re-priced {costs.total / certificate.objective - 1:+.0e}  "
        f"memory {sum(plan.costs.memory.values()) / 2**30:6.2f} GiB  peak {peak:.2f} GB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a config name; without it the standard set is measured")
    parser.add_argument("--cluster", default="cpu-local:4")
    parser.add_argument("--mesh", default="dp=2,tp=2")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--memory", type=float, help="GiB on each device")
    parser.add_argument("--baseline")
    parser.add_argument("--time-limit", type=float, default=120.0)
    args = parser.parse_args()
    problems: tuple[Problem, ...] = DEFAULT
    if args.model:
        problems = (
            Problem(
                args.model,
                args.cluster,
                args.mesh,
                args.batch_size,
                args.seq_len,
                args.layers,
                args.memory,
                args.baseline,
            ),
        )
    for problem in problems:
        print(measure(problem, time_limit=args.time_limit), flush=True)


if __name__ == "__main__":
    main()
