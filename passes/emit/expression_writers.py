"""Operators whose local source depends on local sizes or on what is cut."""

from __future__ import annotations

import math
from collections.abc import Callable

from passes.emit.local_call import Name, Writer, render
from passes.emit.quoting import literal
from passes.ir.conversions import ALL_GATHER
from passes.ir.types import P, shard_dim
from passes.rules.expert_rules import BEHIND, EXPERT, EXPERTS, GATED, INNER
from passes.rules.operator_call import GATHERED_LINEARS
from passes.rules.rule import AxisChoice


def _axes(names: tuple[str, ...]) -> str:
    return "(" + ", ".join(map(literal, names)) + ("," if len(names) == 1 else "") + ")"


def reshape(writer: Writer) -> str:
    """Any view that splits or merges dims, with local sizes; of heads as ``unflatten`` and ``flatten``."""
    source, before, after = writer.call.inputs[0].name, writer.call.inputs[0].shape, writer.output.shape
    uneven = writer.uneven_dims(writer.output)
    splits_last = bool(before) and len(after) == len(before) + 1 and after[:-2] == before[:-1]
    if splits_last and uneven.keys().isdisjoint((len(after) - 2, len(after) - 1)):
        return f"{source}.unflatten(-1, ({after[-2]}, {after[-1]}))"
    if after and len(before) == len(after) + 1 and after[:-1] == before[:-2]:
        return f"{source}.flatten({len(after) - 1})"
    sizes = [-1 if dim in uneven else size for dim, size in enumerate(after)]
    return f"{source}.reshape({', '.join(map(str, sizes)) or '()'})"


def expand(writer: Writer) -> str:
    return f"{writer.call.inputs[0].name}.expand({', '.join(map(str, writer.output.shape))})"


def identity(writer: Writer) -> str:
    return writer.call.inputs[0].name


def reverse(writer: Writer) -> str:
    return f"{writer.call.inputs[0].name}.permute({', '.join(map(str, reversed(range(len(writer.output.shape)))))})"


def matrix_transpose(writer: Writer) -> str:
    return f"{writer.call.inputs[0].name}.transpose(-2, -1)"


def linear(writer: Writer) -> str:
    """``F.linear``; the bias follows the sum where the contraction is cut; spelled out where partial sums come in."""
    x, weight, bias = (writer.arguments.get(name) for name in ("input", "weight", "bias"))
    exchanging = next(((name, choice) for name, choice, _ in writer.axes if choice.rows is not None), None)
    if exchanging is not None:
        return _exchanging_rows(writer, *exchanging)
    if not writer.takes_partial:
        return writer.function("F.linear(input, weight, bias)")
    bias_alone = all(
        tensor.placement[place] != P
        for name in ("input", "weight")
        for tensor in [writer.tensor(name)]
        for _, _, place in writer.axes
    )
    product = f"F.linear({x}, {weight})" if bias_alone else f"{x} @ {weight}.t()"
    product = writer.sum_up(product)
    return f"{product} + {bias}" if bias is not None else product


def _exchanging_rows(writer: Writer, axis: str, choice: AxisChoice) -> str:
    """The operator of ours that gathers or scatters the rows; a bias is added to the rows that are left."""
    x, weight, bias = (writer.arguments.get(name) for name in ("input", "weight", "bias"))
    added = f", {bias}" if bias is not None else ""
    if choice.reductions[0].collective == ALL_GATHER:
        return f"ops.gathered_linear({x}, {weight}{added}, axis={literal(axis)})"
    product = f"ops.scattered_linear({x}, {weight}, axis={literal(axis)})"
    return f"{product} + {bias}" if bias is not None else product


def gathered_linears(writer: Writer) -> str:
    """``ops.gathered_linears``: linear layers whose input's rows are gathered once."""
    (axis,) = (name for name, choice, _ in writer.axes if choice.rows is not None)
    x, weights, biases = (writer.arguments[name] for name in ("input", "weights", "biases"))
    added = f"biases={render(biases)}, " if any(bias is not None for bias in biases) else ""
    return f"ops.gathered_linears({x}, {render(weights)}, {added}axis={literal(axis)})"


