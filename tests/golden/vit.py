"""ViTForImageClassification on mesh dp=2,cp=1,tp=1, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, P, R, V

from runtime import kernels, ops
from runtime.programs.program import Block


class ProjectionToEmbeddings(Block):
    def forward(self, pixel_values):
        w = self.weights
        # pixel_values: [8, 3, 32, 32] → [4, 3, 32, 32] {dp: S(0)}
        patch_embeddings = F.conv2d(
            pixel_values, w.vit.embeddings.patch_embeddings.projection.weight,
            w.vit.embeddings.patch_embeddings.projection.bias, [8, 8]
        )
        patch_embeddings = patch_embeddings.flatten(2).transpose(1, 2)
        # [8, 1, 64] → [4, 1, 64] {dp: S(0)}
        cls_token = spmd.reinterpret(w.vit.embeddings.cls_token.expand(4, 1, 64), "dp", src=R, dst=V, expert_mode=True)
        embeddings = torch.cat([cls_token, patch_embeddings], dim=1)
        x = embeddings + w.vit.embeddings.position_embeddings
        return x


class ViTLayer(Block):  # vit.layers.{0..1}
    def forward(self, x):
        w = self.weights
        # x: [8, 17, 64] → [4, 17, 64] {dp: S(0)}
        h = kernels.layer_norm(x, w.layernorm_before.weight, w.layernorm_before.bias, eps=1e-12)
        attn = w.attention
        q = F.linear(h, attn.q_proj.weight, attn.q_proj.bias).unflatten(-1, (8, 8)).transpose(1, 2)
        k = F.linear(h, attn.k_proj.weight, attn.k_proj.bias).unflatten(-1, (8, 8)).transpose(1, 2)
        v = F.linear(h, attn.v_proj.weight, attn.v_proj.bias).unflatten(-1, (8, 8)).transpose(1, 2)
        attention = F.scaled_dot_product_attention(q, k, v, scale=0.3535533905932738).transpose(1, 2).flatten(2)
        attention = F.linear(attention, attn.o_proj.weight, attn.o_proj.bias)
        x, h = kernels.add_layer_norm(attention, x, w.layernorm_after.weight, w.layernorm_after.bias, eps=1e-12)
        fc1 = F.linear(h, w.mlp.fc1.weight)
        activation = kernels.bias_gelu(fc1, w.mlp.fc1.bias)
        feed_forward = F.linear(activation, w.mlp.fc2.weight, w.mlp.fc2.bias)
        x = feed_forward + x
        return x


class LayernormToClassifier(Block):
    def forward(self, x, labels):
        w = self.weights
        # x: [8, 17, 64] → [4, 17, 64] {dp: S(0)}
        # labels: [8] → [4] {dp: S(0)}
        h = kernels.layer_norm(x, w.vit.layernorm.weight, w.vit.layernorm.bias, eps=1e-12).select(1, 0)
        logits = F.linear(h, w.classifier.weight, w.classifier.bias)
        losses = ops.cross_entropy(logits, labels, reuse_logits=True)
        valid = labels != -100
        total = spmd.reinterpret(torch.sum(losses), "dp", src=V, dst=P)   # [] {dp: P}
        count = spmd.reinterpret(torch.sum(valid), "dp", src=V, dst=P)    # [] {dp: P}
        count = spmd.all_reduce(count, "dp", src=P, dst=R)                # 8 B
        loss = total / count
        loss = spmd.all_reduce(loss, "dp", src=P, dst=I)                  # 2 B
        return loss


class Program(Block):
    def forward(self, pixel_values, labels):
        w = self.weights
        # pixel_values: [8, 3, 32, 32] → [4, 3, 32, 32] {dp: S(0)}
        # labels: [8] → [4] {dp: S(0)}
        x = self.unit(ProjectionToEmbeddings(w))(pixel_values)
        # vit.layers.{0..1}
        for layer in w.vit.layers[:2]:                                    # 2 copies
            x = self.unit(ViTLayer(layer))(x)
        loss = self.unit(LayernormToClassifier(w))(x, labels)
        return {"loss": loss}
