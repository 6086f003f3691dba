"""T5ForConditionalGeneration on mesh dp=2,cp=1,tp=1, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, P, R, S, V

from runtime import kernels, ops
from runtime.kernels.language import tl, triton
from runtime.kernels.tiles import load, store, whole_tile
from runtime.programs.program import Block


# eq, masked_fill
# of the model itself
def _eq_masked_fill_plain(shifted):
    mask = shifted == -100
    indices = shifted.masked_fill(mask, 0)
    return indices


@triton.jit
def _eq_masked_fill_forward(shifted_ptr, indices_ptr, shifted_strides, SPACE, TILE: tl.constexpr):
    rows, columns, exists = whole_tile(SPACE, TILE)
    shifted = load(shifted_ptr, shifted_strides, rows, columns, exists, SPACE)
    mask = (shifted == (-100))
    indices = tl.where(mask, 0, shifted)
    store(indices_ptr, indices, rows, columns, exists, SPACE)


_eq_masked_fill = kernels.Chain(
    plain=_eq_masked_fill_plain,
    forward=_eq_masked_fill_forward,
    inputs={'shifted': 'int64'},
    outputs={'indices': 'int64'},
)


class EmbedTokensToLayer0(Block):
    def forward(self, input_ids, indices):
        w = self.weights
        # input_ids: [8, 16] → [4, 16] {dp: S(0)}
        # indices: [16, 16] {dp: R}
        # encoder
        x = kernels.embedding(input_ids, w.shared.weight)
        h = kernels.rms_norm(x, w.encoder.block[0].layer[0].layer_norm.weight, eps=1e-06)
        attn = w.encoder.block[0].layer[0].SelfAttention
        q, k, v = F.linear(h, attn.q.weight), F.linear(h, attn.k.weight), F.linear(h, attn.v.weight)
        q, k, v = [each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in (q, k, v)]
        mask = kernels.embedding(indices, attn.relative_attention_bias.weight)
        mask = mask.permute(2, 0, 1).contiguous().unsqueeze(0)
        attention = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0).transpose(1, 2).flatten(2)
        attention = F.linear(attention, attn.o.weight)
        x = x + attention
        h = kernels.rms_norm(x, w.encoder.block[0].layer[1].layer_norm.weight, eps=1e-06)
        mlp = w.encoder.block[0].layer[1].DenseReluDense
        wi = F.linear(h, mlp.wi.weight)
        activation = F.relu(wi)
        feed_forward = F.linear(activation, mlp.wo.weight)
        x = x + feed_forward
        h = kernels.rms_norm(x, w.encoder.block[1].layer[0].layer_norm.weight, eps=1e-06)
        attn = w.encoder.block[1].layer[0].SelfAttention
        q, k, v = F.linear(h, attn.q.weight), F.linear(h, attn.k.weight), F.linear(h, attn.v.weight)
        q, k, v = [each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in (q, k, v)]
        attention = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0).transpose(1, 2).flatten(2)
        attention = F.linear(attention, attn.o.weight)
        x = x + attention
        return x


class LayerNormToLayer1(Block):
    def forward(self, x):
        w = self.weights
        # x: [8, 16, 64] → [4, 16, 64] {dp: S(0)}
        h = kernels.rms_norm(x, w.encoder.block[1].layer[1].layer_norm.weight, eps=1e-06)
        mlp = w.encoder.block[1].layer[1].DenseReluDense
        wi = F.linear(h, mlp.wi.weight)
        activation = F.relu(wi)
        feed_forward = F.linear(activation, mlp.wo.weight)
        x = x + feed_forward
        return x


class FinalLayerNormToLayer1(Block):
    def forward(self, x, labels, literal, indices, mask):
        w = self.weights
        # x: [8, 16, 64] → [4, 16, 64] {dp: S(0)}
        # labels: [8, 16] → [4, 16] {dp: S(0)}
        # literal: [8] {dp: R}
        # indices: [16, 16] {dp: R}
        # mask: [8, 1, 16, 16] {dp: R}
        encoded = kernels.rms_norm(x, w.encoder.final_layer_norm.weight, eps=1e-06)
        zeros = torch.zeros_like(labels)
        labels = labels[:, :15]
        shifted = torch.ops.aten.slice_scatter.default(zeros, labels, 1, 1, 9223372036854775807)
        literal = spmd.convert(literal, "dp", src=R, dst=S(0))
        shifted = torch.ops.aten.select_scatter.default(shifted, literal, 1, 0)
        indices_1 = _eq_masked_fill(shifted)
        # decoder
        x = kernels.embedding(indices_1, w.shared.weight)
        h = kernels.rms_norm(x, w.decoder.block[0].layer[0].layer_norm.weight, eps=1e-06)
        attn = w.decoder.block[0].layer[0].SelfAttention
        q, k, v = F.linear(h, attn.q.weight), F.linear(h, attn.k.weight), F.linear(h, attn.v.weight)
        q, k, v = [each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in (q, k, v)]
        relative_attention_bias = kernels.embedding(indices, attn.relative_attention_bias.weight)
        relative_attention_bias = relative_attention_bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        mask_1 = torch.where(mask, relative_attention_bias, -3.3895313892515355e+38)
        mask_1 = spmd.convert(mask_1, "dp", src=R, dst=S(0))
        attention = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_1, scale=1.0).transpose(1, 2).flatten(2)
        attention = F.linear(attention, attn.o.weight)
        x = x + attention
        h = kernels.rms_norm(x, w.decoder.block[0].layer[1].layer_norm.weight, eps=1e-06)
        cross_attn = w.decoder.block[0].layer[1].EncDecAttention
        q = F.linear(h, cross_attn.q.weight).unflatten(-1, (8, 8)).transpose(1, 2)
        k, v = F.linear(encoded, cross_attn.k.weight), F.linear(encoded, cross_attn.v.weight)
        k, v = [each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in (k, v)]
        attention = F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2)
        cross_attention = F.linear(attention, cross_attn.o.weight)
        x = x + cross_attention
        h = kernels.rms_norm(x, w.decoder.block[0].layer[2].layer_norm.weight, eps=1e-06)
        mlp = w.decoder.block[0].layer[2].DenseReluDense
        wi = F.linear(h, mlp.wi.weight)
        activation = F.relu(wi)
        feed_forward = F.linear(activation, mlp.wo.weight)
        x = x + feed_forward
        h = kernels.rms_norm(x, w.decoder.block[1].layer[0].layer_norm.weight, eps=1e-06)
        attn = w.decoder.block[1].layer[0].SelfAttention
        q, k, v = F.linear(h, attn.q.weight), F.linear(h, attn.k.weight), F.linear(h, attn.v.weight)
        q, k, v = [each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in (q, k, v)]
        mask = torch.where(mask, relative_attention_bias, -3.3895313892515355e+38)
        mask = spmd.convert(mask, "dp", src=R, dst=S(0))
        attention = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0).transpose(1, 2).flatten(2)
        attention = F.linear(attention, attn.o.weight)
        x = x + attention
        h = kernels.rms_norm(x, w.decoder.block[1].layer[1].layer_norm.weight, eps=1e-06)
        cross_attn = w.decoder.block[1].layer[1].EncDecAttention
        q = F.linear(h, cross_attn.q.weight).unflatten(-1, (8, 8)).transpose(1, 2)
        k, v = F.linear(encoded, cross_attn.k.weight), F.linear(encoded, cross_attn.v.weight)
        k, v = [each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in (k, v)]
        attention = F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2)
        cross_attention = F.linear(attention, cross_attn.o.weight)
        x = x + cross_attention
        return x


class LayerNormToLayer2(Block):
    def forward(self, x):
        w = self.weights
        # x: [8, 16, 64] → [4, 16, 64] {dp: S(0)}
        h = kernels.rms_norm(x, w.decoder.block[1].layer[2].layer_norm.weight, eps=1e-06)
        mlp = w.decoder.block[1].layer[2].DenseReluDense
        wi = F.linear(h, mlp.wi.weight)
        activation = F.relu(wi)
        feed_forward = F.linear(activation, mlp.wo.weight)
        x = x + feed_forward
        return x


class FinalLayerNormToLmHead(Block):
    def forward(self, x, labels):
        w = self.weights
        # x: [8, 16, 64] → [4, 16, 64] {dp: S(0)}
        # labels: [8, 16] → [4, 16] {dp: S(0)}
        h = kernels.rms_norm(x, w.decoder.final_layer_norm.weight, eps=1e-06)
        product = h * 0.125
        # lm_head
        logits = F.linear(product, w.shared.weight)
        losses = ops.cross_entropy(logits, labels, reuse_logits=True)
        valid = labels != -100
        total = spmd.reinterpret(torch.sum(losses), "dp", src=V, dst=P)   # [] {dp: P}
        count = spmd.reinterpret(torch.sum(valid), "dp", src=V, dst=P)    # [] {dp: P}
        count = spmd.all_reduce(count, "dp", src=P, dst=R)                # 8 B
        loss = total / count
        loss = spmd.all_reduce(loss, "dp", src=P, dst=I)                  # 2 B
        return loss


class Program(Block):
    def constants(self):
        # They depend on the shapes alone: computed once, whole on every rank.
        w = self.weights
        # encoder
        positions = torch.arange(16).unsqueeze(0).unsqueeze(1)            # [1, 1, 16] {dp: R}
        positions_1 = positions.unsqueeze(3)
        positions_2 = torch.arange(16, dtype=torch.int64)                 # [16] {dp: R}
        positions_3 = positions_2.unsqueeze(1)
        positions_2 = positions_2.unsqueeze(0)
        relative_positions = positions_2 - positions_3
        is_greater = (relative_positions > 0).to(torch.int64)
        product = is_greater * 16
        distances = torch.abs(relative_positions)
        mask = distances < 8
        distances_1 = distances.to(torch.float32)
        quotient = distances_1 / 8
        logarithm = torch.log(quotient)
        quotient = logarithm / 2.772588722239781
        product_1 = (quotient * 8).to(torch.int64)
        added = product_1 + 8
        filled = torch.full_like(added, 15)
        smallest = torch.min(added, filled)
        selected = torch.where(mask, distances, smallest)
        indices = product + selected
        literal = w.lifted_tensor_0.expand(8)                             # [8] {dp: R}
        # decoder
        positions = positions.unsqueeze(2)
        mask = (positions <= positions_1).expand(8, 1, 16, 16)
        zeros = torch.zeros_like(relative_positions)
        relative_positions = torch.min(relative_positions, zeros)
        distances = -relative_positions
        mask_1 = distances < 16
        distances_1 = distances.to(torch.float32)
        quotient = distances_1 / 16
        logarithm = torch.log(quotient)
        quotient = logarithm / 2.0794415416798357
        product = (quotient * 16).to(torch.int64)
        added = product + 16
        filled = torch.full_like(added, 31)
        smallest = torch.min(added, filled)
        indices_1 = torch.where(mask_1, distances, smallest)
        return (indices, literal, indices_1, mask)

    def forward(self, input_ids, labels, indices, literal, indices_1, mask):
        w = self.weights
        # input_ids: [8, 16] → [4, 16] {dp: S(0)}
        # labels: [8, 16] → [4, 16] {dp: S(0)}
        x = self.unit(EmbedTokensToLayer0(w))(input_ids, indices)
        x = self.unit(LayerNormToLayer1(w))(x)
        x = self.unit(FinalLayerNormToLayer1(w))(x, labels, literal, indices_1, mask)
        x = self.unit(LayerNormToLayer2(w))(x)
        loss = self.unit(FinalLayerNormToLmHead(w))(x, labels)
        return {"loss": loss}
