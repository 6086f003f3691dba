"""Fine-tuning with LoRA: a small Llama that has read sources learns the prose of Python's documentation.

The weights that it has are frozen: the adapters are all that gets gradients, and all that is saved.

planner run --nproc 4 examples/lora.py
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import planner

SEQ_LEN, BATCH = 32, 32
STEPS = 40
GOAL = 2.9  # nats a byte; 3.3 before fine-tuning


def batches(text: bytes, count: int) -> list[torch.Tensor]:
    """Windows of a text that follow one another, [BATCH, SEQ_LEN] each, the same on every rank."""
    tokens = torch.frombuffer(bytearray(text[: count * BATCH * SEQ_LEN]), dtype=torch.uint8).long()
    return list(tokens.view(-1, BATCH, SEQ_LEN))


def base() -> LlamaForCausalLM:
    """A Llama that was trained on the standard library's sources for a moment, on every rank alike."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for tokens in batches((Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes(), 40):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axis sizes, a cluster, or the path of a plan")
    options = parser.parse_args()

    prose = (Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py").read_bytes()
    *train, held_out = batches(prose, STEPS + 1)
    whole = base()
    adapters = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(whole, adapters)
    parallel = planner.compile(model, options.mesh, example_inputs={"input_ids": held_out, "labels": held_out})
    trained = [parameter for parameter in parallel.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for tokens in train:
        parallel.train_step(input_ids=tokens, labels=tokens)
        optimizer.step()
        optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        parallel.save_pretrained(folder)
        if torch.distributed.get_rank() == 0:
            # What peft reads back, on one device.
            again = PeftModel.from_pretrained(base(), folder).eval()
            with torch.no_grad():
                loss = float(again(input_ids=held_out, labels=held_out).loss)
            print(f"adapters: {sum(file.stat().st_size for file in Path(folder).iterdir()) / 1e3:.0f} kB")
            print(f"loss {loss:.3f} (goal {GOAL})")


if __name__ == "__main__":
    main()