def _sum_of_products(first: str, second: str, function: str) -> Callable[[Writer], str]:
    """``beta * self + alpha * first @ second`` and the like, in parts where the contraction is cut.

    Also where a summand without gradient is R and the product I, which the checker takes in a sum alone.
    """

    def write(writer: Writer) -> str:
        if not writer.contracted_axes and not writer.mixes_invariant:
            return writer.function(f"{function}(self, {first}, {second}, beta=beta, alpha=alpha)")
        product = writer.sum_up(f"torch.matmul({writer.arguments[first]}, {writer.arguments[second]})")
        summand = render(writer.arguments["self"])
        alpha, beta = writer.arguments["alpha"], writer.arguments["beta"]
        product = product if alpha == 1 else f"{render(alpha)} * {product}"
        return f"{product} + {summand}" if beta == 1 else f"{product} + {render(beta)} * {summand}"

    return write


def mean(writer: Writer) -> str:
    """``mean``; where a dim it runs over is cut, the local sum over the global count."""
    if not writer.contracted_axes:
        return writer.plain()
    shape = writer.call.inputs[0].whole
    dims = writer.bound.dims("dim", len(shape))
    total = writer.function(
        "torch.sum(self, dim, keepdim, dtype=dtype)" if "dim" in writer.arguments else "torch.sum(self, dtype=dtype)"
    )
    return writer.sum_up(f"{total} / {math.prod(shape[dim] for dim in dims)}")


def sliced(writer: Writer) -> str:
    """``x[:, a:b]``; as ``narrow`` where partial sums pass through."""
    (source,) = writer.call.inputs
    shape = source.shape
    dim = writer.arguments["dim"] % len(shape)
    if writer.output.shape == shape and writer.arguments["step"] == 1:
        return source.name
    start, stop, step = _bounds(writer, shape[dim])
    if writer.takes_partial and step == 1:
        return f"torch.narrow({source.name}, {dim}, {start}, {stop - start})"
    text = f"{start or ''}:{stop if stop < shape[dim] else ''}" + (f":{step}" if step != 1 else "")
    before = ":, " * dim if dim < len(shape) - 1 or dim < 2 else "..., "
    return f"{source.name}[{before}{text}]"


def _bounds(writer: Writer, size: int) -> tuple[int, int, int]:
    start, stop = writer.arguments.get("start"), writer.arguments.get("end")
    return slice(start, stop, writer.arguments["step"]).indices(size)


def indexed(writer: Writer) -> str:
    if any(not operand.shape for operand in writer.call.inputs[1:]):
        # Python's own indexing reads the value of an index without dims, which a meta tensor does not have.
        return writer.function("torch.ops.aten.index.Tensor(self, indices)")
    entries = [":" if entry is None else render(entry) for entry in writer.arguments["indices"]]
    while len(entries) > 1 and entries[-1] == ":":
        entries.pop()
    return f"{writer.arguments['self']}[{', '.join(entries)}]"


def group_norm(writer: Writer) -> str:
    """``F.group_norm`` with the groups that this rank holds."""
    cut = math.prod(writer.call.mesh.size(axis) for axis in writer.axes_cutting("g"))
    writer.arguments["num_groups"] //= cut
    return writer.function("F.group_norm(input, num_groups, weight, bias, eps=eps)")


def batch_norm(writer: Writer) -> str:
    return writer.function(
        "F.batch_norm(input, running_mean, running_var, weight, bias, training=training, momentum=momentum, eps=eps)"
    )


def convolution(writer: Writer) -> str:
    """A convolution with the groups that this rank holds; the bias follows the sum where input channels are cut."""
    cut = math.prod(writer.call.mesh.size(axis) for axis in writer.axes_cutting("g"))
    if "groups" in writer.arguments:
        writer.arguments["groups"] //= cut
    bias = writer.arguments.get("bias")
    if not writer.contracted_axes or not isinstance(bias, Name):
        return writer.plain()
    writer.arguments["bias"] = None
    product = writer.sum_up(writer.plain())
    spatial = len(writer.tensor("weight").shape) - 2
    return f"{product} + {bias}.reshape({', '.join(['-1', *['1'] * spatial])})"


