"""Random calls of every operator that has a rule, for ``test_rules``: ``SAMPLERS`` maps an operator to a sampler.

A sampler takes a ``Draw`` and returns (args, kwargs) on whole float64 tensors with small dims, often of size 1 or odd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

import passes.torch_compat.gated_delta_rule
import passes.torch_compat.host_operators
import passes.torch_compat.linear_recurrence  # noqa: F401  (registers one more)
from passes.rules.operator_call import REQUIRED, signature, tensor_arguments
from passes.rules.rule_table import POINTWISE, POINTWISE_2, POINTWISE_3, RULES

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
SIZES = (1, 2, 2, 3, 4, 4, 6)


class Draw:
    """Hypothesis' ``draw`` with the strategies that samplers share."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.generator = torch.Generator().manual_seed(self.int(0, 2**16))

    def int(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def of(self, *options: Any) -> Any:
        return self.data.draw(st.sampled_from(options))

    def flag(self) -> bool:
        return self.data.draw(st.booleans())

    def size(self) -> int:
        return self.of(*SIZES)

    def shape(self, low: int = 1, high: int = 3) -> list[int]:
        return [self.size() for _ in range(self.int(low, high))]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def between(self, low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=self.generator) * (high - low) + low

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def bools(self, *shape: int) -> torch.Tensor:
        return self.integers(0, 2, *shape).bool()

    def broadcast(self, shape: list[int]) -> list[int]:
        """A shape that broadcasts to ``shape``."""
        trailing = shape[self.int(0, len(shape)) if self.flag() else 0 :]
        return [1 if self.int(0, 3) == 0 else size for size in trailing]

    def dim(self, rank: int) -> int:
        return self.int(-rank, rank - 1)

    def dims(self, rank: int) -> list[int]:
        """At least one dim, none twice."""
        chosen = [dim for dim in range(rank) if self.flag()] or [self.int(0, rank - 1)]
        return [dim - rank if self.flag() else dim for dim in chosen]


Sampler = Callable[[Draw], Arguments]
SAMPLERS: dict[str, Sampler] = {}


def sampler(*ops: str) -> Callable[[Sampler], Sampler]:
    def register(function: Sampler) -> Sampler:
        for op in ops:
            name = f"aten.{op}" if not op.startswith("meshwright.") else op
            SAMPLERS[name if name.count(".") == 2 or op.startswith("mesh") else f"{name}.default"] = function
        return function

    return register


# -- pointwise: from the table itself ----------------------------------------------------------------------------------

#: Operators that are not defined, or not differentiable, everywhere: bounds of their operands.
DOMAINS = {
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (-0.9, 0.9)),
    **dict.fromkeys(("logit", "special_entr"), (0.05, 0.95)),
    **dict.fromkeys(("digamma", "lgamma", "log", "log10", "log1p", "log2", "rsqrt", "sqrt", "reciprocal"), (0.3, 3.0)),
    **dict.fromkeys(("pow", "float_power", "xlogy", "polar", "hypot", "atan2", "i0", "special_i0"), (0.3, 3.0)),
    "acosh": (1.1, 3.0), "special_log1p": (0.0, 1.0), "special_ndtri": (0.05, 0.95),
    **dict.fromkeys(("special_bessel_y0", "special_bessel_y1", "special_modified_bessel_k0", "special_zeta",
                     "special_modified_bessel_k1", "special_scaled_modified_bessel_k0", "special_xlog1py", "igamma",
                     "special_scaled_modified_bessel_k1", "polygamma", "igammac"), (1.1, 3.0)),
    "mvlgamma": (1.1, 3.0),
}  # fmt: skip
INTEGERS = {"bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__", "__lshift__",
            "__rshift__", "gcd", "lcm"}  # fmt: skip
COMPLEX = {"imag", "_conj"}
BOOLEANS = {"logical_not", "logical_and", "logical_or", "logical_xor"}
#: Values of the arguments that a pointwise operator requires beside its tensors.
SCALARS: dict[str, Any] = {"exponent": 2.5, "other": 0.3, "value": -0.5, "dtype": torch.float32,
                           "threshold": 0.1, "fill_value": 2.0, "weight": 0.3, "min": -0.4, "max": 0.6, "self": 1.5,
                           "device": "cpu", "layout": torch.strided, "n": 1, "p": 2}  # fmt: skip


