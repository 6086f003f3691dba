"""One rank of the tests of generation; rank 0 answers with what differs from Hugging Face on one process."""

from __future__ import annotations

from typing import Any

import torch

import planner
from tests.generation_cases import ROWS, generated, model_named, training_batch
from tests.ranks import answer, task
from tests.tracing import traced_once


def compare(name: str, mesh: str, ways: list[str]) -> dict[str, Any]:
    """By way of generating (``!padded`` behind it: from a padded prompt): whether the tokens are the same."""
    parallel = planner.compile(model_named(name), mesh, example_inputs=training_batch(name))
    results: dict[str, Any] = {}
    for way in ways:
        kind, _, padded = way.partition("!")
        torch.manual_seed(1000 * int(torch.distributed.get_rank()))  # the first rank's draws count
        actual = generated(parallel, name, kind, padded=bool(padded))
        expected = generated(model_named(name), name, kind, padded=bool(padded))
        results[way] = "equal" if actual == expected else f"{actual} instead of {expected}"
    sizes = [parallel.cache_bytes()]
    if name not in ("whisper", "t5", "bart"):
        rows = ROWS * (4 if ways[-1].startswith("beams") else 1)
        sizes.append(parallel.cache_bytes(batch=rows, length=11))
    results["bytes"] = sizes
    return results


if __name__ == "__main__":
    with traced_once():
        answer({f"{name} {mesh}": compare(name, mesh, ways) for name, mesh, ways in task()})
