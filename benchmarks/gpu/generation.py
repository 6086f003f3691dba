"""Items about generation: a planned model's tokens against those of transformers on one device, and their time."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch

import planner
from benchmarks.gpu.parts import MODELS, Setting
from benchmarks.gpu.steps import _model
from planner.library import load_config, random_batch
from planner.verification.verify_model import real_module

Row = dict[str, Any]
#: Samples, tokens of a prompt, and tokens that are generated behind it.
ROWS, PROMPT, NEW_TOKENS = 8, 512, 64
#: Ways to generate the same tokens every time.
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "beams": {"num_beams": 4}}


def tokens(setting: Setting, *, mesh: str) -> Iterator[Row]:
    """Whether a tiny Llama on a mesh generates what transformers' own does, in float32."""
    process = planner.init(device=setting.device)
    config = load_config("tiny-llama")
    alone = real_module(config, dtype=torch.float32, seed=0).to(process.device).eval()
    batch = _on(random_batch(config, batch_size=2, seq_len=6), process.device)
    parallel = planner.compile(copy.deepcopy(alone), mesh, example_inputs=batch)
    for name, options in WAYS.items():
        fixed = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **options}
        actual, expected = (one.generate(batch["input_ids"], **fixed).tolist() for one in (parallel, alone))
        yield {"mesh": mesh, "way": name, "the same tokens": actual == expected, "ok": actual == expected}


def seconds(setting: Setting) -> Iterator[Row]:
    """Milliseconds for a token of a few layers of Llama 3 8B, ours and transformers' own."""
    process = planner.init(device=setting.device)
    module, config = _model(MODELS["Llama"], setting)
    module.eval()
    batch = _on(random_batch(config, batch_size=ROWS, seq_len=PROMPT), process.device)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    contestants = {"Meshwright": planner.compile(copy.deepcopy(module), "dp=1", example_inputs=batch),
                   "Hugging Face": module}  # fmt: skip
    for name, contestant in contestants.items():
        times = []
        for _ in range(2):  # the first run makes programs and caches
            torch.cuda.synchronize()
            start = time.perf_counter()
            contestant.generate(batch["input_ids"], **options)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        first, again = times
        yield {"contestant": name, "ms a token": round(again / NEW_TOKENS * 1e3, 2), "first run, s": round(first, 1)}


def _on(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}
