"""Rules of operators along one or more dims: sums, extrema, softmax, scans, norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from passes.rules.operator_call import OperatorCall, aligned, broadcast, named_dims
from passes.rules.rule import Dims, ShardingRule


def reduced(dims: Dims, over: tuple[int, ...], keepdim: bool) -> Dims:
    """Factors left of ``dims`` once the dims ``over`` are reduced."""
    return tuple(() if dim in over else factors for dim, factors in enumerate(dims) if keepdim or dim not in over)


def summed(call: OperatorCall) -> ShardingRule:
    """``sum`` and ``mean``: cutting a dim that is summed gives partial sums."""
    dims = named_dims(call.inputs[0].shape)
    over = call.dims("dim", len(dims))
    return call.rule([dims], [reduced(dims, over, call.get("keepdim", False))], terms=((0,),))


def extremal(call: OperatorCall) -> ShardingRule:
    """Reductions that are not sums (``amax``, ``argmax``, ``max.dim``, ``var``, ``any``…): their dims stay whole."""
    shape = call.inputs[0].shape
    over = call.dims("dim", len(shape))
    dims = named_dims(shape, whole=over)
    out = reduced(dims, over, call.get("keepdim", False))
    return call.rule([dims], [out for _ in call.outputs])


def quantiles(call: OperatorCall) -> ShardingRule:
    """``quantile`` along a dim, which stays whole; a list of them is the first dim of the output."""
    dims = named_dims(call.shape("self"), whole=call.dims("dim", len(call.shape("self"))))
    asked = named_dims(call.shape("q"), prefix="q") if call.has("q") else ()
    out = reduced(dims, call.dims("dim", len(dims)), call["keepdim"])
    return call.rule(call.by_slot({"self": dims, "q": asked}), [(*asked, *out)])


def compared(call: OperatorCall) -> ShardingRule:
    """``cosine_similarity``, ``pairwise_distance``: two tensors along a dim, which stays whole; others broadcast."""
    rank = max(len(value.shape) for value in call.inputs)
    over = (call.get("dim", -1) % rank,)
    full = named_dims(broadcast(*(value.shape for value in call.inputs)), whole=over)
    return call.rule(
        [aligned(value.shape, full) for value in call.inputs], [reduced(full, over, call.get("keepdim", False))]
    )


def counted(call: OperatorCall) -> ShardingRule | None:
    """``histc`` within given bounds: entries are counted, so every dim gives partial sums."""
    if call["min"] == call["max"]:
        return None  # The bounds are those of the data.
    return call.rule([named_dims(call.shape("self"))], [((),)], terms=((0,),), passes_partial=False)


def along(call: OperatorCall, *, name: str = "dim", linear: bool = False) -> ShardingRule:
    """Operators that keep the shape and work along some dims (softmax, scans, sorting, flips): those stay whole."""
    shape = call.inputs[0].shape
    dims = named_dims(shape, whole=call.dims(name, len(shape)))
    return call.rule([dims], [dims for _ in call.outputs], terms=((0,),) if linear else None)


def transformed(call: OperatorCall) -> ShardingRule:
    """Fourier transforms of one dim or of several (by default of all, or of as many as there are sizes): those stay
    whole."""
    shape = call.inputs[0].shape
    sizes = call.get("s")
    if call.get("dim") is None and sizes is not None:
        transformed_dims: tuple[int, ...] = tuple(range(len(shape) - len(sizes), len(shape)))
    else:
        transformed_dims = call.dims("dim", len(shape))
    dims = named_dims(shape, whole=transformed_dims)
    return call.rule([dims], [dims])


COMPUTED: dict[str, Callable[[OperatorCall], ShardingRule | None]] = {
    **dict.fromkeys(("aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim"), summed),
    **dict.fromkeys(
        (
            "aten.amax.default", "aten.amin.default", "aten.aminmax.default", "aten.argmax.default",
            "aten.argmin.default", "aten.max.default", "aten.min.default", "aten.max.dim", "aten.min.dim",
            "aten.var.default", "aten.var.dim", "aten.var.correction", "aten.std.default", "aten.std.dim",
            "aten.std.correction", "aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default",
            "aten.all.dim", "aten.all.dims", "aten.prod.default", "aten.prod.dim_int", "aten.logsumexp.default",
            "aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim", "aten.norm.Scalar", "aten.median.dim",
            "aten.mode.default", "aten.var_mean.correction", "aten.var_mean.dim", "aten.count_nonzero.default",
            "aten.count_nonzero.dim_IntList", "aten.nansum.default", "aten.kthvalue.default", "aten.median.default",
            "aten.nanmedian.default", "aten.nanmedian.dim", "aten.var_mean.default", "aten.std_mean.default",
            "aten.std_mean.dim", "aten.std_mean.correction",
        ),
        extremal,
    ),
    **dict.fromkeys(
        (
            "aten.softmax.int", "aten.log_softmax.int", "aten._softmax.default", "aten._log_softmax.default",
            "aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.cumprod.default",
            "aten.cummax.default", "aten.cummin.default", "aten.logcumsumexp.default",
        ),
        along,
    ),
    **dict.fromkeys(
        (
            *(f"aten.fft_{inverse}{kind}fft{dims}.default"
              for inverse in ("", "i") for kind in ("", "r", "h") for dims in ("", "2", "n")),
        ),
        transformed,
    ),
    **dict.fromkeys(
        (f"aten.{name}.{overload}" for name in ("quantile", "nanquantile") for overload in ("default", "scalar")),
        quantiles,
    ),
    **dict.fromkeys(("aten.cosine_similarity.default", "aten.pairwise_distance.default"), compared),
    "aten.histc.default": counted,
    **dict.fromkeys(("aten.fft_fftshift.default", "aten.fft_ifftshift.default"), along),
    "aten.cumsum.default": partial(along, linear=True),
    "aten.flip.default": partial(along, name="dims", linear=True),
    "aten.roll.default": partial(along, name="dims", linear=True),
}  # fmt: skip
