"""Tell one model from another by its parameters: paths, shapes, dtypes and tying."""

from __future__ import annotations

import hashlib
import json

from passes.ir.graph import Graph


def fingerprint(graph: Graph) -> str:
    """A short hash of the model's parameters, the same whatever the batch, the loss or the order of capture."""
    parameters = sorted(
        [state.path, list(state.value.shape), state.value.dtype, sorted(state.aliases)] for state in graph.parameters
    )
    text = json.dumps([graph.model_name, parameters])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
