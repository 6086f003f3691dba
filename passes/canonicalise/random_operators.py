"""Random operators in terms of a few that programs draw by counter (``runtime.ops.random``).

What is left are ``rand``, ``randn`` and ``randint`` of a given size or like a tensor, ``bernoulli``, dropout, and
attention that drops. With u a number of ``rand`` moved into (0, 1), and z one of ``randn``:

    normal  m + s z               uniform      a + (b - a) u         exponential  -log(u) / λ
    cauchy  m + s tan(π (u - ½))  log_normal   exp(m + s z)          geometric    ⌊log(u) / log(1 - p)⌋ + 1

Samples of ``multinomial`` are the classes of the largest p / exponential; with replacement, where the cumulative
probabilities pass u. A permutation is the order of numbers of ``rand``. Alpha dropout and dropout of whole features
multiply by a mask.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from passes.canonicalise.fx import argument, aten, calls, insert, is_random, replace, shape, value
from passes.ir.errors import CaptureError
from passes.torch_compat.operators import schema

#: What programs draw as it is.
_DRAWN = (
    aten.rand.default, aten.randn.default, aten.randint.low, aten.rand_like.default, aten.randn_like.default,
    aten.randint_like.low_dtype, aten.bernoulli.default, aten.dropout.default,
    aten.scaled_dot_product_attention.default,
)  # fmt: skip
_ALPHA = 1.7580993408473766  # of alpha dropout: -(scale · alpha) of SELU


def write_out_random_operators(module: fx.GraphModule) -> None:
    """Replace random operators, in place.

    Raises:
        CaptureError: for one that has no such form.
    """
    write_out_in(module.graph)


def write_out_in(graph: fx.Graph) -> None:
    """``write_out_random_operators`` for a graph that is no module's; those without such a form stay."""
    for node in calls(graph):
        if not is_random(node) or _is_off(node):
            continue
        target: Any = node.target
        packet, in_place = str(target.overloadpacket).removesuffix("_"), schema(target).name.endswith("_")
        if not node.users and not in_place:
            graph.erase_node(node)  # Python asked what is so of all numbers
            continue
        if any(entry.name == "generator" and argument(node, "generator") is not None for entry in _arguments(node)):
            raise CaptureError(
                f"{_place(node)}{target} draws from a torch.Generator of the model's own, which no plan can follow: "
                "leave generator= out (programs draw from a seed, the step and the position of an element)"
            )
        write = None if target in _DRAWN else _WRITERS.get(packet)
        if write is not None:
            result = write(_RandomCalls(node))
            if in_place:
                result = insert(node, aten.copy_.default, (node.args[0], result))
            replace(node, result)


def refuse_other_random_operators(module: fx.GraphModule) -> None:
    """Refuse what draws in another way than programs do.

    Raises:
        CaptureError: if there is such an operator that is not switched off.
    """
    for node in calls(module.graph):
        if is_random(node) and node.target not in _DRAWN and not _is_off(node):
            raise CaptureError(
                f"{_place(node)}{node.target} has no form that draws the same under every plan: draw with torch.rand, "
                "randn, randint, bernoulli, multinomial, exponential_ or dropout, or pass what it gives as an input"
            )


def _is_off(node: fx.Node) -> bool:
    """Whether what would drop drops nothing: outside of training, or a recurrent network without dropout."""
    names = {entry.name for entry in _arguments(node)}
    switches = names & {"train", "training", "dropout"}
    return any(argument(node, name) in (False, 0.0) for name in switches)