def affine_grid(writer: Writer) -> str:
    """The grids of as many matrices as this rank has."""
    _, *sizes = writer.arguments["size"]
    writer.arguments["size"] = [Name(f"{writer.call.inputs[0].name}.shape[0]"), *sizes]
    return writer.function("F.affine_grid(theta, size, align_corners=align_corners)")


def recurrent(writer: Writer) -> str:
    """A recurrent layer, whose first states cuDNN takes in one piece: a part or an expanded constant is not."""
    states = writer.arguments["hx"]
    of_several = isinstance(states, (list, tuple))
    pieces = [Name(f"{state}.contiguous()") for state in (states if of_several else [states])]
    writer.arguments["hx"] = pieces if of_several else pieces[0]
    return writer.plain()


def attention(writer: Writer) -> str:
    """``F.scaled_dot_product_attention``; from ``runtime.ops`` where that does more.

    It does if probabilities are dropped, causal queries are cut, or query heads share heads of keys.
    """
    options = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    call_arguments = ", ".join(["query, key, value", *(f"{name}={name}" for name in options)])
    drops, grouped = bool(writer.arguments.get("dropout_p")), bool(writer.arguments.get("enable_gqa"))
    axes = {
        "length_axes": writer.axes_cutting("l") if writer.arguments.get("is_causal") else (),
        "head_axes": writer.axes_cutting("m") if writer.tensor("key").shape[-3:-2] != (1,) else (),
    }
    if not (drops or grouped or axes["length_axes"]):
        return writer.function(f"F.scaled_dot_product_attention({call_arguments})")
    if grouped and not (drops or axes["length_axes"] or axes["head_axes"]):
        writer.arguments["enable_gqa"] = writer.arguments["dropout_p"] = None
        return writer.function("ops.grouped_query_attention(query, key, value, attn_mask=attn_mask, "
                               "is_causal=is_causal, scale=scale)")  # fmt: skip
    source = writer.function(f"ops.scaled_dot_product_attention({call_arguments})")
    keywords = [_draw(writer, len(writer.output.shape) - 1)] if drops else []
    keywords += [f"{name}={_axes(names)}" for name, names in axes.items() if names]
    return f"{source[:-1]}{''.join(f', {keyword}' for keyword in keywords)})"


def dropout(writer: Writer) -> str:
    """``ops.dropout``: every element's mask follows from its position in the whole tensor."""
    if not writer.arguments.get("train") or not writer.arguments.get("p"):
        return writer.call.inputs[0].name
    return f"ops.dropout({writer.call.inputs[0].name}, {render(writer.arguments['p'])}, {_draw(writer)})"


def _draw(writer: Writer, num_dims: int | None = None) -> str:
    """Which random operator of the block draws, and which mesh axis cuts which of its (first) dims."""
    dims = ((name, shard_dim(writer.output.placement[place])) for name, _, place in writer.axes)
    shards = [
        f"{literal(name)}: {dim}" for name, dim in dims if dim is not None and (num_dims is None or dim < num_dims)
    ]
    whole = [f"{dim}: {writer.output.whole[dim]}" for dim in writer.uneven_dims(writer.output)]
    return (
        f"draw={writer.call.draw}, of=self"
        + (f", shards={{{', '.join(shards)}}}" if shards else "")
        + (f", whole={{{', '.join(whole)}}}" if whole else "")
    )


def random_like(function: str) -> Callable[[Writer], str]:
    """Numbers drawn in the shape of a tensor."""

    def write(writer: Writer) -> str:
        source, output = writer.call.inputs[0], writer.output
        dtype = "" if output.dtype == source.dtype else f", dtype=torch.{output.dtype}"
        return f"ops.{function}({source.name}{_range(writer)}{dtype}, {_draw(writer)})"

    return write


def random_of_size(function: str) -> Callable[[Writer], str]:
    """Numbers drawn for a tensor of this rank's size."""

    def write(writer: Writer) -> str:
        output = writer.output
        size = ", ".join(map(str, output.shape)) + ("," if len(output.shape) == 1 else "")
        return f"ops.{function}(({size}){_range(writer)}, dtype=torch.{output.dtype}, {_draw(writer)})"

    return write