def _pointwise(op: str) -> Sampler:
    base = op.split(".")[1]
    names = tensor_arguments(op)
    boolean = {"condition", "mask"}

    def operand(draw: Draw, name: str, shape: list[int]) -> torch.Tensor:
        if name in boolean or base in BOOLEANS:
            return draw.bools(*shape)
        if base in INTEGERS:
            return draw.integers(0, 8, *shape)
        if base in COMPLEX:
            return torch.complex(draw.normal(*shape), draw.normal(*shape))
        low, high = DOMAINS.get(base, (-2.0, 2.0))
        return draw.between(low, high, *shape)

    def sample(draw: Draw) -> Arguments:
        shape = draw.shape(1, 3)
        args, full = [], draw.int(0, len(names) - 1)
        for name, default in signature(op) or ():
            if name in names and (default is REQUIRED or name in ("min", "max")):
                like = base in ("to", "type_as", "expand_as") or (op, name) in UNBROADCAST
                free = names.index(name) != full and not like
                args.append(operand(draw, name, draw.broadcast(shape) if free else shape))
                if op == "aten.masked_fill.Tensor" and name == "value":
                    args[-1] = draw.normal()
            elif name == "rounding_mode":
                continue
            elif default is REQUIRED or (base in ("clamp", "clip") and name == "min"):
                args.append(2 if base in INTEGERS else SCALARS[name])
            else:
                break
        return tuple(args), {"rounding_mode": "trunc"} if "_mode" in op else {}

    return sample


#: Operands that must have the output's shape.
UNBROADCAST = {
    ("aten.masked_fill.Scalar", "self"),
    ("aten.masked_fill.Tensor", "self"),
    ("aten.copy.default", "self"),
    ("aten.copy_.default", "self"),
}

for _op, _line in RULES.items():
    if _line in (POINTWISE, POINTWISE_2, POINTWISE_3):
        SAMPLERS[_op] = _pointwise(_op)


@sampler("add.Tensor", "sub.Tensor", "subtract.Tensor", "mul.Tensor", "multiply.Tensor", "div.Tensor", "divide.Tensor",
         "true_divide.Tensor")  # fmt: skip
def binary(draw: Draw) -> Arguments:
    shape = draw.shape(0, 3)
    first = draw.between(0.5, 2.0, *shape)
    if draw.int(0, 3) == 0:
        return (first, 2.5), {}
    second = draw.between(0.5, 2.0, *draw.broadcast(shape))
    return ((first, second) if draw.flag() else (second.expand(shape).clone(), first)), {}


@sampler("tanh_backward", "sigmoid_backward", "gelu_backward")
def gradient_of_pointwise(draw: Draw) -> Arguments:
    shape = draw.shape(0, 3)
    return (draw.normal(*shape), draw.between(0.1, 0.9, *shape)), {}


@sampler("threshold_backward")
def gradient_of_threshold(draw: Draw) -> Arguments:
    shape = draw.shape(0, 3)
    return (draw.normal(*shape), draw.normal(*shape), 0), {}


@sampler("mul.Scalar", "multiply.Scalar", "div.Scalar", "divide.Scalar", "add.Scalar", "sub.Scalar", "rsub.Scalar")
def by_number(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape(0, 3)), 2.5), {}


@sampler("neg", "negative", "positive", "clone", "contiguous", "alias", "detach", "lift_fresh_copy")
def unary_linear(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape(0, 3)),), {}


@sampler("where.Scalar")
def where_numbers(draw: Draw) -> Arguments:
    return (draw.bools(*draw.shape()), 1.0, 2.0), {}


@sampler("to.device")
def to_device(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape()), "cpu", torch.float64), {}


@sampler("isclose", "heaviside", "copy", "complex", "to.other", "type_as", "expand_as")
def same_shape_pair(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.normal(*shape), draw.normal(*shape)), {}


