"""Rules of layers: matmul of any rank, einsum, normalisation, attention, tables, convolution, pooling, losses."""

from __future__ import annotations

from collections.abc import Callable

from passes.ir.conversions import ALL_REDUCE
from passes.ir.graph import ITEM_SIZE
from passes.rules.operator_call import OperatorCall, named_dims
from passes.rules.rule import Dims, Reduction, ShardingRule
from passes.rules.rule_notation import instantiate

#: The notation of matmul by (rank of the left, rank of the right) with ranks above 2 as 3.
_MATMUL = {
    (1, 1): "k, k -> ",
    (1, 2): "k, kn -> n",
    (2, 1): "mk, k -> m",
    (1, 3): "k, ...kn -> ...n",
    (3, 1): "...mk, k -> ...m",
}


#: A matrix product with a summand, which may lack leading dims.
_ADDED = {
    "aten.addmm.default": ("mn", "mk, kn -> mn"),
    "aten.baddbmm.default": ("bmn", "bmk, bkn -> bmn"),
}


def added_matmul(call: OperatorCall) -> ShardingRule | None:
    """``addmm`` and the like."""
    summand, product = _ADDED[call.node.op]
    rank = len(call.shape("self"))
    return instantiate(f"{summand[len(summand) - rank :] if rank else ''} + {product}", call)


def matmul(call: OperatorCall) -> ShardingRule | None:
    first, second = (min(len(value.shape), 3) for value in call.inputs)
    return instantiate(_MATMUL.get((first, second), "...mk, ...kn -> ...mn"), call)


def einsum(call: OperatorCall) -> ShardingRule | None:
    """Letters of the equation are the factors, ``...`` stands for dims aligned from the right.

    A letter twice in one operand (a diagonal) stays whole. Without ``->`` the output has the letters that stand once,
    in the order of the alphabet.
    """
    equation = str(call["equation"]).replace(" ", "")
    left, arrow, output = equation.partition("->")
    operands = left.split(",")
    if not arrow:
        once = sorted(letter for letter in set(left) - set(".,") if left.count(letter) == 1)
        output = ("..." if "..." in left else "") + "".join(once)
    values = (*call.inputs, *call.outputs)
    if len(operands) + 1 != len(values):
        return None
    letters = [_letters(item, len(value.shape)) for item, value in zip((*operands, output), values)]
    diagonal = {letter for item in letters for letter in item if item.count(letter) > 1}
    dims = [
        tuple((letter,) if size != 1 and letter not in diagonal else () for letter, size in zip(item, value.shape))
        for item, value in zip(letters, values)
    ]
    return call.rule(dims[:-1], dims[-1:], terms=(tuple(range(len(operands))),))


def _letters(operand: str, rank: int) -> list[str]:
    """The factor of each dim of an operand of an equation."""
    before, ellipsis, after = operand.partition("...")
    rest = rank - len(before) - len(after) if ellipsis else 0
    return [*before, *(f"rest{place}" for place in reversed(range(rest))), *after]


def layer_norm(call: OperatorCall) -> ShardingRule:
    """``layer_norm`` and ``rms_norm``: the normalised dims stay whole, and so do weight and bias."""
    shape = call.shape("input")
    first = len(shape) - len(call["normalized_shape"])
    dims = named_dims(shape, whole=range(first, len(shape)))
    return call.rule(call.by_slot({"input": dims}), [dims])


