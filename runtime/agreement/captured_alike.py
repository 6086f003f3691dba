"""Graphs that every rank captured alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from passes.ir.graph import Graph, State
from runtime.agreement.ranks_together import Ranks


def captured_alike(ranks: Ranks, capture: Callable[[], Graph]) -> Graph:
    """What ``capture`` returns on this rank.

    Raises:
        ValueError: on every rank, if it raised on one of them, or they captured different programs.
    """
    graph = ranks.together(capture)
    if not ranks.is_alone:
        ranks.check_alike({f"what the {graph.model_name} (or loss_fn) computes": _text(graph)})
    return graph


def _text(graph: Graph) -> str:
    lines = [
        *(f"input {path}: {value}" for path, value in zip(graph.input_paths, graph.inputs)),
        *(_state_text(state) for state in graph.states),
        *map(repr, graph.nodes),
        *(f"read in {reading.place}: {reading.expected}" for reading in graph.guards.readings),
        f"outputs {dict(graph.outputs)}, loss {graph.loss!r}, training {graph.training}",
    ]
    return "\n".join(lines)


def _state_text(state: State) -> str:
    if not isinstance(state.data, torch.Tensor) or state.data.is_meta:
        return repr(state)
    content = state.data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{state} of values {hashlib.sha256(content).hexdigest()[:12]}"
