"""How many Python functions a training step calls: what host time is made of, and the same on every machine."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch

import planner
from planner.library import build_model, load_config, random_batch


def python_calls(function: Callable[[], Any]) -> int:
    """Python functions that are called in ``function()`` after three calls of it."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    for _ in range(3):
        function()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_step_of_tiny_llama_calls_about_as_much_python_as_the_model_itself() -> None:
    config = load_config("tiny-llama")
    torch.manual_seed(0)
    model = build_model(config, device="cpu")
    batch = random_batch(config, batch_size=2, seq_len=4)
    parallel = planner.compile(copy.deepcopy(model), "dp=1", example_inputs=batch)

    def own() -> None:
        model.zero_grad()
        model(**batch).loss.backward()

    def planned() -> None:
        parallel.zero_grad()
        parallel.train_step(**batch)

    assert python_calls(planned) <= 1.9 * python_calls(own)
