"""The notation of patterns: Python expressions over tensors, read once into small trees.

    "w * (x * rsqrt(mean(x ** 2, -1, True) + $eps))"

=====================  ============================================================================================
``x``                  a tensor; the same name is the same tensor everywhere
``$eps``               a constant (number, text, list of sizes); the same name is the same constant
``0.5``, ``-1``        this very constant, floats to six digits; a negative dim counts from the end
``_``                  anything
``x + y``, ``x ** 2``  the operators of Python, ``+`` and ``*`` with their operands in either order
``mean(x, -1)``        an operator of ``FUNCTIONS``: arguments in the order of its schema or by name; those that are
                       not written are at their default
``split(x, $n)[1]``    one of several outputs
``ops.my.op(x)``       an operator of another library: its namespace and name, and its overload if that has a name
=====================  ============================================================================================

Casts between floating-point types need no notation: they may stand anywhere.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tensor:
    """A tensor that the pattern takes; ``"_"`` for one that does not matter."""

    name: str


@dataclass(frozen=True)
class Constant:
    """A constant that the pattern takes."""

    name: str


@dataclass(frozen=True)
class PatternLiteral:
    """A constant of this value."""

    value: Any


@dataclass(frozen=True)
class PatternCall:
    """An operator: the overloads it may be, arguments in order and by name, and which output is meant."""

    ops: tuple[str, ...]
    args: tuple[Tree, ...]
    kwargs: tuple[tuple[str, Tree], ...] = ()
    output: int = 0
    commutes: bool = False

    @functools.cached_property
    def size(self) -> int:
        """How many operators there are in the tree."""
        return 1 + sum(map(size_of, _parts(self)))

    @functools.cached_property
    def depth(self) -> int:
        """How many operators follow one another at most."""
        return 1 + max(map(depth_of, _parts(self)), default=0)

    @functools.cached_property
    def operators(self) -> frozenset[tuple[str, ...]]:
        """The overloads of every operator in the tree."""
        return frozenset({self.ops}).union(*map(operators_of, _parts(self)))


@dataclass(frozen=True)
class Sequence:
    """A list of trees."""

    items: tuple[Tree, ...]


Tree = Tensor | Constant | PatternLiteral | PatternCall | Sequence


def size_of(tree: Tree) -> int:
    """How many operators there are in a tree."""
    return tree.size if isinstance(tree, PatternCall) else sum(map(size_of, _parts(tree)))


def _parts(tree: Tree) -> tuple[Tree, ...]:
    if isinstance(tree, PatternCall):
        return (*tree.args, *(item for _, item in tree.kwargs))
    return tree.items if isinstance(tree, Sequence) else ()


def depth_of(tree: Tree) -> int:
    """How many operators follow one another at most."""
    return tree.depth if isinstance(tree, PatternCall) else max(map(depth_of, _parts(tree)), default=0)


def operators_of(tree: Tree) -> frozenset[tuple[str, ...]]:
    """The overloads of every operator in a tree."""
    if isinstance(tree, PatternCall):
        return tree.operators
    return frozenset[tuple[str, ...]]().union(*map(operators_of, _parts(tree)))


def leaves_of(tree: Tree) -> frozenset[Tensor | Constant]:
    """The tensors and constants that a tree names."""
    if isinstance(tree, (Tensor, Constant)):
        return frozenset({tree})
    return frozenset[Tensor | Constant]().union(*map(leaves_of, _parts(tree)))


def _aten(*names: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names)


#: Name in the notation → overloads; other names are those of torch with the overload ``default``.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "pow": _aten("pow.Tensor_Scalar"),
    "mean": _aten("mean.dim"),
    "sum_dim": _aten("sum.dim_IntList"),
    "index": _aten("index.Tensor"),
    "expert_linear": ("meshwright.expert_linear",),
    "var": _aten("var.correction"),
    "var_dim": _aten("var.dim"),
    "var_mean": _aten("var_mean.correction"),
    "var_mean_dim": _aten("var_mean.dim"),
    "slice": _aten("slice.Tensor"),
    "select": _aten("select.int"),
    "repeat_interleave": _aten("repeat_interleave.self_int"),
    "split": _aten("split_with_sizes"),
    "unbind": _aten("unbind.int"),
    "one_minus": _aten("rsub.Scalar"),
    "cross_entropy": ("meshwright.cross_entropy",),
}
_OPERATORS: dict[type[ast.AST], tuple[tuple[str, ...], bool]] = {
    ast.Add: (_aten("add.Tensor", "add.Scalar"), True),
    ast.Mult: (_aten("mul.Tensor", "mul.Scalar"), True),
    ast.Sub: (_aten("sub.Tensor", "sub.Scalar"), False),
    ast.Div: (_aten("div.Tensor", "div.Scalar"), False),
    ast.Pow: (_aten("pow.Tensor_Scalar"), False),
}
_CONSTANT = "constant_named_"


@functools.cache
def parse(text: str) -> PatternCall:
    """Read a pattern.

    Raises:
        ValueError: if the text is not in the notation.
    """
    try:
        expression = ast.parse(re.sub(r"\$(\w+)", rf"{_CONSTANT}\1", text), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"pattern {text!r}: {error.msg}") from error
    tree = _tree(expression, text)
    if not isinstance(tree, PatternCall):
        raise ValueError(f"pattern {text!r}: expected an operator")
    return tree


def _tree(node: ast.AST, text: str) -> Tree:
    if isinstance(node, ast.Name):
        constant = node.id.startswith(_CONSTANT)
        return Constant(node.id.removeprefix(_CONSTANT)) if constant else Tensor(node.id)
    if isinstance(node, ast.Constant):
        return PatternLiteral(node.value)
    if isinstance(node, (ast.Tuple, ast.List)):
        return Sequence(tuple(_tree(item, text) for item in node.elts))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _negative(_tree(node.operand, text))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _binary(node, text)
    if isinstance(node, ast.Subscript):
        call = _tree(node.value, text)
        output = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if not isinstance(call, PatternCall) or not isinstance(output, int):
            raise ValueError(f"pattern {text!r}: cannot read {ast.unparse(node)!r}, expected an operator and [number]")
        return PatternCall(call.ops, call.args, call.kwargs, output)
    if isinstance(node, ast.Call):
        ops = _function(node.func, text)
        kwargs = tuple((str(word.arg), _tree(word.value, text)) for word in node.keywords)
        return PatternCall(ops, tuple(_tree(argument, text) for argument in node.args), kwargs)
    raise ValueError(f"pattern {text!r}: cannot read {ast.unparse(node)!r}")


def _function(node: ast.AST, text: str) -> tuple[str, ...]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fused":
        return (f"meshwright.{node.attr}.default",)
    parts = ast.unparse(node).split(".")
    if parts[0] == "ops" and len(parts) in (3, 4) and all(map(str.isidentifier, parts)):
        return (".".join((*parts[1:], "default")[:3]),)
    if isinstance(node, ast.Name):
        return FUNCTIONS.get(node.id, _aten(node.id))
    raise ValueError(f"pattern {text!r}: cannot read {ast.unparse(node)!r}")


def _negative(tree: Tree) -> Tree:
    return PatternLiteral(-tree.value) if isinstance(tree, PatternLiteral) else PatternCall(_aten("neg"), (tree,))


def _binary(node: ast.BinOp, text: str) -> Tree:
    ops, commutes = _OPERATORS[type(node.op)]
    left, right = _tree(node.left, text), _tree(node.right, text)
    if isinstance(node.op, ast.Sub) and isinstance(left, (PatternLiteral, Constant)):
        return PatternCall(FUNCTIONS["one_minus"], (right, left))
    return PatternCall(ops, (left, right), commutes=commutes)