def _place(node: fx.Node) -> str:
    """Which module draws, for people."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = stack[-1][0].partition("@")[0].removeprefix("model").removeprefix(".") if stack else ""
    return f"in module {path!r}: "


def _arguments(node: fx.Node) -> Any:
    return schema(node.target).arguments


class _RandomCalls:
    """Writes operators before a random one, ``node``."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.dtype = value(node).dtype
        self.size = list(shape(node))

    def __getitem__(self, name: str) -> Any:
        """An argument of the operator."""
        return argument(self.node, name)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return insert(self.node, target, args, kwargs)

    def drawn(self, kind: str) -> fx.Node:
        """Numbers of ``rand`` or ``randn`` in the shape of the result, like its source where that has the shape."""
        source = self.node.args[0] if self.node.args else None
        dtype = self.dtype if self.dtype.is_floating_point else torch.get_default_dtype()
        if isinstance(source, fx.Node) and list(shape(source)) == self.size:
            options = {} if value(source).dtype == dtype else {"dtype": dtype}
            return self.call(getattr(aten, f"{kind}_like").default, source, **options)
        return self.call(getattr(aten, kind).default, self.size, dtype=dtype)

    def scaled(self, x: fx.Node, factor: Any, summand: Any) -> fx.Node:
        """``x · factor + summand``, numbers or tensors (through which no gradient goes)."""
        if isinstance(factor, fx.Node) or factor != 1:
            x = self.call(aten.mul.Tensor, x, self._detached(factor))
        if isinstance(summand, fx.Node) or summand != 0:
            x = self.call(aten.add.Tensor, x, self._detached(summand))
        return x

    def _detached(self, operand: Any) -> Any:
        return self.call(aten.detach.default, operand) if isinstance(operand, fx.Node) else operand

    def inside(self) -> fx.Node:
        """Uniform numbers above 0 and below 1."""
        u = self.drawn("rand")
        return self.call(aten.add.Tensor, u, torch.finfo(value(u).dtype).eps / 8)

    def log_of_uniform(self, factor: float) -> fx.Node:
        return self.call(aten.mul.Tensor, self.call(aten.log.default, self.inside()), factor)

    def below(self, size: list[int], chance: Any, dtype: torch.dtype) -> fx.Node:
        """1 with a probability, else 0."""
        u = self.call(aten.rand.default, size, dtype=torch.float32)
        return self.call(aten.to.dtype, self.call(aten.lt.Scalar, u, chance), dtype)


def _normal(c: _RandomCalls) -> fx.Node:
    return c.scaled(c.drawn("randn"), c["std"], c["mean"])


def _uniform(c: _RandomCalls) -> fx.Node:
    return c.scaled(c.drawn("rand"), c["to"] - c["from"], c["from"])


def _exponential(c: _RandomCalls) -> fx.Node:
    return c.log_of_uniform(-1.0 / c["lambd"])


def _cauchy(c: _RandomCalls) -> fx.Node:
    angle = c.scaled(c.inside(), math.pi, -0.5 * math.pi)
    return c.scaled(c.call(aten.tan.default, angle), c["sigma"], c["median"])


def _log_normal(c: _RandomCalls) -> fx.Node:
    return c.call(aten.exp.default, c.scaled(c.drawn("randn"), c["std"], c["mean"]))


def _geometric(c: _RandomCalls) -> fx.Node:
    steps = c.log_of_uniform(1.0 / math.log1p(-c["p"]) if c["p"] < 1 else 0.0)
    return c.call(aten.to.dtype, c.call(aten.add.Tensor, c.call(aten.floor.default, steps), 1.0), c.dtype)


def _random(c: _RandomCalls) -> fx.Node:
    """Whole numbers in a range, or up to the largest that the dtype counts to."""
    low, high = c["from"] or 0, c["to"]
    if high is None:
        kind = c.dtype
        high = (
            2 ** (1 - round(math.log2(torch.finfo(kind).eps))) + 1 if kind.is_floating_point else torch.iinfo(kind).max
        )
    return c.call(aten.randint_like.low_dtype, c.node.args[0], low, high)


def _randint(c: _RandomCalls) -> fx.Node:
    low = 0 if c["low"] is None else c["low"]
    return c.call(aten.randint.low, low, c["high"], c.size, dtype=c.dtype)


def _randint_like(c: _RandomCalls) -> fx.Node:
    low = 0 if c["low"] is None else c["low"]
    return c.call(aten.randint_like.low_dtype, c.node.args[0], low, c["high"], dtype=c.dtype)


