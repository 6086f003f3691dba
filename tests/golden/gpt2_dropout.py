"""GPT2LMHeadModel on mesh tp=2, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import torch
import torch.nn.functional as F
from spmd_types import I, P, R, V

from runtime import kernels, ops
from runtime.programs.program import Block

spmd = ops.reducing_in(torch.bfloat16)  # gradients of what is bfloat16 are reduced as bfloat16


class WteToDrop(Block):
    def forward(self, input_ids, indices):
        w = self.weights
        # input_ids: [8, 16] {tp: R}
        # indices: [1, 16] {tp: R}
        wte = kernels.embedding(input_ids, w.transformer.wte.weight)      # [8, 16, 64] {tp: I}
        wpe = kernels.embedding(indices, w.transformer.wpe.weight)        # [1, 16, 64] {tp: I}
        added = wte + wpe
        x = ops.dropout(added, 0.1, draw=0, of=self)
        return x


class GPT2Block(Block):  # transformer.h.{0..3}
    def forward(self, x):
        w = self.weights
        # x: [8, 16, 64] {tp: I}
        h = kernels.layer_norm(x, w.ln_1.weight, w.ln_1.bias, eps=1e-05)
        c_attn_weight = w.attn.c_attn.weight.transpose(0, 1)              # [192, 64] {tp: I}
        qkv = F.linear(h, c_attn_weight, w.attn.c_attn.bias)
        q, k, v = qkv.split([64, 64, 64], 2)
        q, k, v = [each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in (q, k, v)]
        attention = ops.scaled_dot_product_attention(
            q, k, v, dropout_p=0.1, is_causal=True, scale=0.3535533905932738, draw=0, of=self
        )
        attention = attention.transpose(1, 2).flatten(2)
        c_proj_weight = w.attn.c_proj.weight.transpose(0, 1)              # [64, 64] {tp: I}
        attention = F.linear(attention, c_proj_weight, w.attn.c_proj.bias)
        attention = ops.dropout(attention, 0.1, draw=1, of=self)
        x, h = kernels.add_layer_norm(attention, x, w.ln_2.weight, w.ln_2.bias, eps=1e-05)
        c_fc_weight = w.mlp.c_fc.weight.transpose(0, 1)                   # [256, 64] → [128, 64] {tp: S(0)}
        h = spmd.convert(h, "tp", src=I, dst=R)                           # 16 KiB, backward all-reduce
        c_fc = F.linear(h, c_fc_weight)                                   # [8, 16, 256] → [8, 16, 128] {tp: S(2)}
        activation = kernels.bias_gelu(c_fc, w.mlp.c_fc.bias, approximate='tanh')
        c_proj_weight = w.mlp.c_proj.weight.transpose(0, 1)               # [64, 256] → [64, 128] {tp: S(1)}
        c_proj_bias = spmd.convert(w.mlp.c_proj.bias, "tp", src=I, dst=P, expert_mode=True)
        # [8, 16, 64] {tp: P}
        feed_forward = spmd.reinterpret(F.linear(activation, c_proj_weight), "tp", src=V, dst=P) + c_proj_bias
        feed_forward = spmd.all_reduce(feed_forward, "tp", src=P, dst=I)  # 16 KiB
        feed_forward = ops.dropout(feed_forward, 0.1, draw=2, of=self)
        x = x + feed_forward
        return x


class LnFToLmHead(Block):
    def forward(self, x, labels):
        w = self.weights
        # x: [8, 16, 64] {tp: I}
        # labels: [8, 16] {tp: R}
        h = kernels.layer_norm(x, w.transformer.ln_f.weight, w.transformer.ln_f.bias, eps=1e-05)
        # lm_head
        logits = F.linear(h, w.transformer.wte.weight)
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
        # transformer
        indices = torch.arange(16).unsqueeze(0)                           # [1, 16] {tp: R}
        return (indices,)

    def forward(self, input_ids, labels, indices):
        w = self.weights
        # input_ids: [8, 16] {tp: R}
        # labels: [8, 16] {tp: R}
        x = self.unit(WteToDrop(w))(input_ids, indices)
        # transformer.h.{0..3}
        for layer, draw in zip(w.transformer.h[:4], range(1, 11, 3)):     # 4 copies
            x = self.unit(GPT2Block(layer, first_draw=draw))(x)
        loss = self.unit(LnFToLmHead(w))(x, labels)
        return {"loss": loss}
