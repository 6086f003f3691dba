"""The sharding rule of every operator that one line of notation can say (see ``passes.rules.rule_notation``).

Operators whose dims depend on their arguments (views, reductions, softmax, …) are in the ``COMPUTED`` tables of the
modules beside this one.
"""

from __future__ import annotations

POINTWISE = "~ ... -> ..."
POINTWISE_2 = "~ ..., ... -> ..."
POINTWISE_3 = "~ ..., ..., ... -> ..."
LINEAR_MAP = "... -> ..."


def _each(overloads: str, line: str) -> dict[str, str]:
    """The same line for several operators; ``.default`` may be left out."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": line for name in overloads.split()}


RULES: dict[str, str] = {
    # matrix products
    "aten.linear.default": "...k, nk + n -> ...n",
    "aten.mm.default": "mk, kn -> mn",
    "aten.bmm.default": "bmk, bkn -> bmn",
    "aten.mv.default": "mk, k -> m",
    "aten.dot.default": "k, k -> ",
    "aten.vdot.default": "k, k => ",
    "aten.outer.default": "m, n => mn",
    # arithmetic that is linear in some of its operands
    **_each("add.Tensor sub.Tensor subtract.Tensor", "... + ... -> ..."),
    **_each("mul.Tensor multiply.Tensor", "..., ... -> ..."),
    **_each("div.Tensor divide.Tensor true_divide.Tensor", "... / ... -> ..."),
    **_each("mul.Scalar multiply.Scalar div.Scalar neg negative positive clone contiguous", LINEAR_MAP),
    **_each("alias detach lift_fresh_copy", LINEAR_MAP),
    "aten.add.Scalar": POINTWISE,
    "aten.divide.Scalar": POINTWISE,
    "aten.sub.Scalar": POINTWISE,
    "aten.rsub.Scalar": POINTWISE,
    "aten.rsub.Tensor": POINTWISE_2,
    # pointwise, one operand
    **_each(
        "abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu cos cosh deg2rad digamma elu erf erfc erfinv "
        "exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan leaky_relu "
        "lgamma log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num rad2deg reciprocal relu relu6 round "
        "rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh "
        "threshold trunc special_expit special_erf special_entr special_i0 special_log1p special_expm1 special_airy_ai "
        "special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_erfcx special_i0e special_i1 "
        "special_i1e special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 "
        "special_modified_bessel_k1 special_ndtr special_ndtri special_scaled_modified_bessel_k0 "
        "special_scaled_modified_bessel_k1 special_spherical_bessel_j0 mvlgamma polygamma xlogy.Scalar_Other "
        "xlogy.Scalar_Self",
        POINTWISE,
    ),
    **_each("to.dtype to.device to.dtype_layout _to_copy clamp clip clamp_min clamp_max", POINTWISE),
    **_each(
        "zeros_like ones_like full_like empty_like rand_like randn_like bernoulli randint_like.low_dtype", POINTWISE
    ),
    "aten.dropout.default": POINTWISE,
    **_each("pow.Tensor_Scalar pow.Scalar float_power.Tensor_Scalar float_power.Scalar", POINTWISE),
    **_each("div.Scalar_mode remainder.Scalar fmod.Scalar bitwise_and.Scalar", POINTWISE),
    **_each("bitwise_or.Scalar bitwise_xor.Scalar __and__.Scalar __or__.Scalar __xor__.Scalar", POINTWISE),
    **_each("__lshift__.Scalar __rshift__.Scalar", POINTWISE),
    **_each("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar not_equal.Scalar less.Scalar", POINTWISE),
    **_each("greater.Scalar greater_equal.Scalar less_equal.Scalar", POINTWISE),
    **_each("real imag conj _conj resolve_conj", POINTWISE),
    # pointwise, two operands
    **_each(
        "pow.Tensor_Tensor float_power.Tensor_Tensor floor_divide div.Tensor_mode remainder.Tensor fmod.Tensor atan2 "
        "maximum minimum max.other min.other fmax fmin hypot logaddexp logaddexp2 copysign.Tensor polar complex "
        "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and logical_or logical_xor "
        "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor "
        "xlogy.Tensor masked_fill.Scalar where.ScalarOther where.ScalarSelf heaviside isclose expand_as "
        "type_as igamma igammac special_xlog1py special_zeta nextafter gcd lcm ldexp.Tensor "
        "to.other clamp_min.Tensor clamp_max.Tensor copy greater.Tensor greater_equal.Tensor less.Tensor "
        "less_equal.Tensor not_equal.Tensor __lshift__.Tensor __rshift__.Tensor",
        POINTWISE_2,
    ),
    # fake quantisation of a whole tensor
    "aten.fake_quantize_per_tensor_affine.default": POINTWISE,
    **_each("fake_quantize_per_tensor_affine.tensor_qparams _fake_quantize_learnable_per_tensor_affine", POINTWISE_3),
    # a buffer is written: it must be cut as its content is, never converted
    "aten.copy_.default": POINTWISE_2,
    # what autograd.grad inside a model leaves of pointwise operators
    **_each("tanh_backward sigmoid_backward threshold_backward gelu_backward", POINTWISE_2),
    "aten.where.Scalar": POINTWISE,
    # pointwise, three operands
    **_each("where.self addcmul addcdiv lerp.Tensor masked_fill.Tensor clamp.Tensor", POINTWISE_3),
    "aten.lerp.Scalar": POINTWISE_2,
    # whole matrices, batches free
    **_each("tril triu linalg_inv inverse cholesky matrix_exp linalg_matrix_exp linalg_cholesky", "~ ...__ -> ...__"),
    **_each("det linalg_det logdet", "~ ...__ -> ..."),
    **_each("linalg_eigvals linalg_eigvalsh linalg_svdvals", "~ ...__ -> ..._"),
    **_each("slogdet linalg_slogdet", "~ ...__ -> ..., ..."),
    **_each("linalg_eig linalg_eigh", "~ ...__ -> ..._, ...__"),
    **_each("linalg_lu_factor linalg_ldl_factor", "~ ...__ -> ...__, ..._"),
    "aten.linalg_qr.default": "~ ...__ -> ...__, ...__",
    "aten.linalg_svd.default": "~ ...__ -> ...__, ..._, ...__",
    "aten.linalg_householder_product.default": "~ ...__, ..._ -> ...__",
    "aten.lu_unpack.default": "~ ...__, ..._ -> ...__, ...__, ...__",
    **_each("linalg_solve linalg_solve_triangular cholesky_solve", "~ ...__, ...__ -> ...__"),
    **_each("linalg_lu_solve ormqr", "~ ...__, ..._, ...__ -> ...__"),
    # what Python did beside torch
    "meshwright.checked.default": "~ ... / -> ...",
    "meshwright.checked_each.default": POINTWISE_2,
    "meshwright.linear_sum_assignment.default": "~ __ -> _, _",
    # factor tables
    "aten.one_hot.default": "~ ... -> ..._",
    "aten.bucketize.Tensor": "~ ..., _ -> ...",
    "aten.view_as_real.default": "~ ... -> ..._",
    "aten.view_as_complex.default": "~ ..._ -> ...",
    "aten.bilinear.default": "~ ..._, ..._, n__, n -> ...n",
    "aten.cdist.default": "~ ...m_, ...n_ -> ...mn",
}
