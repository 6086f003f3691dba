"""One rank of the tests of generation; rank 0 answers with what differs from Hugging Face on one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import planner
from planner.verification.verify_model import slow_devices
from tests.generation_cases import PROMPT, ROWS, WAYS, generated, model_named, training_batch
from tests.ranks import answer, task
from tests.tracing import traced_once

NEW_TOKENS = 6


def compare(name: str, mesh: str, ways: list[str], dtype: str = "float32") -> dict[str, Any]:
    """By way of generating: whether the tokens are the same. ``!padded`` behind it: from a padded prompt; ``!base``:
    with its adapters off.

    ``bytes`` are those of each rank's cache in the last of the ways, ``planned`` what was said of it before.
    """
    precision = getattr(torch, dtype)
    parallel = planner.compile(
        model_named(name, precision), mesh, example_inputs=training_batch(name, precision),
        cluster=slow_devices(dist.get_world_size()),
    )  # fmt: skip
    rows = ROWS * WAYS[ways[-1].partition("!")[0]].get("num_beams", 1)
    length = {"length": NEW_TOKENS + (1 if parallel.config.is_encoder_decoder else PROMPT)}
    source = {"source_length": PROMPT} if name.startswith(("t5", "bart")) else {}
    results: dict[str, Any] = {"planned": _of_all_ranks(parallel.cache_bytes(batch=rows, **length, **source))}
    for way in ways:
        kind, *marks = way.split("!")
        options = {"padded": "padded" in marks, "new_tokens": NEW_TOKENS, "dtype": precision}
        tokens = without_adapters if "base" in marks else generated
        torch.manual_seed(1000 * dist.get_rank())  # the first rank's draws count
        answers = _of_all_ranks(tokens(parallel, name, kind, **options))
        expected = tokens(model_named(name, precision), name, kind, **options) if dist.get_rank() == 0 else None
        results[way] = "equal" if answers == [expected] * len(answers) else f"{answers} instead of {expected}"
    results["bytes"] = _of_all_ranks(parallel.cache_bytes())
    return results


def without_adapters(model: Any, *args: Any, **options: Any) -> Any:
    with model.disable_adapter():
        return generated(model, *args, **options)


def _of_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    with traced_once():
        answer({f"{name} {mesh}": compare(name, mesh, ways, *dtype) for name, mesh, ways, *dtype in task()})
