"""Samplers (see ``rules_samples``) of reductions, of operators along a dim, and of those that pick or join parts."""

from __future__ import annotations

import torch
from rules_samples import Arguments, Draw, sampler


@sampler("sum.dim_IntList", "mean.dim", "amax", "amin", "var.dim", "std.dim", "any.dims", "all.dims", "logsumexp",
         "count_nonzero.dim_IntList")  # fmt: skip
def over_dims(draw: Draw) -> Arguments:
    shape = [*draw.shape(0, 3), draw.of(2, 4)]
    x = draw.normal(*shape)
    return (x, sorted({dim % len(shape) for dim in draw.dims(len(shape))})), {}


@sampler("sum.dim_IntList", "mean.dim", "amax", "amin", "logsumexp")
def over_dims_kept(draw: Draw) -> Arguments:
    (x, dims), _ = over_dims(draw)
    return (x, dims, draw.flag()), {}


@sampler("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def spread(draw: Draw) -> Arguments:
    shape = [*draw.shape(0, 2), 4]
    return (draw.normal(*shape), [-1]), {"correction": draw.int(0, 1), "keepdim": draw.flag()}


@sampler("var.dim", "std.dim", "var_mean.dim", "std_mean.dim")
def spread_dim(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape(0, 2), 4), [-1], draw.flag()), {}


@sampler("sum", "mean", "max", "min", "aminmax", "argmax", "argmin", "any", "all", "prod", "count_nonzero", "nansum",
         "linalg_vector_norm", "norm.Scalar", "median", "nanmedian")  # fmt: skip
def over_all(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape(0, 3)),), {}


@sampler("var", "std", "var_mean", "std_mean")
def spread_all(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape(0, 2), 4),), {}


@sampler("max.dim", "min.dim", "any.dim", "all.dim", "prod.dim_int", "median.dim", "nanmedian.dim")
def over_dim(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), draw.dim(len(shape)), draw.flag()), {}


@sampler("quantile.scalar", "nanquantile.scalar")
def quantile(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), 0.3, draw.of(None, draw.dim(len(shape))), draw.flag()), {}


@sampler("quantile", "nanquantile")
def quantiles(draw: Draw) -> Arguments:
    (x, _, dim, keepdim), _ = quantile(draw)
    return (x, draw.of(draw.between(0.1, 0.9), draw.between(0.1, 0.9, 2)), dim, keepdim), {}


@sampler("histc")
def histc(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape(1, 3)), 4, -1.0, 1.5), {}


@sampler("argmax", "argmin")
def argument(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), draw.of(None, draw.dim(len(shape))), draw.flag()), {}


@sampler("mode")
def mode(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), draw.dim(len(shape))), {}


@sampler("kthvalue", "topk")
def ranked(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    return (draw.normal(*shape), draw.int(1, shape[dim]), dim), {}


@sampler("linalg_vector_norm")
def vector_norm(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), 2.0, draw.of(None, draw.dims(len(shape))), draw.flag()), {}


@sampler("norm.ScalarOpt_dim")
def norm(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), 2.0, draw.dims(len(shape)), draw.flag()), {}


@sampler("softmax.int", "log_softmax.int", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort")
def along(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), draw.dim(len(shape))), {}


@sampler("_softmax", "_log_softmax")
def inner_softmax(draw: Draw) -> Arguments:
    (x, dim), _ = along(draw)
    return (x, dim, False), {}


@sampler("sort.stable")
def sort_stable(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape),), {"stable": True, "dim": draw.dim(len(shape)), "descending": draw.flag()}


@sampler("flip")
def flip(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), draw.dims(len(shape))), {}


