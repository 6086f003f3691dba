"""Fuse a captured graph for planning, and report the result."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from passes.fuse import Fused, fuse
from passes.ir.graph import Graph
from passes.plan.plan_data import FusionPlan, PatternPlan
from passes.repeats.repeated_blocks import find_blocks


def fused_for_planning(graph: Graph) -> tuple[Graph, FusionPlan]:
    """``graph`` with fused operators, and the report that goes into its plan."""
    # Registers the operators; without torch at import, as all of planning.
    import runtime.kernels  # noqa: F401

    fused = fuse(graph)
    return fused.graph, report(graph, fused)


def report(graph: Graph, fused: Fused) -> FusionPlan:
    """The matches, near misses and saved bytes of fusing ``graph``."""
    return FusionPlan(
        matches=_grouped((match.pattern, "", match.module_path) for match in fused.matches),
        near_misses=_grouped((miss.pattern, miss.reason, miss.module_path) for miss in fused.near_misses),
        operators=(_operators(graph), _operators(fused.graph)),
        saved_bytes=(saved_bytes(graph), saved_bytes(fused.graph)),
        tolerance=fused.tolerance,
        registered=fused.registered,
    )


def saved_bytes(graph: Graph) -> int:
    """Bytes of activations that autograd saves for the backward pass of the whole model on one device.

    Of a repeated block, only the first and the last copy are examined, and one in between that stands for the others.
    """
    from passes.autograd import activations, kept_by_autograd, storage_roots
    from planner.sharding_ilp.liveness import live_nodes

    times = _times_counted(graph)
    saved = kept_by_autograd(graph, live_nodes(graph), times)
    roots = storage_roots(graph, times)
    held = {roots[name] for entry in saved.values() for name in entry.values} & activations(graph)
    makers = {value.name: node.name for node in graph.nodes for value in node.outputs}
    values = graph.values
    return sum(times.get(makers[name], 0) * values[name].num_bytes for name in held) + sum(
        times[node] * extra.num_bytes for node, entry in saved.items() for extra in entry.extras
    )


def _times_counted(graph: Graph) -> dict[str, int]:
    """Node → for how many it stands. The second copy of a run stands for all between the ends, and what keeps its
    outputs, the third, is there to be looked at and counts for nothing; the others are left out."""
    times = {node.name: 1 for node in graph.nodes}
    for run in find_blocks(graph):
        if run.num_copies < 5:
            continue
        _, second, third, *others, _ = run.copies
        times.update(dict.fromkeys(second, run.num_copies - 2))
        times.update(dict.fromkeys(third, 0))
        for name in (name for copy in others for name in copy):
            del times[name]
    return times


def _operators(graph: Graph) -> int:
    return sum(not node.constant for node in graph.nodes)


def _grouped(entries: Iterable[tuple[str, str, str]]) -> tuple[PatternPlan, ...]:
    """One entry for each pattern and reason, its modules folded."""
    modules: dict[tuple[str, str], list[str]] = {}
    for pattern, reason, path in entries:
        modules.setdefault((pattern, re.sub(r"\b\w*\d\w*\b inside", "a value inside", reason)), []).append(path)
    return tuple(
        PatternPlan(pattern, len(paths), fold_paths(paths), reason) for (pattern, reason), paths in modules.items()
    )


def fold_paths(paths: Sequence[str]) -> tuple[str, ...]:
    """Module paths that differ in numbers alone as one, ``model.layers.{0..31}.mlp``; "" is written "the model"."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for path in paths:
        numbers = tuple(int(part) for part in path.split(".") if part.isdigit())
        pattern = ".".join("{}" if part.isdigit() else part for part in path.split("."))
        groups.setdefault(pattern or "the model", []).append(numbers)
    return tuple(
        pattern.format(*(_range(column) for column in zip(*dict.fromkeys(numbers))))
        for pattern, numbers in groups.items()
    )


def _range(numbers: Sequence[int]) -> str:
    """``{0..31}``; ``{0,2,4}`` where numbers are left out; one number as itself."""
    distinct = sorted(set(numbers))
    if len(distinct) == 1:
        return str(distinct[0])
    if distinct == list(range(distinct[0], distinct[-1] + 1)):
        return f"{{{distinct[0]}..{distinct[-1]}}}"
    return "{" + ",".join(map(str, distinct)) + "}"
