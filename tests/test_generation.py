"""``parallel.generate`` on several ranks gives Hugging Face's tokens, from a cache that is cut."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

import planner
from passes.torch_compat.operators import TorchDispatchMode
from planner.serving_plan import plan_serving
from tests.generation_cases import generated, model_named, prompt_of, training_batch
from tests.ranks import run_on_ranks

#: Model, mesh, ways to generate (``!padded``: from prompts of two lengths).
CASES: list[tuple[str, str, list[str]]] = [
    ("gpt2", "tp=2", ["beams!padded"]),
    ("t5", "dp=2", ["sampling"]),
    ("llama", "pp=2", ["beams"]),
]
#: Bytes of float32 in 2 layers × (keys, values) × 8 rows (4 beams) × 4 heads × 32 slots × 8 numbers.
WHOLE_CACHE = 2 * 2 * 8 * 4 * 32 * 8 * 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_the_tokens_are_hugging_faces(case: tuple[str, str, list[str]]) -> None:
    name, mesh, ways = case
    results: dict[str, Any] = run_on_ranks("generation_worker", 2, CASES)[f"{name} {mesh}"]
    assert {way: results.get(way, results) for way in ways} == dict.fromkeys(ways, "equal")
    assert results["bytes"] == results["planned"]
    if name != "t5":
        assert results["bytes"] == [WHOLE_CACHE // 2] * 2  # heads, or layers


def test_on_one_device_two_programs_serve_prompts_of_several_lengths() -> None:
    parallel = planner.compile(model_named("gpt2"), "dp=1", example_inputs=training_batch("gpt2"))
    model = model_named("gpt2")
    for length in (5, 3):
        tokens = prompt_of("gpt2")["input_ids"][:, :length]
        options = {"max_new_tokens": 16 - length, "do_sample": False, "pad_token_id": 1}
        assert parallel.generate(tokens, **options).tolist() == model.generate(tokens, **options).tolist()
    with pytest.raises(ValueError, match=r"output_attentions and .* generate\(gathered=True\)"):
        parallel.generate(tokens, output_attentions=True, return_dict_in_generate=True, **options)
    assert generated(parallel, "gpt2", "greedy", gathered=True) == generated(model, "gpt2", "greedy")


def test_a_token_is_written_into_the_cache_where_it_lies() -> None:
    parallel = planner.compile(model_named("gpt2"), "dp=1", example_inputs=training_batch("gpt2"))
    calls: Counter[str] = Counter()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls[str(operator)] += 1
            return operator(*args, **kwargs or {})

    def copies_and_writes(num_tokens: int) -> tuple[int, int]:
        options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
        calls.clear()
        with Counted():
            parallel.generate(prompt_of("gpt2")["input_ids"], **options)
        return calls["aten.index_copy.default"], calls["aten.index_copy_.default"]

    copies_and_writes(2)  # makes the programs
    (copies, writes), (more_copies, more_writes) = copies_and_writes(3), copies_and_writes(6)
    num_tensors = 2 * parallel.config.n_layer  # keys and values
    assert copies == more_copies == num_tensors  # the prompt's
    assert more_writes - writes == 3 * num_tensors


def test_a_model_with_a_recurrent_state_is_refused() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=4))
    tokens = torch.ones(1, 4, dtype=torch.long)
    parallel = planner.compile(model, "dp=1", example_inputs={"input_ids": tokens, "labels": tokens})
    with pytest.raises(ValueError, match="another state than keys and values"):
        parallel.generate(tokens, max_new_tokens=2)


def test_serving_is_priced_above_its_bound() -> None:
    planned = plan_serving("tiny-llama", "dgx-h100:1", prompt_len=16, new_tokens=8, batch=4, mesh="tp=8")
    assert planned.first_token_bound < planned.first_token_seconds and planned.token_bound < planned.token_seconds
    assert planned.tokens_per_second == 4 * 8 / planned.seconds and planned.cache_bytes > 0