@sampler("roll")
def roll(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dims = draw.dims(len(shape)) if draw.flag() else []
    return (draw.normal(*shape), [1] * max(len(dims), 1), dims), {}


@sampler("slice.Tensor")
def sliced(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    start = draw.of(None, 0, draw.int(0, shape[dim] - 1))
    end = draw.of(None, 9223372036854775807, -1 if shape[dim] > 1 and not start else shape[dim])
    return (draw.normal(*shape), dim, start, end, draw.int(1, 2)), {}


@sampler("narrow")
def narrow(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    start = draw.int(0, shape[dim] - 1)
    return (draw.normal(*shape), dim, start, draw.int(1, shape[dim] - start)), {}


@sampler("split.Tensor", "chunk")
def split(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), draw.int(1, 3), draw.dim(len(shape))), {}


@sampler("split_with_sizes", "split.sizes")
def split_with_sizes(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    first = draw.int(0, shape[dim])
    return (draw.normal(*shape), [first, shape[dim] - first], dim), {}


@sampler("select.int")
def select(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    return (draw.normal(*shape), dim, draw.int(-shape[dim], shape[dim] - 1)), {}


@sampler("unbind.int")
def unbind(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), draw.dim(len(shape))), {}


@sampler("cat", "concat", "concatenate")
def cat(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    parts = []
    for _ in range(draw.int(1, 3)):
        shape[dim] = draw.size()
        parts.append(draw.normal(*shape))
    return (parts, dim), {}


@sampler("stack")
def stack(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return ([draw.normal(*shape) for _ in range(draw.int(1, 3))], draw.dim(len(shape) + 1)), {}


@sampler("pad")
def pad(draw: Draw) -> Arguments:
    shape = [draw.of(2, 4) for _ in range(draw.int(1, 3))]
    amounts = [draw.int(-1, 2) for _ in range(2 * draw.int(1, len(shape)))]
    amounts = [max(amount, 0) if shape[-1 - place // 2] < 3 else amount for place, amount in enumerate(amounts)]
    return (draw.normal(*shape), amounts, "constant", 0.5), {}


@sampler("constant_pad_nd")
def constant_pad(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape(1, 3)), [draw.int(0, 2), draw.int(0, 2)], 0.5), {}


@sampler("gather")
def gather(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    index_shape = list(shape) if draw.flag() else [draw.int(1, size) for size in shape]
    return (draw.normal(*shape), dim, draw.integers(0, shape[dim], *index_shape)), {}


@sampler("scatter.src", "scatter_add")
def scatter(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    # one index along dim: no two entries go to the same place
    index_shape = [1 if place == dim % len(shape) else size for place, size in enumerate(shape)]
    return (draw.normal(*shape), dim, draw.integers(0, shape[dim], *index_shape), draw.normal(*index_shape)), {}


@sampler("scatter.value")
def scatter_value(draw: Draw) -> Arguments:
    (x, dim, index, _), _ = scatter(draw)
    return (x, dim, index, 0.5), {}


@sampler("scatter_reduce.two")
def scatter_reduce(draw: Draw) -> Arguments:
    (x, dim, index, source), _ = scatter(draw)
    return (x, dim, index, source, draw.of("sum", "amax")), {}


@sampler("index_add", "index_copy")
def index_add(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    source = list(shape)
    source[dim] = draw.int(1, shape[dim])
    return (draw.normal(*shape), dim, torch.randperm(shape[dim])[: source[dim]], draw.normal(*source)), {}


@sampler("index_fill.int_Scalar")
def index_fill(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    return (draw.normal(*shape), dim, draw.integers(0, shape[dim], draw.int(1, 3)), 0.5), {}


@sampler("index_fill.int_Tensor")
def index_fill_tensor(draw: Draw) -> Arguments:
    (x, dim, index, _), _ = index_fill(draw)
    return (x, dim, index, draw.normal()), {}


@sampler("index_select")
def index_select(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    return (draw.normal(*shape), dim, draw.integers(0, shape[dim], draw.size())), {}


@sampler("index.Tensor")
def index(draw: Draw) -> Arguments:
    shape = draw.shape(1, 4)
    places = sorted({dim % len(shape) for dim in draw.dims(len(shape))})
    picked = draw.shape(1, 2)
    entries = [
        draw.integers(0, size, *draw.broadcast(picked)) if dim in places else None for dim, size in enumerate(shape)
    ]
    return (draw.normal(*shape), entries[: places[-1] + 1]), {}


@sampler("index_put")
def index_put(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    picked = draw.int(1, shape[0])
    entry = torch.randperm(shape[0])[:picked]
    return (draw.normal(*shape), [entry], draw.normal(picked, *shape[1:]), draw.flag()), {}


@sampler("slice_scatter")
def slice_scatter(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    source = list(shape)
    source[dim] = draw.int(1, shape[dim])
    return (draw.normal(*shape), draw.normal(*source), dim, 0, source[dim]), {}


@sampler("select_scatter")
def select_scatter(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.int(0, len(shape) - 1)
    rest = shape[:dim] + shape[dim + 1 :]
    return (draw.normal(*shape), draw.normal(*rest), dim, draw.int(0, shape[dim] - 1)), {}


@sampler("glu")
def glu(draw: Draw) -> Arguments:
    shape = [*draw.shape(0, 2), 4]
    return (draw.normal(*shape), -1), {}


@sampler("unfold")
def unfold(draw: Draw) -> Arguments:
    shape = [*draw.shape(0, 2), 4]
    return (draw.normal(*shape), -1, draw.int(1, 3), draw.int(1, 2)), {}


@sampler("diff")
def diff(draw: Draw) -> Arguments:
    shape = [draw.of(2, 4) for _ in range(draw.int(1, 3))]
    return (draw.normal(*shape), 1, draw.dim(len(shape))), {}


@sampler("diagonal")
def diagonal(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape(2, 3)), 0, 0, 1), {}


@sampler("one_hot")
def one_hot(draw: Draw) -> Arguments:
    return (draw.integers(0, 5, *draw.shape(1, 3)), 5), {}


@sampler("bucketize.Tensor")
def bucketize(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape(1, 3)), torch.linspace(-1, 1, 5, dtype=torch.float64)), {}


@sampler("searchsorted.Tensor")
def searchsorted(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    if draw.flag():
        return (torch.linspace(-1, 1, 5, dtype=torch.float64), draw.normal(*shape)), {}
    return (draw.normal(*shape[:-1], 5).sort(-1)[0], draw.normal(*shape)), {}
