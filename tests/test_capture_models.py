"""Hugging Face models: loss and every gradient of the captured graph equal the model's, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes.capture import capture
from passes.ir.graph import Graph
from planner.library import build_model, example_batch, load_config, random_batch
from tests.capture_parity import assert_parity
from tests.cells import cells

transformers = pytest.importorskip("transformers")

TINY = ("tiny-gpt2", "tiny-llama", "tiny-opt", "tiny-bloom", "tiny-bert", "tiny-t5", "tiny-vit")
DECODER = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
           "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED = {**DECODER, "num_key_value_heads": 2, "head_dim": 8}
ENCODER = {**DECODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
RELATIVE = {**ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
PARTLY_ROTARY = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4,
                 "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", GROUPED),
    "gemma": ("GemmaForCausalLM", GROUPED),
    "gpt_neox": ("GPTNeoXForCausalLM", DECODER),
    "gptj": ("GPTJForCausalLM", PARTLY_ROTARY),
    "falcon": ("FalconForCausalLM", DECODER),
    "distilbert": ("DistilBertForMaskedLM", {"vocab_size": 96, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4,
                                             "dropout": 0.0, "attention_dropout": 0.0}),
    "roberta": ("RobertaForMaskedLM", ENCODER),
    "albert": ("AlbertForMaskedLM", {**ENCODER, "embedding_size": 16, "classifier_dropout_prob": 0.0}),
    "deberta": ("DebertaForMaskedLM", RELATIVE),
    "mamba": ("MambaForCausalLM", {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
}  # fmt: skip


def built(name: str, attention: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name in TINY:
        config = load_config(name)
        config._attn_implementation = attention
        return build_model(config, dtype="float64", device="cpu")
    class_name, entries = OTHERS[name]
    config = transformers.AutoConfig.for_model(name, architectures=[class_name], **entries)
    return build_model(config, dtype="float64", device="cpu")


def check(model: torch.nn.Module) -> Graph:
    graph = assert_parity(model, kwargs=random_batch(model, batch_size=3, seq_len=12))
    assert graph.loss == "loss" and "logits" in graph.outputs
    assert not [node.op for node in graph.nodes if node.op.split(".")[1].endswith("_")]
    names = [value.name for value in graph.inputs] + [state.value.name for state in graph.states]
    names += [value.name for node in graph.nodes for value in node.outputs]
    assert len(set(names)) == len(names) and all(name.isidentifier() for name in names)
    assert len({node.key for node in graph.nodes}) == len(graph.nodes)
    return graph


#: BLOOM has eager attention only.
EVERY = tuple((name, way) for name in TINY for way in ("sdpa", "eager") if (name, way) != ("tiny-bloom", "sdpa"))
SLOW = (
    ("tiny-gpt2", "eager"), ("tiny-opt", "sdpa"), ("tiny-bert", "eager"), ("tiny-t5", "sdpa"), ("tiny-vit", "sdpa"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "attention"), cells([cell for cell in EVERY if cell not in SLOW], SLOW))
def test_library_models(name: str, attention: str) -> None:
    graph = check(built(name, attention))
    losses = [node for node in graph.nodes if node.op == "meshwright.cross_entropy"]
    assert len(losses) == 1 and len(losses[0].output.shape) == (1 if name == "tiny-vit" else 2)


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures(name: str) -> None:
    check(built(name, "sdpa"))


def test_the_output_is_rebuilt_in_the_models_own_class() -> None:
    model = build_model("tiny-t5")
    graph = capture(model, kwargs=example_batch(model, batch_size=2, seq_len=8))
    assert graph.unflatten is not None
    output = graph.unflatten({path: path for path in graph.outputs})
    assert type(output).__name__ == "Seq2SeqLMOutput"
    assert output.loss == "loss" and output.logits == "logits" and output.past_key_values is None


def test_module_paths_and_names_can_be_read() -> None:
    model = build_model("tiny-llama")
    graph = capture(model, kwargs=example_batch(model, batch_size=2, seq_len=8))
    node = next(node for node in graph.nodes if node.name == "q_proj")
    assert (node.module_path, node.module_class) == ("model.layers.0.self_attn.q_proj", "Linear")
    assert node.key == "model.layers.0.self_attn.q_proj:aten.linear.default:0"
    assert node.inputs[1] == "model_layers_0_self_attn_q_proj_weight"
    rotary = [node for node in graph.nodes if node.module_path == "model.rotary_emb"]
    assert rotary and not any(node.output.requires_grad for node in rotary)


def test_keys_are_the_same_for_other_shapes() -> None:
    model = build_model("tiny-llama")
    graphs = [capture(model, kwargs=example_batch(model, batch_size=size, seq_len=8 * size)) for size in (2, 3)]
    assert [node.key for node in graphs[0].nodes] == [node.key for node in graphs[1].nodes]


def test_a_model_larger_than_memory_is_captured() -> None:
    model = build_model("llama-3-70b", dtype="bfloat16")
    model.model.layers = model.model.layers[:2]
    graph = capture(model, kwargs=example_batch(model, batch_size=64, seq_len=4096))
    assert graph.loss == "loss"
    assert all(state.value.dtype == "bfloat16" for state in graph.parameters)


def test_inference_leaves_out_loss_and_cache() -> None:
    model = build_model("tiny-gpt2").eval()
    batch = example_batch(model, batch_size=2, seq_len=8)
    graph = capture(model, kwargs={"input_ids": batch["input_ids"]})
    assert list(graph.outputs) == ["logits"] and graph.loss is None
    assert not any(value.requires_grad for value in graph.values.values())


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,eoi->beo", x, self.weight)


class Mixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x).square().mean()


def test_adapters_of_experts_that_are_one_parameter() -> None:
    """Which PEFT parametrizes in forward: the parameter is set to itself on the way."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=[], target_parameters=["experts.weight"], r=2, init_lora_weights=False)
    assert_parity(peft.get_peft_model(Mixture(), config).double(), args=(torch.randn(5, 4, dtype=torch.float64),))
