"""The patterns: how models spell what there is a fused operator for. One row a spelling, larger ones tried first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from passes.fuse.expert_patterns import expert_spellings
from passes.fuse.pattern_notation import PatternCall, parse

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
        pattern: the spelling, in the notation of ``passes.fuse.pattern_notation``.
        fused: what stands for it, in the same notation.
        conditions: what must hold of the tensors bound.
    """

    name: str
    pattern: str
    fused: str
    conditions: tuple[Condition, ...] = ()

    @functools.cached_property
    def tree(self) -> PatternCall:
        return parse(self.pattern)

    @functools.cached_property
    def result(self) -> PatternCall:
        return parse(self.fused)


_VECTOR = Condition("the weight has one entry for each entry of the last dim", lambda of: of["w"] == of["x"][-1:])
_BIAS = Condition("the bias has one entry for each entry of the last dim", lambda of: of["b"] == of["x"][-1:])
_LAST = Condition("the bias has one entry for each column", lambda of: of["b"] == of["w"][-1:])
_ALIKE = Condition("gate and up are of one shape", lambda of: of["g"] == of["u"])
_ALL_ROTATED = Condition(
    "cosines and sines are as wide as the tensor", lambda of: of["cos"][-1:] == of["sin"][-1:] == of["x"][-1:]
)

_ALL_PAIRS = Condition(
    "there are a cosine and a sine for each pair of entries",
    lambda of: of["cos"][-1:] == of["sin"][-1:] and 2 * of["cos"][-1] == of["x"][-1],
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

#: The two sides of every pair, as they are taken apart, and whether they are neighbours.
_SIDES = (
    ("slice({0}, -1, 0, $half)", "slice({0}, -1, $half, $size)", False),
    ("split({0}, $halves, -1)[0]", "split({0}, $halves, -1)[1]", False),
    ("slice({0}, -1, 0, $size, 2)", "slice({0}, -1, 1, $size, 2)", True),
    ("unbind(reshape({0}, $pairs), -1)[0]", "unbind(reshape({0}, $pairs), -1)[1]", True),
    ("select(reshape({0}, $pairs), -1, 0)", "select(reshape({0}, $pairs), -1, 1)", True),
)
#: What the sides become, where there is a cosine and a sine for each pair, and the sine that turns them likewise.
_DIRECTIONS = (
    ("first * cos - second * sin, second * cos + first * sin", "sin"),
    ("first * cos + second * sin, second * cos - first * sin", "-sin"),
    ("first * cos + second * sin, first * -sin + second * cos", "-sin"),
)
#: Cosines and sines of entries, from those of pairs that are halves, or neighbours.
_FOR_HALVES = "cat((cos, cos), -1), cat(({0}, {0}), -1), False"
_FOR_NEIGHBOURS = "repeat_interleave(cos, 2, -1), repeat_interleave({0}, 2, -1), True"
#: Neighbours as complex numbers, and the fused operator's angles from theirs (Llama as it was published).
_COMPLEX = "reshape(view_as_real(view_as_complex(reshape(x, $pairs)) * angle), $shape)"
_FOR_COMPLEX = ", ".join(f"repeat_interleave(select(view_as_real(angle), -1, {part}), 2, -1)" for part in (0, 1))
#: Two sides joined to halves, and to neighbours.
_TO_HALVES, _TO_NEIGHBOURS = "cat(({0}), -1)", "reshape(stack(({0}), -1), $shape)"
#: The part that is rotated and the rest, of a tensor that is rotated in part.
_PARTS = (
    ("slice(x, -1, 0, $width)", "slice(x, -1, $width, $all)"),
    ("split(x, $parts, -1)[0]", "split(x, $parts, -1)[1]"),
)
#: Two halves and the rest, taken apart at once.
_THREE_PARTS = (
    ("slice(x, -1, 0, $half)", "slice(x, -1, $half, $width)", "slice(x, -1, $width, $all)"),
    ("split(x, $parts, -1)[0]", "split(x, $parts, -1)[1]", "split(x, $parts, -1)[2]"),
)


def _rotaries() -> list[Row]:
    by_complex = f"fused.rotary(x, {_FOR_COMPLEX}, True)"
    rows = [Row("rotary", _COMPLEX, by_complex), *_pairs_of_heads(_COMPLEX, by_complex)]
    for first, second, neighbours in _SIDES:
        join = _TO_NEIGHBOURS if neighbours else _TO_HALVES
        turned = "{0} * cos + " + join.format(f"-{second}, {first}") + " * sin"
        rows += _whole_and_part(turned, f"fused.rotary(x, cos, sin, {neighbours})", _ALL_ROTATED)
        for sides, sine in _DIRECTIONS:
            apart = _laid_on(sides, first, second)
            tables = (_FOR_NEIGHBOURS if neighbours else _FOR_HALVES).format(sine)
            rows += _whole_and_part(join.format(apart), f"fused.rotary(x, {tables})", _ALL_PAIRS)
            if neighbours:
                rows += _pairs_of_heads(join.format(apart).format("x"), f"fused.rotary(x, {tables})")
                rows.append(_neighbours_to_halves(first, second, sides, sine))
            else:
                rows += [_joined_at_once(apart.format(part), rest, sine) for part, rest in _PARTS]
    for sides, sine in _DIRECTIONS:
        rows += [_joined_at_once(_laid_on(sides, *halves), rest, sine) for *halves, rest in _THREE_PARTS]
    return rows


def _pairs_of_heads(turned: str, fused: str) -> list[Row]:
    """Heads and pairs may be taken apart by one reshape: the fused operator then needs one to heads."""
    heads = fused.replace("(x,", "(reshape(x, $shape),", 1)
    return [Row("rotary", turned, heads)] if "$pairs" in turned else []


def _laid_on(sides: str, first: str, second: str) -> str:
    return sides.replace("first", first).replace("second", second)


def _whole_and_part(turned: str, fused: str, condition: Condition) -> list[Row]:
    """Of all of a tensor, and of a part to which the rest is joined."""
    parts = (f"cat(({turned.format(part)}, {rest}), -1)" for part, rest in _PARTS)
    return [Row("rotary", turned.format("x"), fused, (condition,)), *(Row("rotary", part, fused) for part in parts)]


def _joined_at_once(halves: str, rest: str, sine: str) -> Row:
    return Row("rotary", f"cat(({halves}, {rest}), -1)", f"fused.rotary(x, {_FOR_HALVES.format(sine)})")


def _neighbours_to_halves(first: str, second: str, sides: str, sine: str) -> Row:
    """Neighbours that are halves when they are rotated (DeepSeek-V3)."""
    halves = _TO_HALVES.format(f"{first}, {second}").format("x")
    turned = _TO_HALVES.format(_laid_on(sides, first, second)).format("x")
    return Row("rotary", turned, f"fused.rotary({halves}, {_FOR_HALVES.format(sine)})", (_ALL_PAIRS,))


OPERATORS: tuple[Row, ...] = (
    *(Row("experts", spelled, fused) for spelled, fused in expert_spellings()),
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
