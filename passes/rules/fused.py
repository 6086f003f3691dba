"""Rules of the fused operators (``meshwright.*.default``)."""

from __future__ import annotations

from collections.abc import Callable

from passes.ir.conversions import ALL_REDUCE
from passes.ir.graph import ITEM_SIZE
from passes.rules.operator_call import OperatorCall, named_dims
from passes.rules.rule import Dims, Reduction, ShardingRule


def _aligned(shape: tuple[int, ...], full: Dims) -> Dims:
    """Factors of a tensor that broadcasts to one of factors ``full``."""
    return tuple(() if size == 1 else factors for size, factors in zip(shape, full[len(full) - len(shape) :]))


def norm(call: OperatorCall) -> ShardingRule:
    """Norms of the last dim, with a sum in front or not: it stays whole, and so do weight and bias."""
    shape = call.shape("input")
    dims = named_dims(shape, whole=[len(shape) - 1])
    return call.rule(call.by_slot({"input": dims, "residual": dims}), [dims for _ in call.outputs])


def pointwise(call: OperatorCall) -> ShardingRule:
    """Gated activations, and one of a sum with a bias."""
    dims = named_dims(call.outputs[0].shape)
    return call.rule([_aligned(value.shape, dims) for value in call.inputs], [dims])


def rotary(call: OperatorCall) -> ShardingRule:
    """Pairs of entries of the last dim are turned together: it stays whole, in the angles too."""
    shape = call.shape("input")
    dims = named_dims(shape, whole=[len(shape) - 1])
    return call.rule([_aligned(value.shape, dims) for value in call.inputs], [dims])


def rotary_pair(call: OperatorCall) -> ShardingRule | None:
    """Two tensors with the same angles, alike but for one dim, the heads: the one with more has (head, member)."""
    query, key = call.shape("query"), call.shape("key")
    if len(query) != len(key):
        return None
    whole = [len(query) - 1]
    dims = named_dims(query, whole=whole)
    other: Dims = dims
    sizes: dict[str, int] = {}
    for dim, (heads, groups) in enumerate(zip(query, key)):
        if heads == groups:
            continue
        if heads % groups or sizes:
            return None
        sizes = {"h": groups, "m": heads // groups} if groups > 1 else {"m": heads}
        group: tuple[str, ...] = ("h",) if groups > 1 else ()
        dims = (*dims[:dim], (*group, "m"), *dims[dim + 1 :])
        other = (*other[:dim], group, *other[dim + 1 :])
    angles = tuple(() if len(factors) > 1 or factors == ("m",) else factors for factors in dims)
    factors = [
        {"query": dims, "key": other}.get(slot, _aligned(value.shape, angles))
        for slot, value in zip(call.slots, call.inputs)
    ]
    return call.rule(factors, [dims, other], sizes=sizes)


def embedding(call: OperatorCall) -> ShardingRule:
    """Indices, hidden dim, and the vocabulary (each rank looks up its rows, partial sums come out)."""
    indices = named_dims(call.shape("indices"))
    rows, hidden = call.shape("weight")
    table: Dims = (("v",) if rows != 1 else (), ("h",) if hidden != 1 else ())
    inputs = call.by_slot({"indices": indices, "weight": table})
    return call.rule(inputs, [(*indices, table[1])], terms=((call.slots.index("weight"),),), passes_partial=False)


def expert_linear(call: OperatorCall) -> ShardingRule:
    """Rows; output features; input features (partial sums); and experts: each rank computes the rows of its own."""
    lead = named_dims(call.outputs[0].shape[:-1])
    experts, outside, inside = (
        (factor,) if size != 1 else () for factor, size in zip("eoi", call.shape("weight"), strict=True)
    )
    rows = _aligned(call.shape("input")[:-1], lead)
    factors = {"input": (*rows, inside), "expert_ids": _aligned(call.shape("expert_ids"), lead)}
    inputs = call.by_slot({**factors, "weight": (experts, outside, inside)})
    product = tuple(call.slots.index(name) for name in ("input", "weight"))
    return call.rule(inputs, [(*lead, outside)], terms=(product,), passes_partial=False)


def linear_cross_entropy(call: OperatorCall) -> ShardingRule:
    """Positions; and the vocabulary, which costs an all-reduce of the maxima and one of the sums."""
    shape = call.shape("hidden")
    positions = named_dims(shape[:-1])
    classes: tuple[str, ...] = ("v",) if call.shape("weight")[0] != 1 else ()
    factors = {"hidden": (*positions, ()), "weight": (classes, ()), "target": positions, "bias": (classes,)}
    tokens = tuple(factor for dims in positions for factor in dims)
    item_size = max(ITEM_SIZE[call.outputs[0].dtype], 4)
    sums = 3 if call["label_smoothing"] else 2  # of exp, of the target's logit, of all logits
    reductions = tuple(Reduction("v", ALL_REDUCE, tokens, multiple, item_size) for multiple in (1, sums))
    return call.rule(call.by_slot(factors), [positions], reductions=reductions if classes else ())


COMPUTED: dict[str, Callable[[OperatorCall], ShardingRule | None]] = {
    f"meshwright.{name}.default": rule
    for rule, names in {
        norm: "rms_norm add_rms_norm layer_norm add_layer_norm",
        pointwise: "swiglu geglu bias_gelu",
        rotary: "rotary",
        rotary_pair: "rotary_pair",
        embedding: "embedding",
        linear_cross_entropy: "linear_cross_entropy",
    }.items()
    for name in names.split()
}
COMPUTED["meshwright.expert_linear"] = expert_linear