def _range(writer: Writer) -> str:
    bounds = [render(writer.arguments[name]) for name in ("low", "high") if name in writer.arguments]
    return "".join(f", {bound}" for bound in bounds)


def embedding(writer: Writer) -> str:
    """``F.embedding`` or the fused one; from ``runtime.ops`` where the vocabulary is cut."""
    weight, indices = writer.tensor("weight"), writer.tensor("indices")
    padding = writer.arguments.get("padding_idx", -1)
    suffix = f", padding_idx={padding}" if padding is not None and padding >= 0 else ""
    if writer.arguments.get("scale_grad_by_freq"):
        # It has no rule: every rank looks up the indices of the whole batch, which its gradient counts.
        return f"F.embedding({indices.name}, {weight.name}{suffix}, scale_grad_by_freq=True)"
    axes = writer.axes_cutting("v")
    if not axes:
        function = "kernels.embedding" if writer.op.startswith("meshwright.") else "F.embedding"
        return f"{function}({indices.name}, {weight.name}{suffix})"
    writer.summed = True
    vocabulary = weight.whole[0]
    return f"ops.embedding({indices.name}, {weight.name}, vocabulary={vocabulary}{suffix}, axes={_axes(axes)})"


def expert_linear(writer: Writer) -> str:
    """``kernels.expert_linear``; from ``runtime.ops`` where experts are cut."""
    arguments = ", ".join(str(writer.arguments[name]) for name in ("input", "expert_ids", "weight"))
    axes = writer.axes_cutting("e")
    if not axes:
        return f"kernels.expert_linear({arguments})"
    num_experts = writer.tensor("weight").whole[0]
    source = f"ops.expert_linear({arguments}, num_experts={num_experts}, axes={_axes(axes)})"
    if writer.contracted_axes == axes:
        writer.summed = True
        return source
    return _summed_elsewhere(writer, source, axes)


def _summed_elsewhere(writer: Writer, source: str, axes: tuple[str, ...]) -> str:
    """``source`` declared as partial sums on the contracted axes that are none of ``axes``."""
    writer.summed = True
    for axis in writer.contracted_axes:
        if axis not in axes:
            source = f"spmd.reinterpret({source}, {literal(axis)}, src=V, dst=P)"
    return source


def cross_entropy(writer: Writer) -> str:
    """``ops.cross_entropy`` (loss of each token); ``axes`` are those that cut the vocabulary."""
    source = writer.function(
        "ops.cross_entropy(logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, "
        "reuse_logits=reuse_logits, dtype=dtype)"
    )
    axes = writer.axes_cutting("v")
    if not axes:
        return source
    vocabulary = writer.tensor("logits").whole[-1]
    return f"{source[:-1]}, vocabulary={vocabulary}, axes={_axes(axes)})"


def linear_cross_entropy(writer: Writer) -> str:
    """``ops.linear_cross_entropy`` (loss of each position); ``axes`` are those that cut the vocabulary."""
    options = ("ignore_index", "label_smoothing", "z_loss", "chunk_tokens", "dtype")
    arguments = ", ".join(["hidden, weight, target, bias=bias", *(f"{name}={name}" for name in options)])
    axes = writer.axes_cutting("v")
    source = writer.function(f"{'ops' if axes else 'kernels'}.linear_cross_entropy({arguments})")
    if not axes:
        return source
    vocabulary = writer.tensor("weight").whole[0]
    return f"{source[:-1]}, vocabulary={vocabulary}, axes={_axes(axes)})"


