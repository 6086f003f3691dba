"""LlamaForCausalLM on mesh tp=2, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import torch
import torch.nn.functional as F
from spmd_types import I, P, R, S, V

from runtime import kernels, ops
from runtime.kernels.language import tl, triton
from runtime.kernels.tiles import load, store, whole_tile
from runtime.programs.program import Block

spmd = ops.reducing_in(torch.bfloat16)  # gradients of what is bfloat16 are reduced as bfloat16


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
        # input_ids: [8, 16] {tp: R}
        # positions: [1, 16, 1] {tp: R}
        x = kernels.embedding(input_ids, w.model.embed_tokens.weight)     # [8, 16, 64] {tp: I}
        angles = positions * w.model.rotary_emb.inv_freq
        angles = torch.cat([angles, angles], dim=2)
        cos, sin = _cos_sin_to_to(angles)
        return x, cos, sin


class LlamaDecoderLayer(Block):  # model.layers.{0..3}
    def forward(self, x, cos, sin):
        w = self.weights
        # x: [8, 16, 64] → [8, 8, 64] {tp: S(1)}
        # cos: [1, 16, 8] {tp: R}
        # sin: [1, 16, 8] {tp: R}
        h = kernels.rms_norm(x, w.input_layernorm.weight, eps=1e-05)
        h = spmd.all_gather(h, "tp", src=S(1), dst=R)                     # 16 KiB, backward reduce-scatter
        attn = w.self_attn
        q, k, v = F.linear(h, attn.q_proj.weight), F.linear(h, attn.k_proj.weight), F.linear(h, attn.v_proj.weight)
        # q: [8, 8, 16, 8] → [8, 4, 16, 8] {tp: S(1)}
        # k, v: [8, 4, 16, 8] → [8, 2, 16, 8] {tp: S(1)}
        q, k, v = [each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in (q, k, v)]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = kernels.rotary_pair(q, k, cos, sin)
        attention = ops.grouped_query_attention(q, k, v, is_causal=True, scale=0.3535533905932738)
        attention = attention.transpose(1, 2).flatten(2)                  # [8, 16, 64] → [8, 16, 32] {tp: S(2)}
        attention = spmd.reinterpret(F.linear(attention, attn.o_proj.weight), "tp", src=V, dst=P)  # [8, 16, 64] {tp: P}
        attention = spmd.reduce_scatter(attention, "tp", src=P, dst=S(1))  # 16 KiB, backward all-gather
        x, h = kernels.add_rms_norm(x, attention, w.post_attention_layernorm.weight, eps=1e-05)
        h = spmd.all_gather(h, "tp", src=S(1), dst=R)                     # 16 KiB, backward reduce-scatter
        # each [8, 16, 128] → [8, 16, 64] {tp: S(2)}
        gate, up = F.linear(h, w.mlp.gate_proj.weight), F.linear(h, w.mlp.up_proj.weight)
        activation = kernels.swiglu(gate, up)
        # [8, 16, 64] {tp: P}
        feed_forward = spmd.reinterpret(F.linear(activation, w.mlp.down_proj.weight), "tp", src=V, dst=P)
        feed_forward = spmd.reduce_scatter(feed_forward, "tp", src=P, dst=S(1))  # 16 KiB, backward all-gather
        x = x + feed_forward
        return x


class NormToLmHead(Block):
    def forward(self, x, labels):
        w = self.weights
        # x: [8, 16, 64] → [8, 8, 64] {tp: S(1)}
        # labels: [8, 16] {tp: R}
        h = kernels.rms_norm(x, w.model.norm.weight, eps=1e-05)
        h = spmd.all_gather(h, "tp", src=S(1), dst=I)                     # 16 KiB
        logits = F.linear(h, w.lm_head.weight)
        labels = F.pad(labels, [0, 1], value=-100.0)[:, 1:]
        losses = ops.cross_entropy(logits, labels, reuse_logits=True, dtype=torch.float32)
        valid = labels != -100
        total = torch.sum(losses)
        count = torch.sum(valid)
        loss = total / count
        return loss


class Program(Block):
    def constants(self):
        # They depend on the shapes alone: computed once, whole on every rank.
        # model
        positions = torch.arange(16).unsqueeze(0).unsqueeze(2).to(torch.float32)  # [1, 16, 1] {tp: R}
        return (positions,)

    def forward(self, input_ids, labels, positions):
        w = self.weights
        # input_ids: [8, 16] {tp: R}
        # labels: [8, 16] {tp: R}
        x, cos, sin = self.unit(EmbedTokensToRotaryEmb(w))(input_ids, positions)
        x = spmd.convert(x, "tp", src=I, dst=S(1))                        # 16 KiB, backward all-gather
        # model.layers.{0..3}
        for layer in w.model.layers[:4]:                                  # 4 copies
            x = self.unit(LlamaDecoderLayer(layer))(x, cos, sin)
        loss = self.unit(NormToLmHead(w))(x, labels)
        return {"loss": loss}