@sampler("lerp.Scalar")
def lerp_number(draw: Draw) -> Arguments:
    shape = draw.shape()
    return (draw.normal(*shape), draw.normal(*shape), 0.3), {}


@sampler("tril", "triu")
def triangle(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape(2, 4)), draw.int(-1, 1)), {}


@sampler("inverse", "linalg_inv", "matrix_exp", "linalg_matrix_exp")
def square_matrix(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape(0, 2), 3, 3),), {}


@sampler("cholesky")
def positive_matrix(draw: Draw) -> Arguments:
    root = draw.normal(*draw.shape(0, 2), 3, 3)
    return (root @ root.mT + torch.eye(3, dtype=torch.float64),), {}


# -- matrix products ---------------------------------------------------------------------------------------------------


@sampler("linear")
def linear(draw: Draw) -> Arguments:
    k, n = draw.size(), draw.size()
    bias = (draw.normal(n),) if draw.flag() else ()
    return (draw.normal(*draw.shape(0, 3), k), draw.normal(n, k), *bias), {}


@sampler("matmul")
def matmul(draw: Draw) -> Arguments:
    m, k, n = draw.size(), draw.size(), draw.size()
    batch = draw.shape(0, 2)
    left = [k] if draw.int(0, 3) == 0 else [*batch, m, k]
    right = [k] if draw.int(0, 3) == 0 else [*draw.broadcast(batch), k, n]
    return (draw.normal(*left), draw.normal(*right)), {}


@sampler("mm")
def mm(draw: Draw) -> Arguments:
    m, k, n = draw.size(), draw.size(), draw.size()
    return (draw.normal(m, k), draw.normal(k, n)), {}


@sampler("bmm")
def bmm(draw: Draw) -> Arguments:
    b, m, k, n = (draw.size() for _ in range(4))
    return (draw.normal(b, m, k), draw.normal(b, k, n)), {}


@sampler("addmm")
def addmm(draw: Draw) -> Arguments:
    m, k, n = (draw.size() for _ in range(3))
    summand = draw.of([n], [m, n], [1, n])
    numbers = {"beta": 0.5, "alpha": 2} if draw.flag() else {}
    return (draw.normal(*summand), draw.normal(m, k), draw.normal(k, n)), numbers


@sampler("baddbmm")
def baddbmm(draw: Draw) -> Arguments:
    b, m, k, n = (draw.size() for _ in range(4))
    summand = draw.of([n], [b, m, n], [b, 1, n], [m, n])
    numbers = {"beta": 0.5, "alpha": 2} if draw.flag() else {}
    return (draw.normal(*summand), draw.normal(b, m, k), draw.normal(b, k, n)), numbers


@sampler("mv")
def mv(draw: Draw) -> Arguments:
    m, k = draw.size(), draw.size()
    return (draw.normal(m, k), draw.normal(k)), {}


@sampler("dot")
def dot(draw: Draw) -> Arguments:
    k = draw.size()
    return (draw.normal(k), draw.normal(k)), {}


@sampler("outer")
def outer(draw: Draw) -> Arguments:
    return (draw.normal(draw.size()), draw.normal(draw.size())), {}


@sampler("einsum")
def einsum(draw: Draw) -> Arguments:
    equation = draw.of(
        "bij,bjk->bik", "ij,jk->ki", "abc,cd,b->ad", "bhid,bhjd->bhij", "ij->ji", "i,j->ij", "bnh,hk->bnk",
        "...ij,...jk->...ik", "...i,ij->...j", "a...,a...->...", "ij,kj", "...ji", "bii->bi", "ii,ij->j",
    )  # fmt: skip
    sizes = {letter: draw.size() for letter in "abcdhijkn"}
    rest = draw.shape(0, 2)
    shapes = []
    for operand in equation.partition("->")[0].split(","):
        before, dots, after = operand.partition("...")
        between = draw.broadcast(rest) if dots else []
        shapes.append([*(sizes[letter] for letter in before), *between, *(sizes[letter] for letter in after)])
    return (equation, [draw.normal(*shape) for shape in shapes]), {}