def experts(writer: Writer) -> str:
    """``kernels.experts``; from ``runtime.ops`` where experts or their inner entries are cut."""
    names = ("gate_up_bias", "down_bias", "activation")
    source = writer.function(
        f"experts(x, expert_ids, scores, gate_up, down, {', '.join(f'{name}={name}' for name in names)})"
    )
    exchanged = writer.call.rule.exchanged if writer.call.rule is not None else {}
    exchanging = tuple(name for name, choice, _ in writer.axes if choice.factor in exchanged)
    holding = tuple(name for name, choice, _ in writer.axes if choice.factor in (EXPERT, *exchanged))
    slicing = writer.axes_cutting(INNER)
    behind = GATED.get(writer.arguments["activation"]) == BEHIND
    options = [f"num_experts={writer.tensor('gate_up').whole[0]}"] if holding else []
    options += [f"expert_axes={_axes(holding)}"] if holding else []
    options += [f"token_axes={_axes(exchanging)}"] if exchanging else []
    options += [f"inner_axes={_axes(slicing)}"] if slicing and (behind or "down_bias" in writer.bound.slots) else []
    return f"ops.{source[:-1]}, {', '.join(options)})" if options else f"kernels.{source}"


def loss(function: str) -> Callable[[Writer], str]:
    """A pointwise loss; a mean over cut positions is the local sum over the global count."""

    def write(writer: Writer) -> str:
        others = [name for name in writer.bound.arguments if name not in ("self", "target", "reduction")]
        names = ["self", "target", *others]
        reduction = {0: "none", 1: "mean", 2: "sum"}[writer.arguments["reduction"]]
        count = 1
        if writer.contracted_axes and reduction == "mean":
            reduction, count = "sum", math.prod(writer.call.inputs[0].whole)
        arguments = ", ".join(
            name if writer.bound.has(name) and name in ("self", "target") else f"{name}={name}" for name in names
        )
        source = f"{writer.function(f'{function}({arguments})')[:-1]}, reduction={reduction!r})"
        return source if count == 1 else f"{source} / {count}"

    return write


WRITERS: dict[str, Callable[[Writer], str]] = {
    **dict.fromkeys(
        (
            "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.view_as.default",
            "aten.reshape_as.default", "aten.flatten.using_ints", "aten.ravel.default", "aten.unflatten.int",
            "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
        ),
        reshape,
    ),
    **dict.fromkeys(("aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default"), expand),
    **dict.fromkeys(
        ("aten.alias.default", "aten.lift_fresh_copy.default", "aten.to.device", "aten.positive.default"), identity
    ),
    "aten.numpy_T.default": reverse,
    "aten.mT.default": matrix_transpose,
    "aten.adjoint.default": matrix_transpose,
    "aten.linear.default": linear,
    GATHERED_LINEARS: gathered_linears,
    "aten.addmm.default": _sum_of_products("mat1", "mat2", "torch.addmm"),
    "aten.baddbmm.default": _sum_of_products("batch1", "batch2", "torch.baddbmm"),
    "aten.mean.default": mean,
    "aten.mean.dim": mean,
    "aten.slice.Tensor": sliced,
    "aten.index.Tensor": indexed,
    "aten.group_norm.default": group_norm,
    "aten.batch_norm.default": batch_norm,
    **dict.fromkeys(
        (
            "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.conv1d.padding",
            "aten.conv2d.padding", "aten.conv3d.padding", "aten.conv_transpose1d.default",
            "aten.conv_transpose2d.input", "aten.conv_transpose3d.input",
        ),
        convolution,
    ),
    **dict.fromkeys(("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"), recurrent),
    "aten.affine_grid_generator.default": affine_grid,
    "aten.scaled_dot_product_attention.default": attention,
    "aten.dropout.default": dropout,
    **{f"aten.{name}.default": random_like(name) for name in ("rand_like", "randn_like", "bernoulli")},
    "aten.randint_like.low_dtype": random_like("randint_like"),
    **{f"aten.{name}.default": random_of_size(name) for name in ("rand", "randn")},
    "aten.randint.low": random_of_size("randint"),
    "aten.embedding.default": embedding,
    "meshwright.embedding.default": embedding,
    "meshwright.linear_cross_entropy.default": linear_cross_entropy,
    "meshwright.cross_entropy": cross_entropy,
    "meshwright.expert_linear": expert_linear,
    EXPERTS: experts,
    **{
        f"aten.{name}.default": loss(f"F.{name}")
        for name in (
            "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div",
            "binary_cross_entropy_with_logits", "binary_cross_entropy",
        )
    },
}  # fmt: skip
