"""Which public function writes each operator: the source of its local call, as a person would write it.

Three forms: ``"F.gelu"`` passes every argument of the operator in the order of its schema; ``"self.masked_fill"`` is
the same as a method of the first; ``"torch.softmax(self, dim, dtype=dtype)"`` says which arguments go where.
Arguments that are left at their default are not written. Operators that need more are in ``expression_writers``.
"""

from __future__ import annotations


def _each(names: str, prefix: str) -> dict[str, str]:
    """``aten.<name>`` written as ``<prefix><name without overload>``; ``.default`` may be left out."""
    table = {}
    for name in names.split():
        base, _, overload = name.partition(".")
        table[f"aten.{base}.{overload or 'default'}"] = prefix + base
    return table


FUNCTIONS: dict[str, str] = {
    # pointwise
    **_each(
        "abs acos acosh angle asin asinh atan atanh bitwise_not ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 "
        "expm1 floor frac i0 isfinite isinf isnan lgamma log log10 log1p log2 logical_not logit nan_to_num neg "
        "negative positive rad2deg reciprocal round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh "
        "trunc real imag conj resolve_conj clamp clamp.Tensor clip clamp_min clamp_max clamp_min.Tensor "
        "clamp_max.Tensor",
        "torch.",
    ),
    **_each("pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar float_power.Tensor_Scalar floor_divide", "torch."),
    **_each("remainder.Scalar remainder.Tensor fmod.Scalar fmod.Tensor atan2 maximum minimum", "torch."),
    **_each("fmax fmin hypot", "torch."),
    **_each("logaddexp logaddexp2 copysign.Tensor polar complex xlogy.Tensor heaviside isclose", "torch."),
    **_each("max.other min.other logical_and logical_or logical_xor addcmul addcdiv lerp.Scalar lerp.Tensor", "torch."),
    **_each("div.Tensor_mode div.Scalar_mode", "torch."),
    **_each(
        "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu silu softplus "
        "softshrink threshold glu",
        "F.",
    ),
    "aten.log_sigmoid.default": "F.logsigmoid",
    **_each("masked_fill.Scalar masked_fill.Tensor", "self."),
    **_each("where.self where.ScalarOther where.ScalarSelf where.Scalar", "torch."),
    **_each("zeros_like ones_like full_like", "torch."),
    "aten.empty_like.default": "torch.zeros_like(self, dtype=dtype)",
    "aten.to.dtype": "self.to(dtype)",
    "aten.to.dtype_layout": "self.to(dtype=dtype)",
    "aten._to_copy.default": "self.to(dtype=dtype)",
    "aten.type_as.default": "self.type_as",
    "aten.contiguous.default": "self.contiguous()",
    "aten.clone.default": "self.clone()",
    "aten.copy_.default": "ops.store(self, src)",
    "aten.detach.default": "self.detach()",
    # matrix products
    **_each("mm bmm mv dot outer", "torch."),
    "aten.einsum.default": "torch.einsum(equation, *tensors)",
    "aten.bilinear.default": "F.bilinear",
    # views
    **_each("transpose.int swapaxes swapdims t", "self."),
    "aten.numpy_T.default": "self.permute",
    "aten.permute.default": "self.permute(*dims)",
    **_each("unsqueeze", "self."),
    **_each("movedim.int movedim.intlist diagonal", "torch."),
    "aten.repeat.default": "self.repeat(*repeats)",
    "aten.repeat_interleave.self_int": "self.repeat_interleave(repeats, dim=dim)",
    # reductions
    **_each("sum sum.dim_IntList mean mean.dim amax amin aminmax argmax argmin max min max.dim min.dim", "torch."),
    **_each("any any.dim any.dims all all.dim all.dims prod prod.dim_int logsumexp count_nonzero", "torch."),
    **_each("var var.dim var.correction std std.dim std.correction median.dim", "torch."),
    "aten.linalg_vector_norm.default": "torch.linalg.vector_norm",
    # along a dim
    "aten.softmax.int": "F.softmax(self, dim=dim, dtype=dtype)",
    "aten.log_softmax.int": "F.log_softmax(self, dim=dim, dtype=dtype)",
    **_each("sort argsort cumsum cumprod cummax cummin logcumsumexp flip topk tril triu diff", "torch."),
    "aten.sort.stable": "torch.sort",
    "aten.roll.default": "torch.roll",
    # parts
    "aten.narrow.default": "torch.narrow",
    "aten.select.int": "self.select",
    "aten.split.Tensor": "self.split",
    "aten.split.sizes": "self.split",
    "aten.split_with_sizes.default": "self.split",
    "aten.chunk.default": "self.chunk",
    "aten.unbind.int": "self.unbind",
    "aten.cat.default": "torch.cat(tensors, dim=dim)",
    "aten.concat.default": "torch.cat(tensors, dim=dim)",
    "aten.concatenate.default": "torch.cat(tensors, dim=dim)",
    "aten.stack.default": "torch.stack(tensors, dim=dim)",
    "aten.pad.default": "F.pad(self, pad, mode=mode, value=value)",
    "aten.constant_pad_nd.default": "F.pad(self, pad, value=value)",
    **_each("gather index_select scatter.src scatter.value scatter_add index_add index_copy", "torch."),
    "aten.index_copy_.default": "self.index_copy_",
    "aten.scatter_reduce.two": "self.scatter_reduce",
    "aten.index_put.default": "self.index_put",
    "aten.unfold.default": "self.unfold",
    "aten.one_hot.default": "F.one_hot",
    "aten.bucketize.Tensor": "torch.bucketize",
    "aten.view_as_real.default": "torch.view_as_real",
    "aten.view_as_complex.default": "torch.view_as_complex",
    # layers
    "aten.layer_norm.default": "F.layer_norm(input, normalized_shape, weight, bias, eps=eps)",
    "aten.rms_norm.default": "F.rms_norm(input, normalized_shape, weight, eps=eps)",
    "aten.embedding.default": "F.embedding(indices, weight)",
    **_each("conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding", "F."),
    **_each("conv_transpose1d conv_transpose2d.input conv_transpose3d.input", "F."),
    **_each("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d", "F."),
    **_each("max_pool1d max_pool2d max_pool3d", "F."),
    "aten.im2col.default": "F.unfold(self, kernel_size, dilation, padding, stride)",
    "aten.col2im.default": "F.fold(self, output_size, kernel_size, dilation, padding, stride)",
    **{
        f"aten.upsample_{name}.vec": f"F.interpolate(input, size=output_size, scale_factor=scale_factors, mode='{mode}'"
        + ("" if name.startswith("nearest") else ", align_corners=align_corners")
        + ")"
        for name, mode in {
            "nearest1d": "nearest", "nearest2d": "nearest", "nearest3d": "nearest", "linear1d": "linear",
            "bilinear2d": "bilinear", "bicubic2d": "bicubic",
        }.items()
    },
    # fused operators (runtime.kernels)
    "meshwright.rms_norm.default": "kernels.rms_norm(input, weight, eps=eps, offset=offset)",
    "meshwright.add_rms_norm.default": "kernels.add_rms_norm(input, residual, weight, eps=eps, offset=offset)",
    "meshwright.layer_norm.default": "kernels.layer_norm(input, weight, bias, eps=eps)",
    "meshwright.add_layer_norm.default": "kernels.add_layer_norm(input, residual, weight, bias, eps=eps)",
    "meshwright.swiglu.default": "kernels.swiglu(gate, up)",
    "meshwright.geglu.default": "kernels.geglu(gate, up, approximate=approximate)",
    "meshwright.bias_gelu.default": "kernels.bias_gelu(input, bias, approximate=approximate)",
    "meshwright.rotary.default": "kernels.rotary(input, cos, sin, interleaved=interleaved)",
    "meshwright.rotary_pair.default": "kernels.rotary_pair(query, key, cos, sin, interleaved=interleaved)",
    # made from nothing (constants, whole on every rank)
    **_each("arange arange.start arange.start_step zeros ones full eye linspace scalar_tensor", "torch."),
    "aten.scalar_tensor.default": "torch.tensor(s, dtype=dtype)",
    "aten.arange.default": "torch.arange(end, dtype=dtype)",
    "aten.arange.start": "torch.arange(start, end, dtype=dtype)",
    "aten.arange.start_step": "torch.arange(start, end, step, dtype=dtype)",
    "aten.zeros.default": "torch.zeros(size, dtype=dtype)",
    "aten.ones.default": "torch.ones(size, dtype=dtype)",
    "aten.full.default": "torch.full(size, fill_value, dtype=dtype)",
    "aten.empty.memory_format": "torch.zeros(size, dtype=dtype)",
    "aten.eye.default": "torch.eye(n, dtype=dtype)",
    "aten.eye.m": "torch.eye(n, m, dtype=dtype)",
    "aten.new_zeros.default": "self.new_zeros(size, dtype=dtype)",
    "aten.new_empty.default": "self.new_zeros(size, dtype=dtype)",
    "aten.new_ones.default": "self.new_ones(size, dtype=dtype)",
    "aten.new_full.default": "self.new_full(size, fill_value, dtype=dtype)",
}  # fmt: skip

