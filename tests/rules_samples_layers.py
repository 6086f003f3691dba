"""Samplers (see ``rules_samples``) of layers and losses."""

from __future__ import annotations

import torch
from rules_samples import Arguments, Draw, sampler


@sampler("layer_norm")
def layer_norm(draw: Draw) -> Arguments:
    outer, inner = draw.shape(1, 2), draw.shape(1, 2)
    inner[-1] = 4
    affine = (draw.normal(*inner), draw.normal(*inner)) if draw.flag() else ()
    return (draw.normal(*outer, *inner), inner, *affine), {}


@sampler("rms_norm")
def rms_norm(draw: Draw) -> Arguments:
    weight = (draw.normal(4),) if draw.flag() else ()
    return (draw.normal(*draw.shape(1, 2), 4), [4], *weight), {}


@sampler("group_norm")
def group_norm(draw: Draw) -> Arguments:
    groups = draw.of(1, 2, 4)
    channels = groups * draw.int(1, 3)
    affine = (draw.normal(channels), draw.normal(channels)) if draw.flag() else ()
    return (draw.normal(draw.size(), channels, 3), groups, *affine), {}


@sampler("batch_norm")
def batch_norm(draw: Draw) -> Arguments:
    channels = draw.size()
    weight, bias = (draw.normal(channels), draw.normal(channels)) if draw.flag() else (None, None)
    mean, var = draw.normal(channels), draw.between(0.5, 2.0, channels)
    training = draw.flag()
    x = draw.normal(draw.of(2, 4), channels, *draw.of((), (3,), (2, 4)))
    running = (None, None) if training and draw.flag() else (mean, var)
    return (x, weight, bias, *running, training, 0.1, 1e-5, False), {}


@sampler("scaled_dot_product_attention")
def attention(draw: Draw) -> Arguments:
    batch, heads, length, keys, width = draw.size(), draw.of(1, 2, 4), draw.size(), draw.size(), draw.of(2, 3)
    causal = draw.flag()
    keys = length if causal and draw.flag() else keys
    members = draw.of(1, 1, 2, 3)
    key_heads, query_heads = heads, heads * members
    if draw.int(0, 3) == 0:  # no heads
        query, key, value = ([batch, rows, width] for rows in (length, keys, keys))
        members = 1
    else:
        query, key, value = ([batch, count, rows, width] for count, rows in
                             ((query_heads, length), (key_heads, keys), (key_heads, keys)))  # fmt: skip
    options = {"enable_gqa": True} if members > 1 else {}
    if causal:
        options["is_causal"] = True
    elif draw.flag():
        mask_shape = draw.broadcast([*query[:-1], keys])
        mask_shape = [*[1] * (2 - len(mask_shape)), *mask_shape]
        mask = draw.normal(*mask_shape)
        options["attn_mask"] = draw.bools(*mask_shape) | torch.eye(keys, dtype=torch.bool)[:1] if draw.flag() else mask
        if options["attn_mask"].dtype == torch.bool:
            options["attn_mask"] = (
                torch.ones(mask_shape, dtype=torch.bool) if not mask_shape else _some(draw, mask_shape)
            )
    if draw.flag():
        options["scale"] = 0.4
    return (draw.normal(*query), draw.normal(*key), draw.normal(*value)), options


def _some(draw: Draw, shape: list[int]) -> torch.Tensor:
    """A mask whose first key is always seen: a row that sees nothing has no softmax."""
    mask = draw.bools(*shape)
    mask[..., 0] = True
    return mask


@sampler("embedding")
def embedding(draw: Draw) -> Arguments:
    rows = draw.of(3, 4, 8)
    padding = draw.of(-1, 1)
    return (draw.normal(rows, draw.size()), draw.integers(0, rows, *draw.shape(1, 2)), padding), {}


@sampler("meshwright.cross_entropy")
def cross_entropy(draw: Draw) -> Arguments:
    classes = draw.of(3, 4, 8)
    shape = draw.shape(0, 2)
    target = draw.integers(0, classes, *shape)
    target[draw.bools(*shape)] = -100
    options = {"label_smoothing": 0.1} if draw.flag() else {}
    return (5.0 * draw.normal(*shape, classes), target), {**options, "ignore_index": -100}


