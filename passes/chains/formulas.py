"""What each operator of a chain is in a Triton kernel, and its gradient: the fuser's table.

In a formula ``{self}`` and the like stand for arguments by their name in the operator's schema, ``{out}`` for its
result, ``{grad}`` for the gradient of that. They are put in as names or numbers, so formulas need no brackets around
them. Names that are not Triton's come from ``runtime.kernels.scalar_math``.

Special values are torch's: what is not a number stays so through ``relu``, ``clamp``, ``maximum`` and the like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: The type in which operands are: that of the result, or that to which the operands promote (comparisons).
RESULT, COMMON = "result", "common"


@dataclass(frozen=True)
class Formula:
    """One operator.

    Attributes:
        value: its result.
        gradients: for each tensor argument that has one, what ``{grad}`` becomes.
        operands: the type in which arguments are, ``RESULT`` or ``COMMON``.
        truths: arguments that are taken as truth values.
        whole_numbers: also for integers.
        gives_truth: the result is a truth value.
        casts: the result is the operand in another type.
    """

    value: str
    gradients: Mapping[str, str] = field(default_factory=dict)
    operands: str = RESULT
    truths: frozenset[str] = frozenset()
    whole_numbers: bool = False
    gives_truth: bool = False
    casts: bool = False


def _of_self(value: str, gradient: str) -> Formula:
    return Formula(value, {"self": gradient})


_PRODUCT = Formula("{self} * {other}", {"self": "{grad} * {other}", "other": "{grad} * {self}"}, whole_numbers=True)
_QUOTIENT = Formula("{self} / {other}", {"self": "{grad} / {other}", "other": "-{grad} * {self} / {other} / {other}"})
_LARGER = Formula(
    "larger({self}, {other})",
    {"self": "larger_share({grad}, {self}, {other})", "other": "larger_share({grad}, {other}, {self})"},
    whole_numbers=True,
)
_SMALLER = Formula(
    "-larger(-{self}, -{other})",
    {"self": "larger_share({grad}, -{self}, -{other})", "other": "larger_share({grad}, -{other}, -{self})"},
)
_CHOICE = Formula(
    "tl.where({condition}, {self}, {other})",
    {"self": "tl.where({condition}, {grad}, 0.0)", "other": "tl.where({condition}, 0.0, {grad})"},
    truths=frozenset({"condition"}),
    whole_numbers=True,
)
_FILLED = Formula(
    "tl.where({mask}, {value}, {self})",
    {"self": "tl.where({mask}, 0.0, {grad})", "value": "tl.where({mask}, {grad}, 0.0)"},
    truths=frozenset({"mask"}),
    whole_numbers=True,
)
_CAST = Formula("{self}", {"self": "{grad}"}, whole_numbers=True, casts=True)

#: Functions of one number: name, value, gradient.
_FUNCTIONS: dict[str, Formula] = {
    "neg": Formula("-{self}", {"self": "-{grad}"}, whole_numbers=True),
    "abs": Formula("tl.abs({self})", {"self": "{grad} * sign({self})"}, whole_numbers=True),
    "exp": _of_self("tl.exp({self})", "{grad} * {out}"),
    "exp2": _of_self("tl.exp2({self})", "{grad} * {out} * 0.6931471805599453"),
    "log": _of_self("tl.log({self})", "{grad} / {self}"),
    "log2": _of_self("tl.log2({self})", "{grad} / ({self} * 0.6931471805599453)"),
    "sqrt": _of_self("tl.sqrt({self})", "{grad} / (2 * {out})"),
    "rsqrt": _of_self("tl.rsqrt({self})", "-0.5 * {grad} * {out} * {out} * {out}"),
    "reciprocal": _of_self("1 / {self}", "-{grad} * {out} * {out}"),
    "square": _of_self("{self} * {self}", "2 * {grad} * {self}"),
    "tanh": _of_self("tanh({self})", "{grad} * (1 - {out} * {out})"),
    "sigmoid": _of_self("sigmoid({self})", "{grad} * {out} * (1 - {out})"),
    "erf": _of_self("tl.erf({self})", "{grad} * 1.1283791670955126 * tl.exp(-{self} * {self})"),
    "sin": _of_self("tl.sin({self})", "{grad} * tl.cos({self})"),
    "cos": _of_self("tl.cos({self})", "-{grad} * tl.sin({self})"),
    "relu": Formula("tl.where({self} <= 0, 0, {self})", {"self": "tl.where({out} <= 0, 0.0, {grad})"}),
    "silu": _of_self("silu({self})", "{grad} * silu_slope({self})"),
    "floor": _of_self("tl.floor({self})", "{grad} * 0"),
    "ceil": _of_self("tl.ceil({self})", "{grad} * 0"),
    "logical_not": Formula("({self} == 0)", operands=COMMON, whole_numbers=True, gives_truth=True),
}

_COMPARISONS = {
    "eq": "==", "ne": "!=", "not_equal": "!=", "lt": "<", "less": "<", "le": "<=", "less_equal": "<=", "gt": ">",
    "greater": ">", "ge": ">=", "greater_equal": ">=",
}  # fmt: skip
_LOGIC = {"and": "&", "or": "|", "xor": "^"}
_BOTH = frozenset({"self", "other"})

FORMULAS: dict[str, Formula] = {
    **{f"aten.{name}.default": formula for name, formula in _FUNCTIONS.items()},
    **{
        f"aten.{name}.{overload}": formula
        for names, formula in (
            (("mul", "multiply"), _PRODUCT),
            (("div", "divide", "true_divide"), _QUOTIENT),
        )
        for name in names
        for overload in ("Tensor", "Scalar")
    },
    **{
        f"aten.{name}.{overload}": Formula(
            f"({{self}} {sign} {{other}})", operands=COMMON, whole_numbers=True, gives_truth=True
        )
        for name, sign in _COMPARISONS.items()
        for overload in ("Tensor", "Scalar")
    },
    **{
        f"aten.logical_{name}.default": Formula(
            f"({{self}} {sign} {{other}})", truths=_BOTH, whole_numbers=True, gives_truth=True
        )
        for name, sign in _LOGIC.items()
    },
    **dict.fromkeys(("aten.maximum.default", "aten.max.other"), _LARGER),
    **dict.fromkeys(("aten.minimum.default", "aten.min.other"), _SMALLER),
    **{f"aten.where.{overload}": _CHOICE for overload in ("self", "ScalarOther", "ScalarSelf", "Scalar")},
    **{f"aten.masked_fill.{overload}": _FILLED for overload in ("Scalar", "Tensor")},
    **dict.fromkeys(("aten.to.dtype", "aten._to_copy.default", "aten.to.dtype_layout"), _CAST),
}  # fmt: skip

Arguments = Mapping[str, Any]


def _sum(sign: str) -> Callable[[Arguments], Formula]:
    """``self ± alpha · other``."""

    def formula(arguments: Arguments) -> Formula:
        factor = "" if arguments.get("alpha", 1) == 1 else " * {alpha}"
        gradients = {"self": "{grad}", "other": f"{'-' if sign == '-' else ''}{{grad}}{factor}"}
        return Formula(f"{{self}} {sign} {{other}}{factor}", gradients, whole_numbers=True)

    return formula


def _reversed_difference(arguments: Arguments) -> Formula:
    """``other - alpha · self``."""
    factor = "" if arguments.get("alpha", 1) == 1 else " * {alpha}"
    gradients = {"self": f"-{{grad}}{factor}", "other": "{grad}"}
    return Formula(f"{{other}} - {{self}}{factor}", gradients, whole_numbers=True)


#: Largest whole exponent that is written as a product.
_MOST_FACTORS = 4


def _power(arguments: Arguments) -> Formula | None:
    """Powers with a constant exponent that are products or roots; others have no row."""
    exponent = arguments.get("exponent")
    if not isinstance(exponent, (int, float)) or isinstance(exponent, bool):
        return None
    special = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal", 2: "square"}
    if exponent in special:
        return _FUNCTIONS[special[exponent]]
    if exponent != int(exponent) or not 1 <= exponent <= _MOST_FACTORS:
        return None
    factors = ["{self}"] * int(exponent)
    return _of_self(" * ".join(factors), " * ".join(["{grad}", str(int(exponent)), *factors[1:]]))


def _gelu(arguments: Arguments) -> Formula:
    name = "gelu_tanh" if arguments.get("approximate", "none") == "tanh" else "gelu"
    return _of_self(f"{name}({{self}})", f"{{grad}} * {name}_slope({{self}})")


def _bounded(low: str, high: str, *, slope_at_bounds: bool) -> Callable[[Arguments], Formula | None]:
    """``clamp`` and its relatives, whose bounds are the arguments ``low`` and ``high``."""
    equal = "=" if slope_at_bounds else ""
    signs = {low: ("<", f">{equal}"), high: (">", f"<{equal}")}

    def formula(arguments: Arguments) -> Formula | None:
        bounds = [name for name in (low, high) if arguments.get(name) is not None]
        value = "{self}"
        for name in bounds:
            value = f"tl.where({{self}} {signs[name][0]} {{{name}}}, {{{name}}}, {value})"
        inside = " & ".join(f"({{self}} {signs[name][1]} {{{name}}})" for name in bounds)
        return Formula(value, {"self": f"tl.where({inside}, {{grad}}, 0.0)"}, whole_numbers=True) if bounds else None

    return formula


def _leaky(arguments: Arguments) -> Formula:
    slope = "{negative_slope}" if "negative_slope" in arguments else "0.01"
    return Formula(
        f"tl.where({{self}} > 0, {{self}}, {{self}} * {slope})",
        {"self": f"tl.where({{self}} > 0, {{grad}}, {{grad}} * {slope})"},
    )


#: Operators whose formula depends on their constants.
_DEPENDING: dict[str, Callable[[Arguments], Formula | None]] = {
    **{f"aten.add.{overload}": _sum("+") for overload in ("Tensor", "Scalar")},
    **{f"aten.{name}.{overload}": _sum("-") for name in ("sub", "subtract") for overload in ("Tensor", "Scalar")},
    **{f"aten.rsub.{overload}": _reversed_difference for overload in ("Tensor", "Scalar")},
    "aten.pow.Tensor_Scalar": _power,
    "aten.gelu.default": _gelu,
    "aten.leaky_relu.default": _leaky,
    "aten.clamp.default": _bounded("min", "max", slope_at_bounds=True),
    "aten.clip.default": _bounded("min", "max", slope_at_bounds=True),
    "aten.clamp_min.default": _bounded("min", "max", slope_at_bounds=True),
    "aten.clamp_max.default": _bounded("min", "max", slope_at_bounds=True),
    "aten.hardtanh.default": _bounded("min_val", "max_val", slope_at_bounds=False),
}

#: Sums over the last dim and the like, which may end a chain.
REDUCTIONS: dict[str, Formula] = {
    "aten.sum.dim_IntList": Formula(
        "row_sum({self}, exists)", {"self": "{grad}"}, whole_numbers=True
    ),
    "aten.mean.dim": Formula("row_sum({self}, exists) / SPACE[3]", {"self": "{grad} / SPACE[3]"}),
    "aten.amax.default": Formula("row_max({self}, exists)", {"self": "row_max_share({grad}, {self}, exists)"}),
    "aten.amin.default": Formula("-row_max(-{self}, exists)", {"self": "row_max_share({grad}, -{self}, exists)"}),
}  # fmt: skip

#: Operators that treat each row alone but are no sum over it; only a compiler takes them into a kernel with others.
ROW_OPERATORS = frozenset(
    {
        "aten.softmax.int", "aten._softmax.default", "aten.log_softmax.int", "aten._log_softmax.default",
        "aten.var.correction", "aten.var.dim", "aten.logsumexp.default",
    }
)  # fmt: skip


def is_listed(op: str) -> bool:
    """Whether an operator is in the tables, whatever its constants."""
    return op in FORMULAS or op in _DEPENDING or op in REDUCTIONS or op in ROW_OPERATORS


def formula_of(op: str, arguments: Arguments) -> Formula | None:
    """The formula of an operator with these arguments; None if the table has none."""
    depending = _DEPENDING.get(op)
    return depending(arguments) if depending is not None else FORMULAS.get(op)
