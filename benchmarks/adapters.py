"""Adapters of PEFT under plans, against one process: losses, gradients, weights, bytes, and the files that are saved.

    python -m benchmarks.adapters [--only DoRA] [--markdown benchmarks/results/adapters.md]

A small Llama with each kind of adapter is trained for three AdamW steps in float64 (a base in bf16 stays so) on two
gloo processes, planned for slow devices so that operators are really cut, and alone. Bytes are one rank's.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM, default_data_collator

import planner
from passes.capture.float64 import keep_float64
from planner.verification.verify_model import slow_devices
from runtime.mesh.communication_counter import CommunicationCounter
from runtime.parameters import local_of
from tests.hugging_face_cases import config, llama, samples
from tests.ranks import free_port
from tests.tracing import traced_once

#: Name → mesh and fixed choices.
MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp=2": ("pp=1,dp=2", {"zero": 0}), "tp=2": ("pp=1,tp=2", {}), "pp=2": ("pp=2", {}),
    "ZeRO 3": ("pp=1,dp=2", {"zero": 3}),
}  # fmt: skip
#: Largest relative differences that are allowed; in bf16 gradients of the model alone are 1.9e-2 off those in float64.
FLOAT64, BFLOAT16 = 1e-9, 4e-2
_PLACES = ["q_proj", "v_proj", "down_proj"]
_CAUSAL = {"task_type": "CAUSAL_LM"}


_PAGE = """# Adapters of PEFT under plans

`python -m benchmarks.adapters --markdown PATH`: three AdamW steps of a small Llama in float64 on two processes and on
one. `difference`: the largest relative one of losses, all gradients and all weights. `adapters`, `optimizer`,
`reduced`: bytes of one rank's adapters, of their optimizer state (two moments), and of gradients reduced over `dp`;
beside them the loss and the number of labels are reduced in forward (16 bytes). `read back`, `merged`: how
far off is what PEFT reads of the save, and logits of the merged model that transformers reads.

| adapter | mesh | difference | adapters | optimizer | reduced | read back | merged |
|---|---|---|---|---|---|---|---|
"""


class Int8Linear(nn.Linear):
    """Weights in int8 with a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight.to(input.dtype) * self.scale)


def base_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(tie_word_embeddings=True)) if "tied" in name else llama()
    if name == "LoRA, base in int8":
        for module in list(model.model.layers.modules()):
            for child_name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, child_name, Int8Linear(child))
    return model.to(torch.bfloat16) if name == "LoRA, base in bf16" else model.double()


def lora(**changes: Any) -> Callable[[nn.Module], PeftModel]:
    options = {"target_modules": _PLACES, "r": 4, "init_lora_weights": False, **_CAUSAL, **changes}
    return lambda base: get_peft_model(base, LoraConfig(**options))


def two_adapters(base: nn.Module) -> PeftModel:
    options: dict[str, Any] = {"r": 4, "init_lora_weights": False, **_CAUSAL}
    model = get_peft_model(base, LoraConfig(target_modules=_PLACES, **options), adapter_name="one")
    model.add_adapter("two", LoraConfig(target_modules=["k_proj", "down_proj"], **options))
    model.set_adapter("two")
    return model


def with_config(made: Any) -> Callable[[nn.Module], PeftModel]:
    return lambda base: get_peft_model(base, copy.deepcopy(made))


ADAPTERS: dict[str, Callable[[nn.Module], PeftModel]] = {
    "LoRA": lora(),
    "LoRA with biases": lora(lora_bias=True),
    "rsLoRA": lora(use_rslora=True),
    "DoRA": lora(use_dora=True),
    "LoRA of embeddings": lora(target_modules=["embed_tokens", "q_proj"]),
    "LoRA, head to save": lora(modules_to_save=["lm_head"]),
    "LoRA, embeddings to save": lora(modules_to_save=["embed_tokens"]),
    "LoRA of tied embeddings": lora(target_modules=[*_PLACES, "embed_tokens"]),
    "LoRA of a tied head": lora(target_modules=[*_PLACES, "lm_head"]),
    "second of two LoRAs": two_adapters,
    "IA³": with_config(
        IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"],
                  init_ia3_weights=False, **_CAUSAL)
    ),
    "prompt tuning": with_config(PromptTuningConfig(num_virtual_tokens=3, **_CAUSAL)),
    "prefix tuning": with_config(PrefixTuningConfig(num_virtual_tokens=3, **_CAUSAL)),
    "LoRA, base in bf16": lora(),
    "LoRA, base in int8": lora(),
}  # fmt: skip


def adapted(name: str) -> PeftModel:
    base = base_of(name)
    torch.manual_seed(1)
    model = ADAPTERS[name](base)
    return model if name == "LoRA, base in bf16" else model.double()