#: Operators written between or before their operands; ``alpha`` and the like must be at their default.
INFIX: dict[str, str] = {
    "aten.add.Tensor": "{self} + {other}",
    "aten.add.Scalar": "{self} + {other}",
    "aten.sub.Tensor": "{self} - {other}",
    "aten.sub.Scalar": "{self} - {other}",
    "aten.subtract.Tensor": "{self} - {other}",
    "aten.rsub.Scalar": "{other} - {self}",
    "aten.rsub.Tensor": "{other} - {self}",
    "aten.mul.Tensor": "{self} * {other}",
    "aten.mul.Scalar": "{self} * {other}",
    "aten.multiply.Tensor": "{self} * {other}",
    "aten.multiply.Scalar": "{self} * {other}",
    "aten.div.Tensor": "{self} / {other}",
    "aten.div.Scalar": "{self} / {other}",
    "aten.divide.Tensor": "{self} / {other}",
    "aten.true_divide.Tensor": "{self} / {other}",
    "aten.neg.default": "-{self}",
    "aten.matmul.default": "{self} @ {other}",
    "aten.bitwise_not.default": "~{self}",
    "aten.pow.Tensor_Scalar": "{self} ** {exponent}",
    "aten.floor_divide.default": "{self} // {other}",
    **{
        f"aten.{name}.{overload}": f"{{self}} {symbol} {{other}}"
        for names, symbol in {
            ("eq",): "==", ("ne", "not_equal"): "!=", ("lt", "less"): "<", ("le", "less_equal"): "<=",
            ("gt", "greater"): ">", ("ge", "greater_equal"): ">=", ("bitwise_and", "__and__"): "&",
            ("bitwise_or", "__or__"): "|", ("bitwise_xor", "__xor__"): "^", ("__lshift__",): "<<",
            ("__rshift__",): ">>",
        }.items()
        for name in names
        for overload in ("Tensor", "Scalar")
    },
}  # fmt: skip
