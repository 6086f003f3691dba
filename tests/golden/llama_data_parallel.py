"""LlamaForCausalLM on mesh dp=2,cp=1,tp=1, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, P, R, V

from runtime import kernels, ops
from runtime.kernels.language import tl, triton
from runtime.kernels.tiles import load, store, whole_tile
from runtime.programs.program import Block


# cos, sin, to, to
# of model.rotary_emb
def _cos_sin_to_to_plain(angles):
    cos = torch.cos(angles)
    sin = torch.sin(angles)
    cos_1 = cos.to(torch.bfloat16)
    sin_1 = sin.to(torch.bfloat16)
    return cos_1, sin_1


@triton.jit
def _cos_sin_to_to_forward(angles_ptr, cos_1_ptr, sin_1_ptr, angles_strides, SPACE, TILE: tl.constexpr):
    rows, columns, exists = whole_tile(SPACE, TILE)
    angles = load(angles_ptr, angles_strides, rows, columns, exists, SPACE)
    cos = tl.cos(angles)
    sin = tl.sin(angles)
    store(cos_1_ptr, cos, rows, columns, exists, SPACE)
    store(sin_1_ptr, sin, rows, columns, exists, SPACE)


_cos_sin_to_to = kernels.Chain(
    plain=_cos_sin_to_to_plain,
    forward=_cos_sin_to_to_forward,
    inputs={'angles': 'float32'},
    outputs={'cos_1': 'bfloat16', 'sin_1': 'bfloat16'},
)


class EmbedTokensToRotaryEmb(Block):
    def forward(self, input_ids, positions):
        w = self.weights
        # input_ids: [8, 16] → [4, 16] {dp: S(0)}
        # positions: [1, 16, 1] {dp: R}
        x = kernels.embedding(input_ids, w.model.embed_tokens.weight)
        angles = positions * w.model.rotary_emb.inv_freq
        angles = torch.cat([angles, angles], dim=2)
        cos, sin = _cos_sin_to_to(angles)
        return x, cos, sin


class LlamaDecoderLayer(Block):  # model.layers.{0..3}
    def forward(self, x, cos, sin):
        w = self.weights
        # x: [8, 16, 64] → [4, 16, 64] {dp: S(0)}
        # cos: [1, 16, 8] {dp: R}
        # sin: [1, 16, 8] {dp: R}
        h = kernels.rms_norm(x, w.input_layernorm.weight, eps=1e-05)
        attn = w.self_attn
        q, k, v = F.linear(h, attn.q_proj.weight), F.linear(h, attn.k_proj.weight), F.linear(h, attn.v_proj.weight)
        q, k, v = [each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in (q, k, v)]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = kernels.rotary_pair(q, k, cos, sin)
        attention = ops.grouped_query_attention(q, k, v, is_causal=True, scale=0.3535533905932738)
        attention = attention.transpose(1, 2).flatten(2)
        attention = F.linear(attention, attn.o_proj.weight)
        x, h = kernels.add_rms_norm(x, attention, w.post_attention_layernorm.weight, eps=1e-05)
        gate, up = F.linear(h, w.mlp.gate_proj.weight), F.linear(h, w.mlp.up_proj.weight)
        activation = kernels.swiglu(gate, up)
        feed_forward = F.linear(activation, w.mlp.down_proj.weight)
        x = x + feed_forward
        return x


class NormToLmHead(Block):
    def forward(self, x, labels):
        w = self.weights
        # x: [8, 16, 64] → [4, 16, 64] {dp: S(0)}
        # labels: [8, 16] → [4, 16] {dp: S(0)}
        h = kernels.rms_norm(x, w.model.norm.weight, eps=1e-05)
        logits = F.linear(h, w.lm_head.weight)
        labels = F.pad(labels, [0, 1], value=-100.0)[:, 1:]
        losses = ops.cross_entropy(logits, labels, reuse_logits=True, dtype=torch.float32)
        valid = labels != -100
        total = spmd.reinterpret(torch.sum(losses), "dp", src=V, dst=P)   # [] {dp: P}
        count = spmd.reinterpret(torch.sum(valid), "dp", src=V, dst=P)    # [] {dp: P}
        count = spmd.all_reduce(count, "dp", src=P, dst=R)                # 8 B
        loss = total / count
        loss = spmd.all_reduce(loss, "dp", src=P, dst=I)                  # 4 B
        return loss


class Program(Block):
    def constants(self):
        # They depend on the shapes alone: computed once, whole on every rank.
        # model
        positions = torch.arange(16).unsqueeze(0).unsqueeze(2).to(torch.float32)  # [1, 16, 1] {dp: R}
        return (positions,)

    def forward(self, input_ids, labels, positions):
        w = self.weights
        # input_ids: [8, 16] → [4, 16] {dp: S(0)}
        # labels: [8, 16] → [4, 16] {dp: S(0)}
        x, cos, sin = self.unit(EmbedTokensToRotaryEmb(w))(input_ids, positions)
        # model.layers.{0..3}
        for layer in w.model.layers[:4]:                                  # 4 copies
            x = self.unit(LlamaDecoderLayer(layer))(x, cos, sin)
        loss = self.unit(NormToLmHead(w))(x, labels)
        return {"loss": loss}
