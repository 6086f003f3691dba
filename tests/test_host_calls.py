"""How many Python functions a training step calls: what host time is made of, and the same on every machine."""

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import planner
from benchmarks.host_time_contestants import operators, units
from planner.library import build_model, load_config, random_batch


def python_calls(function: Callable[[], Any], *, warm_up: int = 3) -> int:
    """Python functions that are called in ``function()`` after some calls of it."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    for _ in range(warm_up):
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

    assert python_calls(planned) <= 1.4 * python_calls(own)


def test_a_fused_operator_of_small_tensors_calls_few_functions_each_way() -> None:
    for comparison in operators(torch.device("cpu")):
        ours, backward = comparison.ours, comparison.ours.backward
        assert backward is not None
        results = [ours.forward() for _ in range(10)]
        in_backward = python_calls(partial(backward, results), warm_up=0)
        assert python_calls(ours.forward) <= 50, comparison.name
        assert in_backward / len(results) <= 56, comparison.name


#: Operators that are torch's own, under autograd, on small tensors of a processor.
LEFT_TO_TORCH = ("layer_norm", "add_layer_norm", "bias_gelu", "cross_entropy", "embedding")


def test_what_torch_computes_as_well_on_a_processor_is_left_to_it() -> None:
    for comparison in operators(torch.device("cpu")):
        if comparison.name in LEFT_TO_TORCH:
            numbers = []
            for one in (comparison.ours, comparison.eager):
                assert one.backward is not None
                one.backward([one.forward()])  # what is done once
                results = [one.forward() for _ in range(10)]
                numbers.append(python_calls(partial(one.backward, results), warm_up=0))
            ours, eager = numbers
            assert ours <= eager, comparison.name
            assert python_calls(comparison.ours.forward) <= 25, comparison.name


def test_weights_of_data_ranks_cost_a_few_calls_a_unit_and_not_some_for_each_weight() -> None:
    calls = [python_calls(comparison.ours.forward) for comparison in units()]
    assert all(number < 200 for number in calls), "of seven linears, begin to finish; FSDP2's are 753"
