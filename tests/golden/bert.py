"""BertForMaskedLM on mesh dp=2,cp=1,tp=1, written by Meshwright.

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
from runtime.kernels.tiles import load, rows_from, share_of_rows, store, store_column_sums, whole_tile
from runtime.programs.program import Block


# add, add
# of bert.embeddings
def _add_add_plain(word_embeddings, token_type_embeddings, position_embeddings):
    added = word_embeddings + token_type_embeddings
    added_1 = added + position_embeddings
    return added_1


@triton.jit
def _add_add_forward(
    word_embeddings_ptr, token_type_embeddings_ptr, position_embeddings_ptr, added_1_ptr, word_embeddings_strides,
    token_type_embeddings_strides, position_embeddings_strides, SPACE, TILE: tl.constexpr,
):
    rows, columns, exists = whole_tile(SPACE, TILE)
    word_embeddings = load(word_embeddings_ptr, word_embeddings_strides, rows, columns, exists, SPACE).to(tl.float32)
    token_type_embeddings = load(
        token_type_embeddings_ptr, token_type_embeddings_strides, rows, columns, exists, SPACE
    ).to(tl.float32)
    position_embeddings = load(
        position_embeddings_ptr, position_embeddings_strides, rows, columns, exists, SPACE
    ).to(tl.float32)
    added = word_embeddings + token_type_embeddings
    added_1 = added + position_embeddings
    store(added_1_ptr, added_1, rows, columns, exists, SPACE)


@triton.jit
def _add_add_backward(
    grad_added_1_ptr, grad_position_embeddings_ptr, grad_added_1_strides, SPACE, TILE: tl.constexpr, SHARES,
):
    first, last, columns = share_of_rows(SPACE, TILE, SHARES)
    grad_position_embeddings_total = tl.full(TILE, 0.0, tl.float32)
    for start in range(first, last, TILE[0]):
        rows, exists = rows_from(start, last, columns, SPACE, TILE)
        grad_added_1 = load(grad_added_1_ptr, grad_added_1_strides, rows, columns, exists, SPACE).to(tl.float32)
        grad_position_embeddings_total += tl.where(exists, grad_added_1, 0.0)
    store_column_sums(grad_position_embeddings_ptr, grad_position_embeddings_total, columns, SPACE, TILE)


_add_add = kernels.Chain(
    plain=_add_add_plain,
    forward=_add_add_forward,
    inputs={'word_embeddings': 'bfloat16', 'token_type_embeddings': 'bfloat16', 'position_embeddings': 'bfloat16'},
    outputs={'added_1': 'bfloat16'},
    columns=2,
    backward=_add_add_backward,
    grads=['added_1'],
    saved=[],
    gradients={'position_embeddings': 'row'},
    passed={'word_embeddings': 'added_1', 'token_type_embeddings': 'added_1'},
)


class EmbeddingsToLayernorm(Block):
    def forward(self, input_ids):
        w = self.weights
        # input_ids: [8, 16] → [4, 16] {dp: S(0)}
        position_ids = w.bert.embeddings.position_ids[:, :16]             # [1, 16] {dp: R}
        indices = torch.gather(w.bert.embeddings.token_type_ids, 1, position_ids)
        # [8, 16] → [4, 16] {dp: S(0)}
        indices = spmd.reinterpret(indices.expand(4, 16), "dp", src=R, dst=V, expert_mode=True)
        embeddings = w.bert.embeddings
        word_embeddings = kernels.embedding(input_ids, embeddings.word_embeddings.weight, padding_idx=0)
        token_type_embeddings = kernels.embedding(indices, embeddings.token_type_embeddings.weight)
        position_embeddings = kernels.embedding(position_ids, embeddings.position_embeddings.weight)
        added = _add_add(word_embeddings, token_type_embeddings, position_embeddings)
        x = kernels.layer_norm(added, embeddings.LayerNorm.weight, embeddings.LayerNorm.bias, eps=1e-12)
        return x


class BertLayer(Block):  # bert.encoder.layer.{0..1}
    def forward(self, x):
        w = self.weights
        # x: [8, 16, 64] → [4, 16, 64] {dp: S(0)}
        attn = w.attention.self
        q = F.linear(x, attn.query.weight, attn.query.bias).unflatten(-1, (8, 8)).transpose(1, 2)
        k = F.linear(x, attn.key.weight, attn.key.bias).unflatten(-1, (8, 8)).transpose(1, 2)
        v = F.linear(x, attn.value.weight, attn.value.bias).unflatten(-1, (8, 8)).transpose(1, 2)
        attention = F.scaled_dot_product_attention(q, k, v, scale=0.3535533905932738).transpose(1, 2).flatten(2)
        attention = F.linear(attention, w.attention.output.dense.weight, w.attention.output.dense.bias)
        _, x = kernels.add_layer_norm(
            attention, x, w.attention.output.LayerNorm.weight, w.attention.output.LayerNorm.bias, eps=1e-12
        )
        intermediate = F.linear(x, w.intermediate.dense.weight)
        activation = kernels.bias_gelu(intermediate, w.intermediate.dense.bias)
        output = F.linear(activation, w.output.dense.weight, w.output.dense.bias)
        _, x = kernels.add_layer_norm(output, x, w.output.LayerNorm.weight, w.output.LayerNorm.bias, eps=1e-12)
        return x


class Dense(Block):
    def forward(self, h):
        w = self.weights
        # h: [8, 16, 64] → [4, 16, 64] {dp: S(0)}
        transform = F.linear(h, w.cls.predictions.transform.dense.weight)
        return transform


class TransformActFnToDecoder(Block):
    def forward(self, transform, labels):
        w = self.weights
        # transform: [8, 16, 64] → [4, 16, 64] {dp: S(0)}
        # labels: [8, 16] → [4, 16] {dp: S(0)}
        # cls.predictions.transform
        activation = kernels.bias_gelu(transform, w.cls.predictions.transform.dense.bias)
        h = kernels.layer_norm(
            activation, w.cls.predictions.transform.LayerNorm.weight, w.cls.predictions.transform.LayerNorm.bias,
            eps=1e-12
        )
        logits = F.linear(h, w.bert.embeddings.word_embeddings.weight, w.cls.predictions.bias)
        losses = ops.cross_entropy(logits, labels, reuse_logits=True)
        valid = labels != -100
        total = spmd.reinterpret(torch.sum(losses), "dp", src=V, dst=P)   # [] {dp: P}
        count = spmd.reinterpret(torch.sum(valid), "dp", src=V, dst=P)    # [] {dp: P}
        count = spmd.all_reduce(count, "dp", src=P, dst=R)                # 8 B
        loss = total / count
        loss = spmd.all_reduce(loss, "dp", src=P, dst=I)                  # 2 B
        return loss


class Program(Block):
    def forward(self, input_ids, labels):
        w = self.weights
        # input_ids: [8, 16] → [4, 16] {dp: S(0)}
        # labels: [8, 16] → [4, 16] {dp: S(0)}
        x = self.unit(EmbeddingsToLayernorm(w))(input_ids)
        # bert.encoder.layer.{0..1}
        for layer in w.bert.encoder.layer[:2]:                            # 2 copies
            x = self.unit(BertLayer(layer))(x)
        transform = self.unit(Dense(w))(x)
        loss = self.unit(TransformActFnToDecoder(w))(transform, labels)
        return {"loss": loss}