def group_norm(call: OperatorCall) -> ShardingRule:
    """``group_norm``: the batch, and whole groups of channels."""
    shape = call.shape("input")
    groups = call["num_groups"]
    channel = ("g", "c")
    batch = ("b",) if shape[0] != 1 else ()
    dims: Dims = (batch, channel, *((),) * (len(shape) - 2))
    inputs = call.by_slot({"input": dims, "weight": (channel,), "bias": (channel,)})
    return call.rule(inputs, [dims], sizes={"g": groups, "c": shape[1] // groups})


def instance_norm(call: OperatorCall) -> ShardingRule | None:
    """``instance_norm``: each sample and channel apart, positions too where running statistics are used; none where
    these are written, which capture writes out."""
    if call["use_input_stats"] and call.has("running_mean"):
        return None
    shape = call.shape("input")
    dims = named_dims(shape, whole=range(2, len(shape)) if call["use_input_stats"] else ())
    names = ("weight", "bias", "running_mean", "running_var")
    return call.rule(call.by_slot({"input": dims, **dict.fromkeys(names, (dims[1],))}), [dims])


def channelwise(call: OperatorCall) -> ShardingRule:
    """``prelu``: a slope for each channel, or one for all."""
    dims = named_dims(call.inputs[0].shape)
    slope = dims[1] if call.inputs[1].num_elements > 1 and len(dims) > 1 else ()
    return call.rule([dims, (slope,) * len(call.inputs[1].shape)], [dims])


def quantised_channels(call: OperatorCall) -> ShardingRule:
    """``fake_quantize_per_channel_affine``: a scale and a zero point for each entry of the channel's dim."""
    dims = named_dims(call.shape("self"))
    channel = (dims[call["axis"]],)
    return call.rule(call.by_slot({"self": dims, "scale": channel, "zero_point": channel}), [dims])


def batch_norm(call: OperatorCall) -> ShardingRule:
    """``batch_norm``: the channels; the batch too where running statistics are used instead of the batch's."""
    shape = call.shape("input")
    whole = [0, *range(2, len(shape))] if call["training"] else []
    dims = named_dims(shape, whole=whole)
    channel = (dims[1],)
    names = ("weight", "bias", "running_mean", "running_var")
    return call.rule(call.by_slot({"input": dims, **dict.fromkeys(names, channel)}), [dims])


def attention(call: OperatorCall) -> ShardingRule:
    """``scaled_dot_product_attention`` over (..., heads, length, width), or (batch, length, width).

    Batch dims and heads may be cut, and query positions with all keys on every rank (a causal call then counts its
    positions over all ranks). With fewer key heads than query heads (``enable_gqa``) a query head is (key head,
    member): a cut divides the former on both sides, or the query heads alone, of which each rank then picks the key
    heads (the only way where an axis has more ranks than there are key heads).
    """
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    rank = len(query)
    batch: Dims = tuple((f"b{dim}",) if size != 1 else () for dim, size in enumerate(query[:-2]))
    key_batch, sizes = batch, {}
    if call.get("enable_gqa") and rank >= 3 and key[-3] != query[-3]:
        one_head = key[-3] == 1
        batch = (*batch[:-1], ("m",) if one_head else ("h", "m"))
        key_batch = (*key_batch[:-1], () if one_head else ("h",))
        sizes = {"h": key[-3], "m": query[-3] // key[-3]}
        sizes = {factor: size for factor, size in sizes.items() if size != 1}
    elif key[:-2] != query[:-2] or value[:-2] != query[:-2]:
        # broadcast over batch dims: a key dim of size 1 is whole
        key_batch = tuple(() if 1 in (key[dim], value[dim]) else factors for dim, factors in enumerate(batch))
    length: tuple[str, ...] = ("l",) if query[-2] != 1 else ()
    factors = {
        "query": (*batch, length, ()),
        "key": (*key_batch, (), ()),
        "value": (*key_batch, (), ()),
    }
    if call.has("attn_mask"):
        factors["attn_mask"] = _mask_dims(call.shape("attn_mask"), (*batch, length, ()))
    growing = frozenset(length if call["is_causal"] else ())
    inner = frozenset({"m"} if "h" in sizes else ())
    return call.rule(call.by_slot(factors), [(*batch, length, ())], sizes=sizes, growing=growing, inner=inner)


def _mask_dims(shape: tuple[int, ...], full: Dims) -> Dims:
    """Factors of a mask that broadcasts to (*batch, length, keys)."""
    aligned = full[len(full) - len(shape) :]
    return tuple(() if size == 1 else factors for size, factors in zip(shape, aligned))


def embedding(call: OperatorCall) -> ShardingRule | None:
    """``embedding``: hidden dim, indices, and the vocabulary (each rank looks up its rows, partial sums come out)."""
    if call.get("scale_grad_by_freq"):
        return None  # Its gradient counts an index in the whole batch.
    return instantiate("vd / ... => ...d", call)


def cross_entropy(call: OperatorCall) -> ShardingRule | None:
    """``meshwright.cross_entropy``: a cut vocabulary costs an all-reduce of the maxima and one of the sums."""
    logits = call.inputs[0]
    tokens = tuple(f"b{place}" for place in reversed(range(len(logits.shape) - 1)) if logits.shape[-2 - place] != 1)
    item_size = max(ITEM_SIZE[logits.dtype], 4)
    sums = 3 if call["label_smoothing"] else 2  # of exp, of the target's logit, of all logits
    reductions = tuple(Reduction("v", ALL_REDUCE, tokens, multiple, item_size) for multiple in (1, sums))
    return instantiate("~ ...[v], ... -> ...", call, reductions)


def convolution(call: OperatorCall) -> ShardingRule | None:
    """``conv1d/2d/3d`` and their transposes: batch, output channels, input channels (partial sums), groups."""
    shape, weight = call.shape("input"), call.shape("weight")
    transposed = "transpose" in call.node.op
    spatial = ((),) * (len(weight) - 2)
    batched = len(shape) == len(weight)
    batch: Dims = ((("b",) if shape[0] != 1 else ()),) if batched else ()
    groups = call.get("groups", 1)
    in_channels, out_channels = shape[-len(weight) + 1], call.outputs[0].shape[-len(weight) + 1]
    prefix = ("g",) if groups > 1 else ()
    inside, outside = (*prefix, "i"), (*prefix, "o")
    sizes = {"i": in_channels // groups, "o": out_channels // groups, **({"g": groups} if groups > 1 else {})}
    kernel: Dims = (inside, ("o",)) if transposed else (outside, ("i",))
    factors = {
        "input": _squeezed((*batch, inside, *spatial), sizes),
        "weight": _squeezed((*kernel, *spatial), sizes),
        "bias": _squeezed((outside,), sizes),
    }
    inputs = call.by_slot(factors)
    products = tuple(index for index, slot in enumerate(call.slots) if slot != "bias")
    bias = tuple((index,) for index, slot in enumerate(call.slots) if slot == "bias")
    output = _squeezed((*batch, outside, *spatial), sizes)
    return call.rule(inputs, [output], terms=(products, *bias), passes_partial=False, sizes=sizes)


def _squeezed(dims: Dims, sizes: dict[str, int]) -> Dims:
    """Composite dims without their factors of size 1."""
    return tuple(tuple(factor for factor in factors if sizes.get(factor) != 1) for factors in dims)


def weight_norm(call: OperatorCall) -> ShardingRule:
    """``_weight_norm``: directions and magnitudes along one dim, which is all that may be cut; dim -1 has none."""
    shape = call.shape("v")
    dims = named_dims(shape, whole=[place for place in range(len(shape)) if place != call["dim"]])
    return call.rule([dims, dims if call.shape("g") else ()], [dims])


def recurrent(call: OperatorCall) -> ShardingRule | None:
    """``lstm``, ``gru``, ``rnn`` of one tensor, and their cells: the batch; gates mix all of the hidden dim.

    The state is (layers, batch, hidden), or (batch, hidden) of a cell.
    """
    if call.get("train") and call.get("dropout"):
        return None  # The masks between its layers are drawn for the whole batch.
    source = call.inputs[0].shape
    is_cell = call.node.op.split(".")[1].endswith("_cell")
    if len(source) != (2 if is_cell else 3):
        return None
    batch_dim = 0 if is_cell or call["batch_first"] else 1
    batch: tuple[str, ...] = ("b",) if source[batch_dim] != 1 else ()

    def placed(shape: tuple[int, ...], dim: int) -> Dims:
        return tuple(batch if place == dim else () for place in range(len(shape)))

    state_dim = 0 if is_cell else 1
    inputs = [
        placed(value.shape, batch_dim if index == 0 else state_dim if slot == "hx" else -1)
        for index, (slot, value) in enumerate(zip(call.slots, call.inputs))
    ]
    first = state_dim if is_cell else batch_dim
    outputs = [placed(v.shape, state_dim if place else first) for place, v in enumerate(call.outputs)]
    return call.rule(inputs, outputs)


def linear_recurrence(call: OperatorCall) -> ShardingRule:
    """``meshwright.linear_recurrence``: every dim but that of the tokens, of which each needs the one before."""
    shape = call.shape("inputs")
    dim = call.dim("dim", len(shape))
    dims = named_dims(shape, whole=[dim])
    initial = (*dims[:dim], *dims[dim + 1 :])
    return call.rule(call.by_slot({"factors": dims, "inputs": dims, "initial": initial}), [dims])


def gated_delta_rule(call: OperatorCall) -> ShardingRule | None:
    """``meshwright.gated_delta_rule``: samples and heads; a state mixes all entries of its keys and values."""
    decay = "b_h" if len(call.shape("log_decay")) == 3 else "b_h_"
    return instantiate(f"~ b_h_, b_h_, b_h_, {decay}, b_h, bh__ -> b_h_, bh__", call)


def grid_sampler(call: OperatorCall) -> ShardingRule:
    """``grid_sampler``: samples, channels, and the places in the output, whose coordinates the grid has."""
    source, grid = call.shape("input"), call.shape("grid")
    places = named_dims(grid[1:-1], prefix="o")
    batch, channel = named_dims(source[:2])
    spatial = ((),) * (len(source) - 2)
    return call.rule([(batch, channel, *spatial), (batch, *places, ())], [(batch, channel, *places)])


def affine_grid(call: OperatorCall) -> ShardingRule:
    """``affine_grid_generator``: the batch of matrices; each rank makes the grids of its own."""
    batch = named_dims(call.shape("theta")[:1])
    return call.rule([(*batch, (), ())], [(*batch, *((),) * (len(call.outputs[0].shape) - 1))])


def spectrum(call: OperatorCall) -> ShardingRule:
    """``stft``: the batch of signals, if there is one; windows overlap."""
    batch: Dims = named_dims(call.inputs[0].shape[:-1])
    inputs = [(*batch, ()), *(((),) * len(value.shape) for value in call.inputs[1:])]
    return call.rule(inputs, [(*batch, *((),) * (len(call.outputs[0].shape) - len(batch)))])


def pixels(call: OperatorCall) -> ShardingRule:
    """``pixel_shuffle`` and its inverse: (c, r·r), h, w are c, (h, r), (w, r); the inner ones stay whole."""
    shapes = [value.shape for value in (*call.inputs, *call.outputs)]
    deep, wide = shapes if "unshuffle" not in call.node.op else reversed(shapes)
    lead = named_dims(deep[:-3])
    sizes = {"c": wide[-3], "h": deep[-2], "w": deep[-1]}
    deep_dims: Dims = (*lead, ("c", "inside"), ("h",), ("w",))
    wide_dims: Dims = (*lead, ("c",), ("h", "row"), ("w", "column"))
    inputs, outputs = ([deep_dims], [wide_dims]) if deep is shapes[0] else ([wide_dims], [deep_dims])
    return call.rule(inputs, outputs, sizes=sizes)


def outer_dims(keep: int) -> Callable[[OperatorCall], ShardingRule]:
    """Operators that leave the last ``keep`` dims whole in input and output and treat the others apart."""

    def rule(call: OperatorCall) -> ShardingRule:
        def dims_of(shape: tuple[int, ...]) -> Dims:
            return named_dims(shape, whole=range(max(len(shape) - keep, 0), len(shape)))

        return call.rule([dims_of(value.shape) for value in call.inputs], [dims_of(v.shape) for v in call.outputs])

    return rule


def loss(call: OperatorCall) -> ShardingRule | None:
    """Pointwise losses: each position apart; a sum or mean over cut positions gives partial sums."""
    shape = call.inputs[0].shape
    if any(value.shape != shape for value in call.inputs):
        return None
    dims = named_dims(shape)
    whole = call.outputs[0].shape == ()
    terms = (tuple(range(len(call.inputs))),) if whole else None
    return call.rule([dims] * len(call.inputs), [() if whole and shape else dims], terms=terms, passes_partial=False)


#: Losses of each sample or element, where nothing is added up (which ``separate_loss_reductions`` does apart).
_SAMPLE_LOSSES = {
    "aten.margin_ranking_loss.default": "~ ..., ..., ... -> ...",
    "aten.hinge_embedding_loss.default": "~ ..., ... -> ...",
    "aten.poisson_nll_loss.default": "~ ..., ... -> ...",
    "aten.triplet_margin_loss.default": "~ ..._, ..._, ..._ -> ...",
    "aten.cosine_embedding_loss.default": "~ b_, b_, b -> b",
    "aten.multi_margin_loss.default": "~ b_, b, _ -> b",
    "aten.multilabel_margin_loss.default": "~ b_, b_ -> b",
}


def sample_loss(call: OperatorCall) -> ShardingRule | None:
    """Losses in ``_SAMPLE_LOSSES``; none where they are added up inside."""
    return instantiate(_SAMPLE_LOSSES[call.node.op], call) if call["reduction"] == 0 else None


def ctc_losses(call: OperatorCall) -> ShardingRule | None:
    """Samples apart, where each has a row of targets; frames, classes and a sample's target stay whole."""
    if len(call.shape("targets")) != 2:
        return None
    samples: tuple[str, ...] = ("n",) if call.outputs[0].shape[0] != 1 else ()
    factors = {"log_probabilities": ((), samples, ()), "targets": (samples, ())}
    return call.rule(call.by_slot({**factors, "frames": (samples,), "lengths": (samples,)}), [(samples,)])


def _named(names: str) -> list[str]:
    return [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names.split()]


COMPUTED: dict[str, Callable[[OperatorCall], ShardingRule | None]] = {
    "aten.matmul.default": matmul,
    **dict.fromkeys(_ADDED, added_matmul),
    "aten.einsum.default": einsum,
    "aten.layer_norm.default": layer_norm,
    "aten.rms_norm.default": layer_norm,
    "aten.group_norm.default": group_norm,
    "aten.instance_norm.default": instance_norm,
    "aten.prelu.default": channelwise,
    "aten.fake_quantize_per_channel_affine.default": quantised_channels,
    "aten._fake_quantize_learnable_per_channel_affine.default": quantised_channels,
    "aten.grid_sampler.default": grid_sampler,
    "aten.affine_grid_generator.default": affine_grid,
    "aten.pixel_shuffle.default": pixels,
    "aten.pixel_unshuffle.default": pixels,
    "aten.stft.default": spectrum,
    "aten.batch_norm.default": batch_norm,
    "aten.scaled_dot_product_attention.default": attention,
    "aten.embedding.default": embedding,
    "aten._weight_norm.default": weight_norm,
    "meshwright.cross_entropy": cross_entropy,
    "meshwright.ctc_losses.default": ctc_losses,
    "meshwright.gated_delta_rule.default": gated_delta_rule,
    "meshwright.linear_recurrence.default": linear_recurrence,
    **dict.fromkeys(_named("conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding"), convolution),
    **dict.fromkeys(_named("conv_transpose1d conv_transpose2d.input conv_transpose3d.input"), convolution),
    **dict.fromkeys(_named("adaptive_avg_pool1d avg_pool1d max_pool1d adaptive_max_pool1d"), outer_dims(1)),
    **dict.fromkeys(_named("upsample_nearest1d.vec upsample_linear1d.vec reflection_pad1d"), outer_dims(1)),
    **dict.fromkeys(_named("replication_pad1d max_pool1d_with_indices _upsample_nearest_exact1d.vec"), outer_dims(1)),
    **dict.fromkeys(_named("adaptive_avg_pool2d avg_pool2d max_pool2d adaptive_max_pool2d"), outer_dims(2)),
    **dict.fromkeys(_named("upsample_nearest2d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec"), outer_dims(2)),
    **dict.fromkeys(_named("reflection_pad2d replication_pad2d"), outer_dims(2)),
    **dict.fromkeys(_named("adaptive_avg_pool3d avg_pool3d max_pool3d upsample_nearest3d.vec"), outer_dims(3)),
    **dict.fromkeys(_named("max_pool2d_with_indices max_unpool2d _upsample_nearest_exact2d.vec"), outer_dims(2)),
    **dict.fromkeys(_named("_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec"), outer_dims(2)),
    **dict.fromkeys(_named("adaptive_max_pool3d upsample_trilinear3d.vec"), outer_dims(3)),
    **dict.fromkeys(_named("max_pool3d_with_indices max_unpool3d _upsample_nearest_exact3d.vec"), outer_dims(3)),
    **dict.fromkeys(_named("lstm.input gru.input rnn_tanh.input rnn_relu.input"), recurrent),
    **dict.fromkeys(_named("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"), recurrent),
    **dict.fromkeys(_named("mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div"), loss),
    **dict.fromkeys(_named("binary_cross_entropy_with_logits binary_cross_entropy"), loss),
    **dict.fromkeys(_SAMPLE_LOSSES, sample_loss),
}