def _convolution(draw: Draw, dims: int, transposed: bool) -> Arguments:
    groups = draw.of(1, 1, 2, 4)
    inside, outside = draw.of(1, 2, 3), draw.of(1, 2, 3)
    weight = [groups * inside, outside] if transposed else [groups * outside, inside]
    batch = [] if draw.int(0, 4) == 0 else [draw.size()]
    x = draw.normal(*batch, groups * inside, *[4] * dims)
    bias = draw.normal(groups * outside) if draw.flag() else None
    tail = (
        ([1] * dims, [0] * dims, [0] * dims, groups)
        if transposed
        else ([draw.int(1, 2)] * dims, [1] * dims, [1] * dims, groups)
    )
    return (x, draw.normal(*weight, *[2] * dims), bias, *tail), {}


@sampler("conv1d")
def conv1d(draw: Draw) -> Arguments:
    return _convolution(draw, 1, False)


@sampler("conv2d")
def conv2d(draw: Draw) -> Arguments:
    return _convolution(draw, 2, False)


@sampler("conv3d")
def conv3d(draw: Draw) -> Arguments:
    return _convolution(draw, 3, False)


@sampler("conv_transpose1d")
def conv_transpose1d(draw: Draw) -> Arguments:
    return _convolution(draw, 1, True)


@sampler("conv_transpose2d.input")
def conv_transpose2d(draw: Draw) -> Arguments:
    return _convolution(draw, 2, True)


@sampler("conv_transpose3d.input")
def conv_transpose3d(draw: Draw) -> Arguments:
    return _convolution(draw, 3, True)


def _padded_convolution(draw: Draw, dims: int) -> Arguments:
    weight = draw.normal(draw.size(), 2, *[3] * dims)
    bias = draw.normal(weight.shape[0]) if draw.flag() else None
    return (draw.normal(draw.size(), 2, *[4] * dims), weight, bias, [1] * dims, draw.of("same", "valid")), {}


@sampler("conv1d.padding")
def conv1d_padding(draw: Draw) -> Arguments:
    return _padded_convolution(draw, 1)


@sampler("conv2d.padding")
def conv2d_padding(draw: Draw) -> Arguments:
    return _padded_convolution(draw, 2)


@sampler("conv3d.padding")
def conv3d_padding(draw: Draw) -> Arguments:
    return _padded_convolution(draw, 3)


def _image(draw: Draw, dims: int) -> torch.Tensor:
    return draw.normal(draw.size(), draw.size(), *[4] * dims)


@sampler("adaptive_avg_pool1d", "avg_pool1d", "max_pool1d", "adaptive_max_pool1d")
def pool1d(draw: Draw) -> Arguments:
    return (_image(draw, 1), [2]), {}


@sampler("adaptive_avg_pool2d", "avg_pool2d", "max_pool2d", "adaptive_max_pool2d")
def pool2d(draw: Draw) -> Arguments:
    return (_image(draw, 2), [2, 2]), {}


@sampler("adaptive_avg_pool3d", "avg_pool3d", "max_pool3d")
def pool3d(draw: Draw) -> Arguments:
    return (_image(draw, 3), [2, 2, 2]), {}


@sampler("upsample_nearest1d.vec")
def nearest1d(draw: Draw) -> Arguments:
    return (_image(draw, 1), *draw.of(([8], None), (None, [2.0]))), {}


@sampler("upsample_nearest2d.vec")
def nearest2d(draw: Draw) -> Arguments:
    return (_image(draw, 2), *draw.of(([8, 6], None), (None, [2.0, 2.0]))), {}


@sampler("upsample_nearest3d.vec")
def nearest3d(draw: Draw) -> Arguments:
    return (_image(draw, 3), [8, 6, 4], None), {}


@sampler("upsample_linear1d.vec")
def linear1d(draw: Draw) -> Arguments:
    return (_image(draw, 1), [8], draw.flag(), None), {}


@sampler("upsample_bilinear2d.vec", "upsample_bicubic2d.vec")
def bilinear2d(draw: Draw) -> Arguments:
    return (_image(draw, 2), [8, 6], draw.flag(), None), {}


@sampler("reflection_pad1d", "replication_pad1d")
def pad1d(draw: Draw) -> Arguments:
    return (_image(draw, 1), [1, 2]), {}


