"""Whether outputs of frozen layers may be kept: a sample's must be the same whenever and with whom it is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from passes.ir.graph import Graph
from passes.ir.types import shard
from passes.rules import rule_for
from planner.sharding_ilp.model_figures import batch_size_of
from planner.whole_step.costs.batch_propagation import follow_batch
from runtime.calls.model_call import Path


@dataclass(frozen=True)
class CachedPrefix:
    """Frozen layers whose output is kept.

    Attributes:
        paths: of the inputs that they read; ``by_row``: those of them with a row a sample.
        states: names of the parameters and buffers that they read.
        shape, dtype: of their output for the global batch that was planned for.
        constants: tensors that they read beside these, which a script may write to.
    """

    paths: tuple[Path, ...]
    by_row: tuple[Path, ...]
    states: frozenset[str]
    shape: tuple[int, ...]
    dtype: str
    constants: tuple[Any, ...] = field(default=(), compare=False, repr=False)


def checked_prefix(graph: Graph, after: str, trains: Mapping[str, bool]) -> CachedPrefix:
    """What ``graph``, which computes the output of module ``after``, says of it.

    Args:
        trains: whether a parameter trains, by each of its names.

    Raises:
        ValueError: for layers that train, draw random numbers, write buffers or mix samples.
    """
    names = frozenset(name for state in graph.states for name in (state.path, *state.aliases))
    trained = sorted(name for name in names if trains.get(name, False))
    if trained:
        raise ValueError(
            f"the output of {after!r} depends on {trained[0]!r}, which trains: freeze it (requires_grad = False), or "
            "cache behind an earlier module"
        )
    for node in graph.nodes:
        path = node.module_path
        if node.draw is not None:
            raise ValueError(
                f"{path!r}, on which the output of {after!r} depends, draws random numbers: put frozen layers into "
                f"evaluation mode, parallel.get_submodule({path!r}).eval(), again after each parallel.train()"
            )
        if node.writes_buffer:
            raise ValueError(
                f"{path!r}, on which the output of {after!r} depends, writes a buffer (statistics of a batch): put it "
                f"into evaluation mode, parallel.get_submodule({path!r}).eval(), again after each parallel.train()"
            )
    size, values = batch_size_of(graph), graph.values
    followed = follow_batch(graph, rules=rule_for)
    (name,) = graph.outputs.values()
    mixed = followed.mixing or followed.counted_ahead
    if size > 1 and (mixed or followed.types[name] != shard(0)):
        where = next((node.module_path for node in graph.nodes if node.name in followed.mixers), after)
        raise ValueError(
            f"the output of {after!r} for a sample depends on the others of its batch (see {where!r}), or has no row a "
            "sample: it cannot be kept for each by itself"
        )
    by_row = [
        path for path, value in zip(graph.input_paths, graph.inputs) if value.shape[:1] == (size,) and value.shape
    ]
    output = values[name]
    read_in_python = [step.args[0].tensor for step in graph.guards.steps if step.op == "held"]
    constants = (*(state.data for state in graph.states if state.data is not None), *read_in_python)
    return CachedPrefix(tuple(graph.input_paths), tuple(by_row), names, tuple(output.shape), output.dtype, constants)