def measure(name: str, mesh: str, folder: Path) -> dict[str, Any]:
    """What one adapter does on one mesh, beside one process."""
    batch = default_data_collator([{key: row[key] for key in ("input_ids", "labels")} for row in samples(8)])
    alone, (axes, fix) = adapted(name), MESHES[mesh]
    # Llama's norms and its loss would round a float64 model to float32.
    exact: Any = nullcontext if name == "LoRA, base in bf16" else keep_float64
    with exact():
        parallel = planner.compile(adapted(name), axes, example_inputs=batch, fix=fix, cluster=slow_devices(2))
    trained = [[one for one in module.parameters() if one.requires_grad] for module in (parallel, alone)]
    # With the usual eps rounding decides in which direction a gradient near zero moves a weight.
    eps = 1e-3 if name == "LoRA, base in bf16" else 1e-8
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2, eps=eps) for parameters in trained]
    apart = []
    for _ in range(3):
        with exact():
            loss = alone(**batch).loss
        loss.backward()
        with CommunicationCounter(parallel.device_mesh) as counter:
            apart.append(relative(parallel.train_step(**batch), loss.detach()))
        gradients = parallel.full_gradients()
        expected = {key: one.grad for key, one in alone.named_parameters() if one.grad is not None}
        assert gradients.keys() == expected.keys(), gradients.keys() ^ expected.keys()
        apart += [relative(gradients[key], one) for key, one in expected.items()]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = parallel.full_state_dict()
    apart += [relative(weights[key], one) for key, one in alone.state_dict().items()]
    own = num_bytes(map(local_of, trained[0]))
    states = num_bytes(
        value.to_local() for state in optimizers[0].state.values() for value in state.values() if value.dim()
    )
    reduced = sum(
        count[1] for (kind, axis, phase), count in counter.counts.items()
        if axis == "dp" and phase == "backward" and kind != "all_gather"
    )  # fmt: skip
    return {
        "apart": max(apart), "adapters": own, "states": states, "reduced": reduced if "dp" in axes else None,
        "read back": read_back(name, parallel, alone, folder / mesh),
        "merged": merged(name, parallel, batch, folder / mesh),
    }  # fmt: skip


def read_back(name: str, parallel: Any, alone: PeftModel, folder: Path) -> float | None:
    """How far PEFT's own reading of the saved adapters is from the one process's."""
    parallel.save_pretrained(folder)
    if dist.get_rank():
        return None
    if name == "second of two LoRAs":
        model = PeftModel.from_pretrained(base_of(name), folder / "one", adapter_name="one")
        model.load_adapter(folder / "two", "two")
    else:
        model = PeftModel.from_pretrained(base_of(name), folder)
    state = model.state_dict()
    return max(relative(state[key], one) for key, one in alone.state_dict().items())


def merged(name: str, parallel: Any, batch: dict[str, torch.Tensor], folder: Path) -> float | str | None:
    """How far logits of the merged base model, read by transformers, are from those of the parallel model."""
    if any(word in name for word in ("tuning", "int8", "biases")):  # which PEFT does not merge into such weights
        return "–"
    exact: Any = nullcontext if name == "LoRA, base in bf16" else keep_float64
    parallel.save_pretrained(folder / "merged", merge_adapters=True)
    with torch.no_grad(), exact():
        logits = parallel(**batch).logits + 0
        if dist.get_rank():
            return None
        return relative(LlamaForCausalLM.from_pretrained(folder / "merged", dtype="auto")(**batch).logits, logits)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max() / max(float(expected.abs().max()), 1e-6))


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def run_rank(only: str, folder: Path) -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    with traced_once():
        for name in ADAPTERS:
            for mesh in MESHES:
                if only in name:
                    results[f"{name}|{mesh}"] = measure(name, mesh, folder / name.replace(" ", "_"))
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()


def row(key: str, result: dict[str, Any]) -> str:
    shown = [
        f"{value:.1e}" if isinstance(value, float) else str(value) for value in (result["read back"], result["merged"])
    ]
    reduced = "–" if result["reduced"] is None else f"{result['reduced']}"
    figures = [f"{result['apart']:.1e}", str(result["adapters"]), str(result["states"]), reduced, *shown]
    return f"| {' | '.join([*key.split('|'), *figures])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.folder is not None:
        run_rank(options.only, options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                  "OMP_NUM_THREADS": "1", "MESHWRIGHT_CACHE": ""}  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.adapters", "--only", options.only, "--folder", folder]
        ranks = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError("a rank failed")
        results = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
    rows = "\n".join(row(key, result) for key, result in results.items())
    text = f"{_PAGE}{rows}\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    limits = [BFLOAT16 if "bf16" in key else FLOAT64 for key in results]
    sys.exit(any(result["apart"] > limit for result, limit in zip(results.values(), limits)))


if __name__ == "__main__":
    main()
