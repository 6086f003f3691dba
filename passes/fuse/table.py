"""The patterns: how models spell what there is a fused operator for. One row a spelling, larger ones tried first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from passes.fuse.notation import Call, parse

#: Shape of every tensor that a pattern takes, by its name in the pattern.
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Condition:
    """What must hold of the shapes of the tensors that a pattern takes."""

    text: str
    holds: Callable[[Shapes], bool]


@dataclass(frozen=True)
class Row:
    """A spelling.

    Attributes:
        name: what matches are called in reports.
        pattern: the spelling, in the notation of ``passes.fuse.notation``.
        fused: what stands for it, in the same notation.
        conditions: what must hold of the tensors bound.
    """

    name: str
    pattern: str
    fused: str
    conditions: tuple[Condition, ...] = ()

    @functools.cached_property
    def tree(self) -> Call:
        return parse(self.pattern)

    @functools.cached_property
    def result(self) -> Call:
        return parse(self.fused)


_VECTOR = Condition("the weight has one entry for each entry of the last dim", lambda of: of["w"] == of["x"][-1:])
_BIAS = Condition("the bias has one entry for each entry of the last dim", lambda of: of["b"] == of["x"][-1:])
_LAST = Condition("the bias has one entry for each column", lambda of: of["b"] == of["w"][-1:])
_ALIKE = Condition("gate and up are of one shape", lambda of: of["g"] == of["u"])
_ALL_ROTATED = Condition(
    "cosines and sines are as wide as the tensor", lambda of: of["cos"][-1:] == of["sin"][-1:] == of["x"][-1:]
)

# -- activations, as torch names them: the rows behind look for those names alone -------------------------------------

#: Half of x times one plus something, as it is bracketed.
_HALVES = ("0.5 * x * (1 + {0})", "0.5 * (x * (1 + {0}))", "x * (0.5 * (1 + {0}))")
#: √(2/π) · (x + 0.044715 · x³), as it is factored (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016).
_INNER = (
    "0.7978845608 * (x + 0.044715 * x ** 3)",
    "0.7978845608 * (x + 0.044715 * x * x * x)",
    "0.7978845608 * x * (1 + 0.044715 * x * x)",
    "0.7978845608 * x * (1 + 0.044715 * x ** 2)",
    "0.7978845608 * (x * (1 + 0.044715 * x * x))",
)
_BY_ERF = ("erf(x / 1.4142135623)", "erf(x * 0.7071067811)")


def _with_slope() -> str:
    """GELU that brings its own derivative, as capture writes an autograd function: f(d) + (x - d) · f'(d)."""
    d = "detach(x)"
    tanh = f"tanh(0.7978845608 * {d} * (1 + 0.044715 * {d} * {d}))"
    value = f"{d} * 0.5 * (1 + {tanh})"
    slope = f"0.5 * {d} * ((1 - {tanh} * {tanh}) * (0.7978845608 + 0.1070322243 * {d} * {d})) + 0.5 * (1 + {tanh})"
    return f"{value} + (x - {d}) * (({slope}) * ones_like(_))"


ACTIVATIONS: tuple[Row, ...] = (
    Row("silu", "x * sigmoid(x)", "silu(x)"),
    Row("silu", "x / (1 + exp(-x))", "silu(x)"),
    *(Row("gelu", half.format(f"tanh({i})"), "gelu(x, approximate='tanh')") for half in _HALVES for i in _INNER),
    *(Row("gelu", half.format(inner), "gelu(x)") for half in _HALVES for inner in _BY_ERF),
    Row("gelu", _with_slope(), "gelu(x, approximate='tanh')"),
)

# -- norms ------------------------------------------------------------------------------------------------------------


def _normalised(centred: str, variance: str) -> tuple[str, ...]:
    return (
        f"{centred} * rsqrt({variance} + $eps)",
        f"{centred} / sqrt({variance} + $eps)",
        f"{centred} * (1 / sqrt({variance} + $eps))",
        f"{centred} * reciprocal(sqrt({variance} + $eps))",
        f"{centred} * ({variance} + $eps) ** -0.5",
    )


def _weighted(centred: str, variance: str, weight: str) -> tuple[str, ...]:
    """A weight times what is normalised, as it is bracketed: around all of it, or around either factor."""
    whole = (f"{weight} * ({normed})" for normed in _normalised(centred, variance))
    return (
        *whole,
        *_normalised(f"({weight} * {centred})", variance),
        f"{centred} * ({weight} * rsqrt({variance} + $eps))",
    )


def _rms_norms() -> list[Row]:
    alone = "rms_norm(x, ($size,), None, $eps)"
    rows = [Row("rms_norm", "rms_norm(x, ($size,), w, $eps)", "fused.rms_norm(x, w, $eps)", (_VECTOR,)),
            Row("rms_norm", f"(1 + w) * {alone}", "fused.rms_norm(x, w, $eps, 1.0)", (_VECTOR,)),
            Row("rms_norm", f"w * {alone}", "fused.rms_norm(x, w, $eps)", (_VECTOR,)),
            Row("rms_norm", alone, "fused.rms_norm(x, None, $eps)")]  # fmt: skip
    for square in ("x ** 2", "x * x", "square(x)"):
        mean = f"mean({square}, -1, True)"
        for weight, offset in (("(1 + w)", ", 1.0"), ("w", "")):
            fused = f"fused.rms_norm(x, w, $eps{offset})"
            rows += [Row("rms_norm", spelled, fused, (_VECTOR,)) for spelled in _weighted("x", mean, weight)]
        rows += [Row("rms_norm", normed, "fused.rms_norm(x, None, $eps)") for normed in _normalised("x", mean)]
    return rows


