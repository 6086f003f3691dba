"""Rules of operators that pick, place or join parts of tensors: the dims they touch stay whole, the others are free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from passes.ir.graph import Ref
from passes.rules.operator_call import OperatorCall, aligned, broadcast, named_dims
from passes.rules.rule import Dims, ShardingRule


def sliced(call: OperatorCall) -> ShardingRule:
    """``slice``, ``narrow``, ``split``, ``chunk``: their dim stays whole unless it comes out whole and in order."""
    shape = call.inputs[0].shape
    if len(call.outputs) == 1 and call.outputs[0].shape == shape and call.get("step", 1) == 1:
        dims = named_dims(shape)
    else:
        dims = named_dims(shape, whole=[call.dim("dim", len(shape))])
    # A stepped slice is emitted as indexing, through which the checker lets no partial sums.
    return call.rule([dims], [dims for _ in call.outputs], terms=((0,),), passes_partial=call.get("step", 1) == 1)


def removed(call: OperatorCall) -> ShardingRule:
    """``select`` and ``unbind``: their dim is gone from the outputs."""
    shape = call.inputs[0].shape
    dim = call.dim("dim", len(shape))
    dims = named_dims(shape, whole=[dim])
    return call.rule([dims], [dims[:dim] + dims[dim + 1 :] for _ in call.outputs], terms=((0,),))


def concatenated(call: OperatorCall) -> ShardingRule:
    """``cat``: linear in all operands together, their dim whole; empty 1-D operands are legal and carry nothing."""
    shape = call.outputs[0].shape
    dims = named_dims(shape, whole=[call.dim("dim", len(shape))])
    inputs = [dims if len(value.shape) == len(shape) else ((),) * len(value.shape) for value in call.inputs]
    return call.rule(inputs, [dims], terms=tuple((index,) for index in range(len(inputs))))


def stacked(call: OperatorCall) -> ShardingRule:
    """``stack``: a new dim that nothing can cut."""
    shape = call.outputs[0].shape
    dim = call.dim("dim", len(shape))
    dims = named_dims(call.inputs[0].shape)
    out = (*dims[:dim], (), *dims[dim:])
    return call.rule([dims] * len(call.inputs), [out], terms=tuple((index,) for index in range(len(call.inputs))))


def padded(call: OperatorCall) -> ShardingRule:
    """``pad``: padded (or cropped) dims stay whole, also where a pad and a crop leave the size as it was."""
    shape, pad = call.inputs[0].shape, call["pad"]
    touched = [len(shape) - 1 - place for place in range(len(pad) // 2) if pad[2 * place] or pad[2 * place + 1]]
    dims = named_dims(shape, whole=touched)
    return call.rule([dims], [dims])


def along_dim(call: OperatorCall) -> ShardingRule:
    """``gather``, ``scatter``, ``index_add``…: dims other than theirs that all operands and the output share."""
    name = "dim"
    rank = len(call.outputs[0].shape)
    dim = call.dim(name, rank)
    same_rank = [value.shape for value in (*call.inputs, *call.outputs) if len(value.shape) == rank]
    free = [place for place in range(rank) if place != dim and len({shape[place] for shape in same_rank}) == 1]
    whole = [place for place in range(rank) if place not in free]

    def dims_of(shape: Sequence[int]) -> Dims:
        return named_dims(shape, whole=whole) if len(shape) == rank else ((),) * len(shape)

    linear = call.node.op == "aten.gather.default"
    return call.rule(
        [dims_of(value.shape) for value in call.inputs],
        [dims_of(value.shape) for value in call.outputs],
        terms=((0,),) if linear else None,
        passes_partial=False,
    )


def index_select(call: OperatorCall) -> ShardingRule:
    """``index_select``: rows picked by a list of indices; both the other dims and the list may be cut."""
    shape = call.shape("self")
    dim = call.dim("dim", len(shape))
    dims = named_dims(shape, whole=[dim])
    picked: Dims = (("i",) if call.outputs[0].shape[dim] != 1 else (),)
    index = picked if len(call.shape("index")) == 1 else ()
    out = dims[:dim] + (picked if index else ((),)) + dims[dim + 1 :]
    return call.rule([dims, index], [out], terms=((0,),), passes_partial=False)


def picked_along(call: OperatorCall) -> ShardingRule | None:
    """``take_along_dim``: as ``gather``, other dims aligned as broadcasting does."""
    if call.get("dim") is None or len(call.shape("self")) != len(call.shape("indices")):
        return None
    shape = call.outputs[0].shape
    dim = call.dim("dim", len(shape))
    full = named_dims(shape, whole=[dim])
    inputs = [aligned(value.shape, full) for value in call.inputs]
    return call.rule(inputs, [full])


def sorted_search(call: OperatorCall) -> ShardingRule | None:
    """``searchsorted``: the values, and with them the rows of boundaries where each row of values has its own."""
    if call.has("sorter"):
        return None
    boundaries, values = call.shape("sorted_sequence"), call.shape("self")
    dims = named_dims(values)
    rows: Dims = (*dims[:-1], ()) if len(boundaries) > 1 else ((),)
    return call.rule(call.by_slot({"sorted_sequence": rows, "self": dims}), [dims])


def indexed(call: OperatorCall) -> ShardingRule | None:
    """``x[i, :, j]`` with integer index tensors: the dims not indexed, and the dims of the indices."""
    shape, entries = call.shape("self"), list(call["indices"])
    tensors = call.inputs[1:]
    if any(value.dtype in ("bool", "uint8") for value in tensors):
        return None
    places = [dim for dim, entry in enumerate(entries) if isinstance(entry, Ref)]
    if not places:
        return None
    index_dims = named_dims(broadcast(*(value.shape for value in tensors)), prefix="i")
    dims = named_dims(shape, whole=places)
    rest = [factors for dim, factors in enumerate(dims) if dim not in places]
    adjacent = places[-1] - places[0] + 1 == len(places)
    front = places[0] if adjacent else 0
    out = (*rest[:front], *index_dims, *rest[front:])
    inputs = [dims, *(aligned(value.shape, index_dims) for value in tensors)]
    return call.rule(inputs, [out], terms=((0,),), passes_partial=False)


def indexed_put(call: OperatorCall) -> ShardingRule | None:
    """``index_put`` with indices into the leading dims: the dims behind them."""
    shape, entries = call.shape("self"), list(call["indices"])
    places = [dim for dim, entry in enumerate(entries) if isinstance(entry, Ref)]
    if places != list(range(len(places))) or not places:
        return None
    indices = call.inputs[1 : 1 + len(places)]
    if any(value.dtype in ("bool", "uint8") for value in indices):
        return None
    dims = named_dims(shape, whole=places)
    put = aligned(call.shape("values"), (((),) * len(call.shape("values")) + dims[len(places) :]))
    return call.rule([dims, *(((),) * len(v.shape) for v in indices), put], [dims])


def written(call: OperatorCall) -> ShardingRule:
    """``slice_scatter`` and ``select_scatter``: a part of one dim is replaced; that dim stays whole."""
    shape = call.shape("self")
    dim = call.dim("dim", len(shape))
    dims = named_dims(shape, whole=[dim])
    part = dims if len(call.shape("src")) == len(shape) else dims[:dim] + dims[dim + 1 :]
    return call.rule([dims, part], [dims])


def halved(call: OperatorCall) -> ShardingRule:
    """``glu``: its dim is split in two halves that meet, so it stays whole."""
    shape = call.inputs[0].shape
    dims = named_dims(shape, whole=[call.dim("dim", len(shape))])
    return call.rule([dims], [dims])


def top(call: OperatorCall) -> ShardingRule:
    """``topk``: its dim stays whole."""
    shape = call.inputs[0].shape
    dims = named_dims(shape, whole=[call.dim("dim", len(shape))])
    return call.rule([dims], [dims for _ in call.outputs])


def unfolded(call: OperatorCall) -> ShardingRule:
    """``unfold`` (windows along one dim, in a new last dim)."""
    shape = call.inputs[0].shape
    dims = named_dims(shape, whole=[call.dim("dimension", len(shape))])
    return call.rule([dims], [(*dims, ())], terms=((0,),))


def difference(call: OperatorCall) -> ShardingRule:
    """``diff`` along one dim."""
    shape = call.inputs[0].shape
    dims = named_dims(shape, whole=[call.dim("dim", len(shape))])
    return call.rule([dims] * len(call.inputs), [dims])


def columns(call: OperatorCall) -> ShardingRule:
    """``im2col`` and ``col2im``: the batch."""
    batch: Dims = (("b",) if call.inputs[0].shape[0] != 1 else (),)
    rank_in, rank_out = len(call.inputs[0].shape), len(call.outputs[0].shape)
    return call.rule([batch + ((),) * (rank_in - 1)], [batch + ((),) * (rank_out - 1)])


def diagonal(call: OperatorCall) -> ShardingRule:
    """``diagonal``: the two dims it runs along are gone, and the diagonal is last."""
    shape = call.inputs[0].shape
    pair = [call.dim("dim1", len(shape)), call.dim("dim2", len(shape))]
    dims = named_dims(shape, whole=pair)
    out = tuple(factors for dim, factors in enumerate(dims) if dim not in pair)
    return call.rule([dims], [(*out, ())], terms=((0,),))


def created(call: OperatorCall) -> ShardingRule:
    """Random numbers of a given size, drawn by position: every dim may be cut."""
    return call.rule([], [named_dims(call.outputs[0].shape)])


COMPUTED: dict[str, Callable[[OperatorCall], ShardingRule | None]] = {
    "aten.rand.default": created,
    "aten.randn.default": created,
    "aten.randint.low": created,
    "aten.slice.Tensor": sliced,
    "aten.narrow.default": sliced,
    "aten.split.Tensor": sliced,
    "aten.split.sizes": sliced,
    "aten.split_with_sizes.default": sliced,
    "aten.chunk.default": sliced,
    "aten.select.int": removed,
    "aten.unbind.int": removed,
    "aten.cat.default": concatenated,
    "aten.concat.default": concatenated,
    "aten.concatenate.default": concatenated,
    "aten.stack.default": stacked,
    "aten.pad.default": padded,
    "aten.constant_pad_nd.default": padded,
    "aten.gather.default": along_dim,
    "aten.scatter.src": along_dim,
    "aten.scatter.value": along_dim,
    "aten.scatter_add.default": along_dim,
    "aten.scatter_reduce.two": along_dim,
    "aten.index_add.default": along_dim,
    "aten.index_copy.default": along_dim,
    "aten.index_fill.int_Scalar": along_dim,
    "aten.index_fill.int_Tensor": along_dim,
    "aten.index_select.default": index_select,
    "aten.take_along_dim.default": picked_along,
    "aten.searchsorted.Tensor": sorted_search,
    "aten.index.Tensor": indexed,
    "aten.index_put.default": indexed_put,
    "aten.slice_scatter.default": written,
    "aten.select_scatter.default": written,
    "aten.glu.default": halved,
    "aten.topk.default": top,
    "aten.unfold.default": unfolded,
    "aten.diff.default": difference,
    "aten.im2col.default": columns,
    "aten.col2im.default": columns,
    "aten.diagonal.default": diagonal,
}
