"""Every norm, gated MLP, rotary embedding and loss of ten families is matched, and the fused graph gives the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from fuse_graphs import fused_rows
from torch import nn

import runtime.kernels  # noqa: F401  (registers the fused operators)
from passes.capture import capture, interpret, keep_float64
from passes.fuse import Fused, fuse
from passes.ir.graph import Graph, State
from planner.fusing import fold_paths, report

pytestmark = pytest.mark.usefixtures("models_traced_once")

_DECODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_GPT = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}

#: Family → its class, the fields of its config, and what must be matched in two layers of it.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT,
             {"embedding": 2, "layer_norm": 3, "add_layer_norm": 2, "bias_gelu": 2, "cross_entropy": 1}),
    "llama": ("LlamaForCausalLM", _GROUPED,
              {"embedding": 1, "rms_norm": 3, "add_rms_norm": 2, "rotary": 4, "swiglu": 2, "cross_entropy": 1}),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED,
              {"embedding": 1, "rms_norm": 3, "add_rms_norm": 2, "rotary": 4, "swiglu": 2, "cross_entropy": 1}),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8},
              {"embedding": 1, "rms_norm": 7, "add_rms_norm": 2, "rotary": 4, "swiglu": 2, "cross_entropy": 1}),
    "gemma": ("GemmaForCausalLM", {**_GROUPED, "head_dim": 8},
              {"embedding": 1, "rms_norm": 3, "add_rms_norm": 2, "rotary": 4, "geglu": 2, "cross_entropy": 1}),
    "bert": ("BertForMaskedLM", {**_DECODER, "max_position_embeddings": 16},
             {"embedding": 3, "layer_norm": 2, "add_layer_norm": 4, "bias_gelu": 3, "cross_entropy": 1}),
    "t5, gated": ("T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"},
                  {"embedding": 4, "rms_norm": 12, "geglu": 4, "cross_entropy": 1}),
    "t5, relu": ("T5ForConditionalGeneration", _T5, {"embedding": 4, "rms_norm": 12, "cross_entropy": 1}),
    "vit": ("ViTForImageClassification", {**_DECODER, "image_size": 16, "patch_size": 8, "num_labels": 4},
            {"layer_norm": 3, "add_layer_norm": 2, "bias_gelu": 2, "cross_entropy": 1}),
    "opt": ("OPTForCausalLM", {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2,
                               "num_attention_heads": 4, "max_position_embeddings": 16, "word_embed_proj_dim": 32},
            {"embedding": 2, "layer_norm": 3, "add_layer_norm": 2, "cross_entropy": 1}),
    "bloom": ("BloomForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
              {"embedding": 1, "layer_norm": 4, "add_layer_norm": 2, "bias_gelu": 2, "cross_entropy": 1}),
    "gpt-j": ("GPTJForCausalLM", {**_GPT, "rotary_dim": 4},
              {"embedding": 1, "layer_norm": 3, "rotary": 4, "bias_gelu": 2, "cross_entropy": 1}),
    "albert": ("AlbertForMaskedLM", {**_DECODER, "embedding_size": 16, "max_position_embeddings": 16},
               {"embedding": 3, "layer_norm": 2, "add_layer_norm": 4, "bias_gelu": 3, "cross_entropy": 1}),
    "cohere, normed heads": ("CohereForCausalLM", {**_GROUPED, **_TOKENS, "use_qk_norm": True},
                             {"embedding": 1, "layer_norm": 7, "rotary": 4, "swiglu": 2, "cross_entropy": 1}),
    "gpt-oss": ("GptOssForCausalLM", {**_GROUPED, **_TOKENS, "head_dim": 8, "num_local_experts": 4,
                                      "num_experts_per_tok": 2},
                {"embedding": 1, "rms_norm": 3, "add_rms_norm": 2, "rotary": 4, "cross_entropy": 1, "experts": 2}),
    "deepseek-v3": ("DeepseekV3ForCausalLM",
                    {**_DECODER, **_TOKENS, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8,
                     "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 2},
                    {"embedding": 1, "rms_norm": 7, "add_rms_norm": 2, "rotary": 4, "swiglu": 2, "cross_entropy": 1}),
    "llama4": ("Llama4ForCausalLM",
               {**_GROUPED, **_TOKENS, "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2,
                "interleave_moe_layer_step": 2},
               {"embedding": 1, "rms_norm": 7, "add_rms_norm": 2, "rotary": 4, "swiglu": 2, "cross_entropy": 1,
                "experts": 1}),
    "gpt-neox": ("GPTNeoXForCausalLM", {**_DECODER, "max_position_embeddings": 16},
                 {"embedding": 1, "layer_norm": 5, "rotary": 4, "bias_gelu": 2, "cross_entropy": 1}),
}  # fmt: skip
#: Families all of whose fused operators are in another one of the same spelling: Llama, BERT, GPT-2, the gated T5.
_COMPUTING_ALIKE = ("qwen2", "qwen3", "albert", "vit", "opt", "t5, relu")
#: What no graph may keep once it is fused: norms, activations and what rotations and norms are spelled with.
_SPELLED = ("rsqrt", "layer_norm", "silu", "gelu", "tanh", "neg", "stack", "pow", "embedding")


def _model(family: str, dtype: torch.dtype) -> nn.Module:
    class_name, fields, _ = FAMILIES[family]
    model_class = getattr(transformers, class_name)
    # No dropout: two runs are compared.
    config = model_class.config_class(**fields)
    for name in vars(config):
        if "drop" in name or name.endswith("_pdrop"):
            setattr(config, name, 0.0)
    config.decoder_start_token_id = 0
    torch.manual_seed(0)
    model: nn.Module = model_class(config).to(dtype).train()
    return model


def _batch(family: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if family == "vit":
        images = torch.randn(2, 3, 16, 16, generator=generator).to(dtype)
        return {"pixel_values": images, "labels": torch.tensor([1, 3])}
    tokens = torch.randint(2, 64, (2, 8), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _fused(family: str, dtype: torch.dtype) -> tuple[Graph, Fused]:
    graph = capture(_model(family, dtype), kwargs=_batch(family, dtype))
    return graph, fuse(graph)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_a_family_is_matched(family: str) -> None:
    graph, result = _fused(family, torch.bfloat16)
    assert fused_rows(result) == FAMILIES[family][2]
    left = {node.op.split(".")[1] for node in result.graph.nodes if node.op.startswith("aten.") and not node.constant}
    assert not left & set(_SPELLED)
    assert len(result.graph.nodes) < len(graph.nodes) or family == "opt"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in _COMPUTING_ALIKE])
def test_fused_graph_gives_loss_and_gradients_of_the_graph(family: str) -> None:
    model, batch = _model(family, torch.float64), _batch(family, torch.float64)
    with keep_float64():
        graph = capture(model, kwargs=batch)
        whole, fused = (_run(each, model, batch) for each in (graph, fuse(graph).graph))
    # what float64 leaves of sums that are added up in another order
    torch.testing.assert_close(fused[0], whole[0], rtol=1e-11, atol=0.0)
    for name, gradient in whole[1].items():
        distance = (fused[1][name] - gradient).abs().max()
        assert distance <= 1e-11 * gradient.abs().max() + 1e-16, f"{name}: {distance:.1e}"


def _run(
    graph: Graph, model: nn.Module, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tensors: dict[str, Any] = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}

    def tensor_of(state: State) -> torch.Tensor:
        leaf: torch.Tensor = state.data if state.value.kind == "constant" else tensors[state.path]
        return leaf

    inputs = {value.name: batch[str(path[0])] for value, path in zip(graph.inputs, graph.input_paths)}
    model.zero_grad(set_to_none=True)
    assert graph.loss is not None
    loss = interpret(graph, inputs, tensor_of)[graph.loss]
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.detach(), gradients


def test_a_constant_of_few_digits_counts_in_float64_alone() -> None:
    """BLOOM writes √(2/π) with eight digits: no difference in float32, but one in float64."""
    _, narrow = _fused("bloom", torch.float32)
    _, exact = _fused("bloom", torch.float64)
    assert fused_rows(narrow)["bias_gelu"] == 2 and "bias_gelu" not in fused_rows(exact)
    assert {miss.pattern for miss in exact.near_misses} == {"gelu"}
    assert all("the fused operator gives something else" in miss.reason for miss in exact.near_misses)


def test_report_says_what_is_saved() -> None:
    graph, result = _fused("llama", torch.bfloat16)
    said = report(graph, result)
    assert {entry.pattern: (entry.count, entry.modules) for entry in said.matches} == {
        "embedding": (1, ("model.embed_tokens",)),
        "rms_norm": (3, ("model.layers.{0..1}.input_layernorm", "model.norm")),
        "add_rms_norm": (2, ("model.layers.{0..1}.post_attention_layernorm",)),
        "rotary": (4, ("model.layers.{0..1}.self_attn",)),
        "swiglu": (2, ("model.layers.{0..1}.mlp",)),
        "cross_entropy": (1, ("the model",)),
    }
    before, after = said.operators
    assert after < 0.6 * before
    before, after = said.saved_bytes
    assert after < before


@pytest.mark.parametrize(
    ("paths", "folded"),
    [
        (["a.0.b", "a.1.b", "a.2.b"], ("a.{0..2}.b",)),
        (["a.0.b", "a.2.b", "c"], ("a.{0,2}.b", "c")),
        (["a.1.b.0", "a.1.b.1"], ("a.1.b.{0..1}",)),
        (["", "a"], ("the model", "a")),
    ],
)
def test_module_paths_fold(paths: list[str], folded: tuple[str, ...]) -> None:
    assert fold_paths(paths) == folded