def _bernoulli(c: _RandomCalls) -> fx.Node:
    chance = c["p"]
    if isinstance(chance, fx.Node):
        spread = c.call(aten.expand.default, c.call(aten.detach.default, chance), c.size)
        return c.call(aten.to.dtype, c.call(aten.bernoulli.default, spread), c.dtype)
    u = c.call(aten.rand_like.default, c.node.args[0], dtype=torch.float32)
    return c.call(aten.to.dtype, c.call(aten.lt.Scalar, u, chance), c.dtype)


def _permutation(c: _RandomCalls) -> fx.Node:
    u = c.call(aten.rand.default, c.size, dtype=torch.float64)
    order = c.call(aten.argsort.default, u)
    return order if c.dtype == torch.int64 else c.call(aten.to.dtype, order, c.dtype)


def _multinomial(c: _RandomCalls) -> fx.Node:
    chances, count = c.call(aten.detach.default, c.node.args[0]), c["num_samples"]
    if count > 1 and c["replacement"]:
        summed = c.call(aten.cumsum.default, chances, -1)
        u = c.call(aten.rand.default, c.size, dtype=value(summed).dtype)
        limit = c.call(aten.mul.Tensor, u, c.call(aten.slice.Tensor, summed, -1, -1))
        classes = c.call(aten.searchsorted.Tensor, summed, limit, right=True)
        return c.call(aten.clamp.default, classes, 0, shape(chances)[-1] - 1)
    u = c.call(aten.rand_like.default, chances)
    u = c.call(aten.add.Tensor, u, torch.finfo(value(u).dtype).eps / 8)
    score = c.call(aten.div.Tensor, chances, c.call(aten.neg.default, c.call(aten.log.default, u)))
    best = c.call(aten.topk.default, score, count, -1)
    return c.call(operator.getitem, best, 1)


def _feature_size(c: _RandomCalls) -> list[int]:
    return [*c.size[:2], *(1 for _ in c.size[2:])]


def _feature_dropout(c: _RandomCalls) -> fx.Node:
    mask = c.below(_feature_size(c), 1.0 - c["p"], c.dtype)
    factor = 1.0 / (1.0 - c["p"]) if c["p"] < 1 else 0.0
    return c.call(aten.mul.Tensor, c.node.args[0], c.call(aten.mul.Tensor, mask, factor))


def _alpha_dropout_of(size: Callable[[_RandomCalls], list[int]]) -> Callable[[_RandomCalls], fx.Node]:
    def write(c: _RandomCalls) -> fx.Node:
        x, p = c.node.args[0], c["p"]
        if p == 1:
            return c.call(aten.mul.Tensor, x, 0.0)
        mask = c.below(size(c), 1.0 - p, c.dtype)
        scale = 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1.0) * (1.0 - p))
        shift = c.scaled(mask, _ALPHA * scale, _ALPHA * scale * (p - 1.0))
        product = c.call(aten.mul.Tensor, x, c.call(aten.mul.Tensor, mask, scale))
        return c.call(aten.add.Tensor, product, shift)

    return write


def _rrelu(c: _RandomCalls) -> fx.Node:
    x = c.node.args[0]
    slope = c.scaled(c.call(aten.rand_like.default, x), c["upper"] - c["lower"], c["lower"])
    return c.call(aten.where.self, c.call(aten.gt.Scalar, x, 0), x, c.call(aten.mul.Tensor, x, slope))


_WRITERS: dict[str, Callable[[_RandomCalls], fx.Node]] = {
    f"aten.{name}": write
    for name, write in {
        "normal": _normal,
        "normal_functional": _normal,
        "uniform": _uniform,
        "exponential": _exponential,
        "cauchy": _cauchy,
        "log_normal": _log_normal,
        "geometric": _geometric,
        "random": _random,
        "randint": _randint,
        "randint_like": _randint_like,
        "bernoulli": _bernoulli,
        "randperm": _permutation,
        "multinomial": _multinomial,
        "feature_dropout": _feature_dropout,
        "alpha_dropout": _alpha_dropout_of(lambda c: c.size),
        "feature_alpha_dropout": _alpha_dropout_of(_feature_size),
        "rrelu": _rrelu,
    }.items()
}