@sampler("reflection_pad2d", "replication_pad2d")
def pad2d(draw: Draw) -> Arguments:
    return (_image(draw, 2), [1, 2, 1, 0]), {}


@sampler("pixel_shuffle")
def pixel_shuffle(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), 8, 2, 2), 2), {}


@sampler("pixel_unshuffle")
def pixel_unshuffle(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), 2, 4, 4), 2), {}


@sampler("im2col")
def im2col(draw: Draw) -> Arguments:
    return (_image(draw, 2), [2, 2], [1, 1], [0, 0], [1, 1]), {}


@sampler("col2im")
def col2im(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]), {}


@sampler("_weight_norm")
def weight_norm(draw: Draw) -> Arguments:
    rows = draw.size()
    magnitudes, dim = (draw.normal(rows, 1, 1), 0) if draw.flag() else (draw.normal(), -1)
    return (draw.normal(rows, draw.size(), 3), magnitudes, dim), {}


@sampler("view_as_real")
def view_as_real(draw: Draw) -> Arguments:
    return (torch.complex(draw.normal(4, 2), draw.normal(4, 2)),), {}


@sampler("view_as_complex")
def view_as_complex(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape(1, 2), 2),), {}


@sampler("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div")
def loss(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), draw.between(0.1, 0.9, *shape), draw.int(0, 2)), {}


@sampler("binary_cross_entropy_with_logits", "binary_cross_entropy")
def binary_loss(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    weight = draw.between(0.5, 1.0, *shape) if draw.flag() else None
    return (draw.between(0.1, 0.9, *shape), draw.between(0.1, 0.9, *shape), weight), {"reduction": draw.int(0, 2)}


def _signs(draw: Draw, *shape: int) -> torch.Tensor:
    return 2.0 * draw.integers(0, 2, *shape).double() - 1.0


@sampler("margin_ranking_loss")
def ranking_loss(draw: Draw) -> Arguments:
    shape = draw.shape(1, 2)
    return (draw.normal(*shape), draw.normal(*draw.broadcast(shape)), _signs(draw, *shape), 0.1, 0), {}


@sampler("hinge_embedding_loss")
def hinge_loss(draw: Draw) -> Arguments:
    shape = draw.shape(1, 2)
    return (draw.normal(*shape), _signs(draw, *shape), 1.0, 0), {}


@sampler("poisson_nll_loss")
def poisson_loss(draw: Draw) -> Arguments:
    shape = draw.shape(1, 2)
    return (draw.normal(*shape), draw.between(0.1, 3.0, *shape), True, False, 1e-8, 0), {}


@sampler("triplet_margin_loss")
def triplet_loss(draw: Draw) -> Arguments:
    shape = (*draw.shape(1, 2), 3)
    return (*(draw.normal(*shape) for _ in range(3)), 1.0, 2.0, 1e-6, draw.flag(), 0), {}


@sampler("cosine_embedding_loss")
def cosine_loss(draw: Draw) -> Arguments:
    batch = draw.size()
    return (draw.normal(batch, 3), draw.normal(batch, 3), _signs(draw, batch), 0.1, 0), {}


@sampler("multi_margin_loss")
def multi_margin_loss(draw: Draw) -> Arguments:
    batch = draw.size()
    weight = draw.between(0.5, 1.0, 3) if draw.flag() else None
    return (draw.normal(batch, 3), draw.integers(0, 3, batch), 1, 1.0, weight, 0), {}


@sampler("multilabel_margin_loss")
def multilabel_loss(draw: Draw) -> Arguments:
    batch = draw.size()
    return (draw.normal(batch, 3), draw.integers(-1, 3, batch, 3), 0), {}


@sampler("cosine_similarity")
def cosine(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), draw.normal(*draw.broadcast(shape)), draw.dim(len(shape))), {}


@sampler("pairwise_distance")
def distance(draw: Draw) -> Arguments:
    shape = (*draw.shape(0, 2), 3)
    return (draw.normal(*shape), draw.normal(*shape), 2.0, 1e-6, draw.flag()), {}


@sampler("vdot")
def vdot(draw: Draw) -> Arguments:
    length = draw.size()
    return (draw.normal(length), draw.normal(length)), {}
