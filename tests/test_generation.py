"""``parallel.generate`` on several ranks gives Hugging Face's tokens, from a cache that is cut."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from peft import AdaptionPromptConfig, LoraConfig, PeftConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
)

import planner
from passes.capture import capture
from passes.ir.types import MeshShape
from passes.torch_compat.operators import TorchDispatchMode
from planner.serving_plan import fastest, plan_serving
from planner.sharding_ilp.constraints import dividing
from runtime.generation import generation_session, phase_programs
from runtime.generation.hugging_face_loop import check_generates
from tests.generation_cases import generated, model_named, prompt_of, training_batch
from tests.ranks import run_on_ranks
from tests.versions import transformers_version

pytestmark = pytest.mark.usefixtures("models_traced_once")

#: Model, mesh, ways to generate (``!padded``: from prompts of two lengths; ``!base``: adapters off).
CASES: list[tuple[str, str, list[str]]] = [
    ("gpt2", "tp=2", ["beams!padded"]),
    ("llama", "pp=2", ["sampled_beams"]),
    ("mixtral", "tp=2", ["beams!padded"]),
    ("llama-lora", "tp=2", ["beams!padded!base", "beams!padded"]),
]
INPUTS = ("input_ids", "labels")
#: Bytes of float32 in 2 layers × (keys, values) × 8 rows (4 beams) × 4 heads × 32 slots × 8 numbers.
WHOLE_CACHE = 2 * 2 * 8 * 4 * 32 * 8 * 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_the_tokens_are_hugging_faces(case: tuple[str, str, list[str]]) -> None:
    name, mesh, ways = case
    results: dict[str, Any] = run_on_ranks("generation_worker", 2, CASES)[f"{name} {mesh}"]
    assert {way: results.get(way, results) for way in ways} == dict.fromkeys(ways, "equal")
    assert results["bytes"] == results["planned"]
    assert results["bytes"] == [WHOLE_CACHE // 2] * 2  # heads, or layers


def test_on_one_device_two_programs_serve_prompts_of_several_lengths() -> None:
    parallel = planner.compile(model_named("gpt2"), "dp=1", example_inputs=training_batch("gpt2"))
    model = model_named("gpt2")
    for length in (3, 5):
        tokens = prompt_of("gpt2")["input_ids"][:, :length]
        options = {"max_new_tokens": 16 - length, "do_sample": False, "pad_token_id": 1}
        with torch.inference_mode():
            assert parallel.generate(tokens, **options).tolist() == model.generate(tokens, **options).tolist()
    for same in ({"cache_implementation": "static"}, {"cache_implementation": "dynamic", "prefill_chunk_size": 3}):
        assert parallel.generate(tokens, **same, **options).tolist() == model.generate(tokens, **options).tolist()
    with pytest.raises(ValueError, match=r"'quantized' rounds what it keeps.* generate\(gathered=True\)"):
        parallel.generate(tokens, cache_implementation="quantized", **options)
    with pytest.raises(ValueError, match=r"^assistant_model .* generate\(gathered=True\)"):
        parallel.generate(tokens[:1], assistant_model=model, **options)
    with pytest.raises(ValueError, match=r"output_attentions and .* generate\(gathered=True\)"):
        parallel.generate(tokens, output_attentions=True, return_dict_in_generate=True, **options)
    assert generated(parallel, "gpt2", "greedy", gathered=True) == generated(model, "gpt2", "greedy")


def llava() -> tuple[Any, dict[str, torch.Tensor]]:
    """And two prompts of two pictures each."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = LlamaConfig(vocab_size=32, **sizes, bos_token_id=0, eos_token_id=31, pad_token_id=1)
    vision = CLIPVisionConfig(image_size=8, patch_size=4, **sizes)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_id=30, pad_token_id=1)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    tokens = torch.tensor([[30] * 4 + [3] + [30] * 4 + [5], [30] * 4 + [7] + [30] * 4 + [2]])
    pictures = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": torch.randn(4, 3, 8, 8)}
    return model, pictures


def test_images_are_encoded_by_the_program_of_the_prompt() -> None:
    """``generate`` would encode them itself first, with a model that has no weights. Each beam has both of a sample."""
    model, pictures = llava()
    tokens = pictures["input_ids"]
    parallel = planner.compile(model, "dp=1", example_inputs={**pictures, "labels": tokens})
    # transformers 5.17 repeats each picture for the beams, so that a beam has one of its sample's twice.
    beams = 2 if transformers_version() >= (5, 23) else 1
    options = {"max_new_tokens": 4, "num_beams": beams, "do_sample": False}
    with torch.inference_mode():
        assert parallel.generate(**pictures, **options).tolist() == model.generate(**pictures, **options).tolist()
    tokens[0, :4], pictures["pixel_values"] = 9, pictures["pixel_values"][1:]
    with pytest.raises(ValueError, match="whose images are not as many and as large in each"):
        parallel.generate(**pictures, **{**options, "num_beams": 2})


def test_rows_that_ranks_do_not_divide_are_filled_up_with_the_pictures_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, pictures = llava()
    parallel = planner.compile(model, "dp=1", example_inputs={**pictures, "labels": pictures["input_ids"]})
    for module in (phase_programs, generation_session):
        monkeypatch.setattr(module, "rows_divisor", lambda plan: 3)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert parallel.generate(**pictures, **options).tolist() == model.generate(**pictures, **options).tolist()