def _layer_norms() -> list[Row]:
    alone = "layer_norm(x, ($size,), None, None, $eps, _)"
    rows = [
        *(
            Row("layer_norm", f"layer_norm(x, ($size,), {given}, $eps, _)", f"fused.layer_norm(x, {given}, $eps)")
            for given in ("w, b", "w, None", "None, b", "None, None")
        ),
        Row("layer_norm", f"w * {alone} + b", "fused.layer_norm(x, w, b, $eps)", (_VECTOR, _BIAS)),
        Row("layer_norm", f"w * {alone}", "fused.layer_norm(x, w, None, $eps)", (_VECTOR,)),
    ]
    centred = "(x - mean(x, -1, True))"
    #: What is centred, and its variance.
    spellings = (
        (centred, f"mean({centred} ** 2, -1, True)"),
        (centred, f"mean({centred} * {centred}, -1, True)"),
        (centred, "var(x, -1, correction=0, keepdim=True)"),
        (centred, "var_dim(x, -1, False, True)"),
        ("(x - var_mean(x, -1, correction=0, keepdim=True)[1])", "var_mean(x, -1, correction=0, keepdim=True)[0]"),
        ("(x - var_mean_dim(x, -1, False, True)[1])", "var_mean_dim(x, -1, False, True)[0]"),
    )
    for centred, variance in spellings:
        for spelled in _weighted(centred, variance, "w"):
            rows += [
                Row("layer_norm", f"{spelled} + b", "fused.layer_norm(x, w, b, $eps)", (_VECTOR, _BIAS)),
                Row("layer_norm", spelled, "fused.layer_norm(x, w, None, $eps)", (_VECTOR,)),
            ]
        alone_too = _normalised(centred, variance)
        rows += [Row("layer_norm", normed, "fused.layer_norm(x, None, None, $eps)") for normed in alone_too]
    return rows


# -- rotary embeddings (Su et al., "RoFormer", 2021) -------------------------------------------------------------------

#: The rotated tensor, as its halves or its neighbours are taken apart, and whether it is neighbours.
_ROTATED = (
    ("cat((-slice({0}, -1, $half, $size), slice({0}, -1, 0, $half)), -1)", False),
    ("cat((-split({0}, $halves, -1)[1], split({0}, $halves, -1)[0]), -1)", False),
    ("reshape(stack((-slice({0}, -1, 1, $size, 2), slice({0}, -1, 0, $size, 2)), -1), $shape)", True),
    ("reshape(stack((-unbind(reshape({0}, $pairs), -1)[1], unbind(reshape({0}, $pairs), -1)[0]), -1), $shape)", True),
    ("reshape(stack((-select(reshape({0}, $pairs), -1, 1), select(reshape({0}, $pairs), -1, 0)), -1), $shape)", True),
)
#: The part that is rotated and the rest, of a tensor that is rotated in part.
_PARTS = (
    ("slice(x, -1, 0, $width)", "slice(x, -1, $width, $all)"),
    ("split(x, $parts, -1)[0]", "split(x, $parts, -1)[1]"),
)


def _rotaries() -> list[Row]:
    rows = []
    for rotated, interleaved in _ROTATED:
        fused = f"fused.rotary(x, cos, sin, {interleaved})"
        rows.append(Row("rotary", f"x * cos + {rotated.format('x')} * sin", fused, (_ALL_ROTATED,)))
        for part, rest in _PARTS:
            turned = f"{part} * cos + {rotated.format(part)} * sin"
            rows.append(Row("rotary", f"cat(({turned}, {rest}), -1)", fused))
    return rows


OPERATORS: tuple[Row, ...] = (
    *_rms_norms(),
    *_layer_norms(),
    *_rotaries(),
    Row("swiglu", "silu(g) * u", "fused.swiglu(g, u)", (_ALIKE,)),
    Row("swiglu", "g * u * sigmoid(g)", "fused.swiglu(g, u)", (_ALIKE,)),
    Row("geglu", "gelu(g, approximate=$form) * u", "fused.geglu(g, u, $form)", (_ALIKE,)),
    Row("bias_gelu", "gelu(linear(x, w, b), approximate=$form)", "fused.bias_gelu(linear(x, w), b, $form)"),
    Row("bias_gelu", "gelu(addmm(b, x, w), approximate=$form)", "fused.bias_gelu(mm(x, w), b, $form)", (_LAST,)),
    Row("bias_gelu", "gelu(x + b, approximate=$form)", "fused.bias_gelu(x, b, $form)", (_BIAS,)),
    Row("bias_gelu", "gelu(b + x, approximate=$form)", "fused.bias_gelu(x, b, $form)", (_BIAS,)),
    Row("embedding", "embedding(w, i)", "fused.embedding(i, w)"),
    Row("embedding", "embedding(w, i, $padding)", "fused.embedding(i, w, $padding)"),
)

#: Operators that are fused as they are.
ALREADY = {"meshwright.cross_entropy": "cross_entropy"}