@sampler("cdist")
def cdist(draw: Draw) -> Arguments:
    batch = draw.shape(0, 2)
    return (draw.normal(*batch, draw.size(), 3), draw.normal(*batch, draw.size(), 3)), {}


# -- views -------------------------------------------------------------------------------------------------------------


def _regrouped(draw: Draw, shape: list[int]) -> list[int]:
    """Another shape of as many elements: dims split, merged and padded with ones, or factored anew."""
    if draw.int(0, 3) == 0:
        total = math.prod(shape)
        first = draw.of(*[size for size in range(1, total + 1) if total % size == 0])
        return [first, total // first]
    target: list[int] = []
    for size in shape:
        divisor = draw.of(*[part for part in range(1, size + 1) if size % part == 0])
        pieces = [divisor, size // divisor] if draw.flag() else [size]
        if target and draw.int(0, 2) == 0:
            target[-1] *= pieces.pop(0)
        target.extend(pieces)
    if draw.int(0, 2) == 0:
        target.insert(draw.int(0, len(target)), 1)
    return target


@sampler("view", "reshape", "_unsafe_view")
def reshape(draw: Draw) -> Arguments:
    shape = draw.shape(1, 4)
    return (draw.normal(*shape), _regrouped(draw, shape)), {}


@sampler("view_as", "reshape_as")
def reshape_as(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), draw.normal(*_regrouped(draw, shape))), {}


@sampler("flatten.using_ints")
def flatten(draw: Draw) -> Arguments:
    shape = draw.shape(2, 4)
    start = draw.int(0, len(shape) - 1)
    return (draw.normal(*shape), start, draw.int(start, len(shape) - 1)), {}


@sampler("ravel", "t", "numpy_T", "adjoint", "mT")
def matrix_view(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), draw.size()),), {}


@sampler("unflatten.int")
def unflatten(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.int(0, len(shape) - 1)
    part = draw.of(*[part for part in range(1, shape[dim] + 1) if shape[dim] % part == 0])
    return (draw.normal(*shape), dim, [part, -1]), {}


@sampler("squeeze")
def squeeze(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape(1, 4)),), {}


@sampler("squeeze.dim")
def squeeze_dim(draw: Draw) -> Arguments:
    shape = draw.shape(1, 4)
    return (draw.normal(*shape), draw.dim(len(shape))), {}


@sampler("squeeze.dims")
def squeeze_dims(draw: Draw) -> Arguments:
    shape = draw.shape(1, 4)
    return (draw.normal(*shape), draw.dims(len(shape))), {}


@sampler("unsqueeze")
def unsqueeze(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), draw.dim(len(shape) + 1)), {}


@sampler("transpose.int", "swapaxes", "swapdims")
def transpose(draw: Draw) -> Arguments:
    shape = draw.shape(2, 4)
    return (draw.normal(*shape), draw.dim(len(shape)), draw.dim(len(shape))), {}


@sampler("permute")
def permute(draw: Draw) -> Arguments:
    shape = draw.shape(2, 4)
    return (draw.normal(*shape), draw.data.draw(st.permutations(range(len(shape))))), {}


@sampler("movedim.int")
def movedim(draw: Draw) -> Arguments:
    shape = draw.shape(2, 4)
    return (draw.normal(*shape), draw.dim(len(shape)), draw.dim(len(shape))), {}


@sampler("movedim.intlist")
def movedims(draw: Draw) -> Arguments:
    return (draw.normal(2, 4, 3, 2), draw.of([0, 2], [3, 1]), draw.of([1, 0], [2, 3])), {}


@sampler("expand", "broadcast_to")
def expand(draw: Draw) -> Arguments:
    target = draw.shape(1, 4)
    return (draw.normal(*draw.broadcast(target)), target), {}


@sampler("repeat")
def repeat(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), [draw.int(1, 2) for _ in range(len(shape) + draw.int(0, 1))]), {}


@sampler("repeat_interleave.self_int")
def repeat_interleave(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), draw.int(1, 3), draw.dim(len(shape))), {}