def test_whisper_hears_which_language_it_is() -> None:
    """``generate`` without a language calls the model once before, without a cache; so it does with another sound."""
    model: Any = model_named("whisper")
    languages = {"is_multilingual": True, "lang_to_id": {"<|en|>": 9, "<|de|>": 10}, "no_timestamps_token_id": 13}
    tasks = {"task_to_id": {"transcribe": 11, "translate": 12}, "max_initial_timestamp_index": 10}
    vars(model.generation_config).update(**languages, **tasks)
    parallel = planner.compile(model, "dp=1", example_inputs=training_batch("whisper"))
    sounds = [prompt_of("whisper")["input_features"], prompt_of("whisper")["input_features"].flip(2)]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "return_dict_in_generate": True}
    for sound in sounds:
        expected = model.generate(sound, **options).sequences
        assert {int(row[1]) for row in expected} <= {9, 10}
        assert parallel.generate(sound, **options).sequences.tolist() == expected.tolist()


class Turned(GPT2LMHeadModel):
    """Looks at its last token: behind one above 50 it takes the logits in the other order."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        if kwargs["input_ids"][0, -1] > 50:
            outputs.logits = outputs.logits.flip(-1)
        return outputs


def test_a_prompt_of_other_values_has_the_program_of_those() -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": 96}
    model = Turned(GPT2Config(**sizes, bos_token_id=0, eos_token_id=95)).eval()
    parallel = planner.compile(model, "dp=1", example_inputs={key: torch.ones(2, 5).long() for key in INPUTS})
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 1}
    for last in (60, 40, 70):
        tokens = torch.tensor([[4, 5, last], [6, 7, last + 1]])
        assert parallel.generate(tokens, **options).tolist() == model.generate(tokens, **options).tolist()


def test_what_an_encoder_gave_begins_a_generation() -> None:
    """Not what the generation before had read."""
    model: Any = model_named("t5")
    parallel = planner.compile(model, "dp=1", example_inputs=training_batch("t5"))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 2}
    first = prompt_of("t5")["input_ids"]
    second = first.flip(0) - 1
    before = parallel.generate(first, **options).tolist()
    encoded = [model.get_encoder()(second) for _ in range(2)]  # of which generate makes rows for beams
    expected = model.generate(encoder_outputs=encoded[0], **options).tolist()
    assert parallel.generate(encoder_outputs=encoded[1], **options).tolist() == expected
    assert expected != before
    with pytest.raises(ValueError, match="'encoder' of a parallel module cannot be called by itself"):
        parallel.get_encoder()(second)
    with pytest.raises(ValueError, match="encoder_outputs have no values"):
        parallel.generate(encoder_outputs=parallel.original.get_encoder()(second), **options)


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
    with pytest.raises(ValueError, match="another state than keys and values"):
        check_generates(model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "PROMPT_TUNING brings tokens of its own"),
        (AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"), "ADAPTION_PROMPT brings tokens"),
        (LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5]), "alora_invocation_tokens switch LORA on"),
    ],
)
def test_adapters_that_change_more_than_modules_are_refused(config: PeftConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_generates(get_peft_model(model_named("llama"), config))


def test_adapters_by_row_are_refused() -> None:
    parallel = planner.compile(model_named("llama-lora"), "dp=1", example_inputs=training_batch("llama"))
    with pytest.raises(ValueError, match="adapter_names gives rows adapters of their own"):
        parallel.generate(**prompt_of("llama"), adapter_names=["default", "__base__"])


def test_a_model_that_takes_free_slots_for_tokens_is_refused() -> None:
    """Local attention of GPT-Neo counts back from the end of the cache: tokens would be wrong, without an error."""
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "max_position_embeddings": 32}
    torch.manual_seed(0)
    model = GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["local"], 1]], window_size=2))
    tokens = torch.tensor([[3, 1, 4, 1]])
    parallel = planner.compile(model, "dp=1", example_inputs={"input_ids": tokens, "labels": tokens})
    with pytest.raises(ValueError, match="other logits for a token over a cache with free slots"):
        parallel.generate(tokens, max_new_tokens=3, pad_token_id=0)


def test_answers_beyond_the_positions_of_a_model_are_not_priced() -> None:
    """GPT-2 has learned positions; the last token of an answer is not read."""
    with pytest.raises(ValueError, match=r"prompt_len \+ new_tokens - 1 = 129 is more than the 128 positions"):
        plan_serving("tiny-gpt2", "dgx-h100:1x1", prompt_len=100, new_tokens=30, batch=1)


def test_serving_is_priced_above_its_bound() -> None:
    planned = plan_serving("tiny-llama", "dgx-h100:1", prompt_len=1, new_tokens=8, batch=4, mesh="dp=2,tp=4")
    assert planned.first_token_bound < planned.first_token_seconds and planned.token_bound < planned.token_seconds
    assert planned.tokens_per_second == 4 * 8 / planned.seconds
    # 4 layers × (keys, values) × 4 samples × 4 heads × 9 slots × 8 numbers of bfloat16, an eighth on each device.
    assert planned.cache_bytes == 4 * 2 * 4 * 4 * 9 * 8 * 2 // 8
    cut = dataclasses.replace(planned, weight_bytes=planned.weight_bytes // 2)
    assert fastest([planned, cut]) is cut  # as fast, and smaller


def test_a_demand_on_all_inputs_leaves_out_those_that_it_cannot_cut() -> None:
    """As a trainer pins all samples to ranks, and the program of a token has a position beside them."""

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            return x * position

    graph = capture(Scaled(), kwargs={"x": torch.randn(4, 3), "position": torch.tensor(2.0)})
    demand = {"input:*": {"dp": "S(0)"}}
    assert dividing(graph, demand, MeshShape(("dp",), (2,))) == {"input:x": {"dp": "S(0)"}}
    assert dividing(graph, demand, MeshShape(("dp",), (3,))) == {}
