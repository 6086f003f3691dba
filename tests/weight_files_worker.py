"""One of four ranks of the tests of weight files: what a rank reads and holds, and Hugging Face models in and out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import planner
from runtime.checkpoint import CheckpointManager
from tests.ranks import answer, task
from tests.small_models import Mlp, seeded, squared_error
from tests.tracing import traced_once


def everywhere(answers: Any) -> list[Any]:
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, answers)
    return results


def peak_bytes(*, reset: bool = False) -> int:
    """Most memory that this process held since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def bytes_of_reads() -> int:
    """What this process read by system calls (Linux)."""
    return int(Path("/proc/self/io").read_text().split()[1])


def on_meta(mesh: str, layers: int, size: int) -> planner.ParallelModule:
    with torch.device("meta"):
        model = Mlp(size=size, hidden=4 * size, layers=layers)
        batch = (torch.empty(8, size), torch.empty(8, 8))
    return planner.compile(model, mesh, loss_fn=squared_error, example_inputs=batch, forbid_replicated_matmul=True)


def what_a_rank_reads_and_holds(folder: Path, mesh: str, *, layers: int, size: int) -> dict[str, Any]:
    """Of every rank: bytes read, and memory taken, beside those of its shards and of the largest tensor."""
    if dist.get_rank() == 0:
        folder.mkdir()
        state = seeded(Mlp, size=size, hidden=4 * size, layers=layers).float().state_dict()
        save_file(state, folder / "model.safetensors")
        del state
    dist.barrier()
    small, parallel = on_meta("tp=4", 1, 16), on_meta(mesh, layers, size)
    small.initialise()
    small.save_pretrained(folder / "small")
    small.load_pretrained(folder / "small")  # what is loaded at first use is loaded now
    owned = parallel.owned()
    answers: dict[str, Any] = {
        "shards": sum(piece.tensor.nbytes for piece in owned),
        "largest": max(4 * torch.Size(piece.shape).numel() for piece in owned),
    }
    before, read = peak_bytes(reset=True), bytes_of_reads()
    loaded = parallel.load_pretrained(folder)
    answers["read"], answers["said"] = bytes_of_reads() - read, loaded.bytes_read
    answers["held by loading"] = peak_bytes() - before
    before = peak_bytes(reset=True)
    parallel.save_pretrained(folder / "again")
    answers["held by saving"] = peak_bytes() - before
    manager = CheckpointManager(folder / "checkpoints")
    before = peak_bytes(reset=True)
    manager.save(parallel, step=1)
    answers["held by a checkpoint"] = peak_bytes() - before
    again = on_meta(mesh, layers, size)
    before, read = peak_bytes(reset=True), bytes_of_reads()
    manager.load(again)
    answers["held by resuming"] = peak_bytes() - before
    answers["read by resuming"] = bytes_of_reads() - read
    same = all(torch.equal(one.tensor, two.tensor) for one, two in zip(parallel.owned(), again.owned()))
    original = (folder / "model.safetensors").stat().st_size
    answers["same"] = same and (folder / "again" / "model.safetensors").stat().st_size - original < 1000
    return answers


def hugging_face(folder: Path) -> dict[str, bool]:
    """Files of Hugging Face's give its logits on a mesh, and what a mesh saves its loss in Hugging Face's hands."""
    import transformers
    from transformers import GPT2Config, LlamaConfig, T5Config, ViTConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaConfig(**sizes, intermediate_size=64, num_key_value_heads=4)
    gpt2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    gpt2.resid_pdrop = gpt2.embd_pdrop = gpt2.attn_pdrop = 0.0
    t5 = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0)
    t5.decoder_start_token_id = 0
    # Its files have older names than the model.
    vit = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, image_size=16)
    vit.patch_size, vit.num_labels = 8, 4
    tokens = torch.randint(1, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    text = {"input_ids": tokens, "labels": tokens}
    images = {"pixel_values": torch.ones(4, 3, 16, 16), "labels": torch.arange(4)}
    cases = {
        "LlamaForCausalLM": (llama, text),
        "GPT2LMHeadModel": (gpt2, text),
        "T5ForConditionalGeneration": (t5, text),
        "ViTForImageClassification": (vit, images),
    }
    right = {}
    for name, (config, batch) in cases.items():
        build = getattr(transformers, name)
        source, target = folder / f"{name}-in", folder / f"{name}-out"
        torch.manual_seed(3)
        original = build(config)
        if dist.get_rank() == 0:
            original.save_pretrained(source, max_shard_size="30KB")
        dist.barrier()
        with torch.device("meta"):
            empty = build(config)
        parallel = planner.compile(empty, "dp=2,tp=2", example_inputs=batch, forbid_replicated_matmul=True)
        parallel.load_pretrained(source)
        loss = parallel.train_step(**batch)
        parallel.save_pretrained(target)
        again = build.from_pretrained(target)
        close = [torch.allclose(loss, model(**batch).loss, rtol=1e-5) for model in (original, again)]
        right[name] = all(close) and type(again.config) is type(config)
    return right


def base_models(folder: Path) -> bool:
    """A base model's files fill a model with a head, all but the head; and the other way round."""
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=32)
    tokens = torch.ones(4, 8, dtype=torch.long)
    base, headed = GPT2Model(config), GPT2LMHeadModel(config)
    if dist.get_rank() == 0:
        base.save_pretrained(folder / "base")
        headed.save_pretrained(folder / "headed")
    dist.barrier()
    answers = []
    for build, source in ((GPT2LMHeadModel, "base"), (GPT2Model, "headed")):
        with torch.device("meta"):
            empty = build(config)
        parallel = planner.compile(empty, "tp=4", example_inputs={"input_ids": tokens})
        loaded = parallel.load_pretrained(folder / source)
        answers.append(not loaded.missing and not any(piece.tensor.is_meta for piece in parallel.owned()))
    return all(answers)


def main() -> None:
    payload = task()
    where = Path(payload["folder"])
    large = {"layers": int(os.environ.get("MESHWRIGHT_TEST_LAYERS", "5")), "size": 512}
    results: dict[str, Any] = {
        mesh: everywhere(what_a_rank_reads_and_holds(where / mesh, mesh, **large)) for mesh in payload["meshes"]
    }
    results["hugging face"] = everywhere(hugging_face(where))
    results["base models"] = everywhere(base_models(where))
    answer(results)


if __name__ == "__main__":
    with traced_once():
        main()
