"""``if`` on a tensor's value whose branches only assign, rewritten so that both are computed and the results selected.

    if flag and other:                       holds = _branches.all_of(lambda: flag, lambda: other)
        self.x = f(self.x)                   if _branches.is_value(holds):
    else:                                        before = _branches.values(lambda: self.x)
        self.x = g(self.x)                       self.x = f(self.x)
                                                 then = _branches.values(lambda: self.x)
                                                 (self.x,) = before
                                                 self.x = g(self.x)
                                                 (self.x,) = _branches.selected(holds, then, (lambda: self.x,))
                                             elif holds: ...

Branches of other statements stay as they are. The rewritten function takes the place of the model's own for the time of
a trace (``selected_branches``).
"""

from __future__ import annotations

import ast
import copy
import linecache
from collections.abc import Iterator, Sequence
from types import CodeType

#: The name under which rewritten functions find ``SelectedBranches``.
HELPER = "_meshwright_branches"
_FUTURE_FLAGS = 0xFFF0000  # of ``from __future__ import`` in a code object's flags


def rewritten(code: CodeType, line: int) -> CodeType | None:
    """The code of a function with the ``if`` at ``line`` rewritten; None if its branches do more than assign."""
    tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    own = _code_like(code, tree)
    if own is None or (own.co_code, own.co_names, own.co_varnames) != (code.co_code, code.co_names, code.co_varnames):
        return None  # the file is not what runs
    rewriting = _Rewriting(line)
    changed = rewriting.visit(tree)
    other = _code_like(code, ast.fix_missing_locations(changed)) if rewriting.is_done else None
    return other if other is not None and other.co_freevars == code.co_freevars else None


def _code_like(code: CodeType, tree: ast.Module) -> CodeType | None:
    """The function of a file that stands where that of ``code`` does; the file is compiled and not run."""
    flags = code.co_flags & _FUTURE_FLAGS
    codes = _codes_in(compile(tree, code.co_filename, "exec", flags=flags, dont_inherit=True))
    place = (code.co_qualname, code.co_firstlineno)
    return next((each for each in codes if (each.co_qualname, each.co_firstlineno) == place), None)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes_in(each)


class _Rewriting(ast.NodeTransformer):
    """Rewrites the ``if`` whose condition has the line."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.is_done = False

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if node.test.lineno <= self.line <= (node.test.end_lineno or 0) and not self.is_done:
            targets = _targets((*node.body, *node.orelse))
            if targets is not None:
                self.is_done = True
                return _both_ways(node, targets)
        return self.generic_visit(node)


def _targets(statements: Sequence[ast.stmt]) -> list[ast.expr] | None:
    """What statements assign to, each once: names, and attributes of names; None if they do more than assign."""
    targets: dict[str, ast.expr] = {}
    for each in statements:
        match each:
            case ast.Pass():
                own: list[ast.expr] | None = []
            case ast.Assign(targets=[ast.Name() | ast.Attribute(value=ast.Name()) as target]):
                own = [target]
            case ast.If():
                own = _targets((*each.body, *each.orelse))
            case _:
                own = None
        if own is None or any(isinstance(part, ast.NamedExpr) for part in ast.walk(each)):
            return None
        targets.update((ast.unparse(target), target) for target in own)
    return list(targets.values())


def _both_ways(node: ast.If, targets: Sequence[ast.expr]) -> list[ast.stmt]:
    place = f"{node.lineno}_{node.col_offset}"
    holds, before, then = (f"_{name}_{place}" for name in ("holds", "before", "then"))
    readers = "".join(f"lambda: {ast.unparse(target)}, " for target in targets)
    left = "".join(f"{ast.unparse(target)}, " for target in targets)
    parts = ast.parse(
        f"{holds} = {_condition(node.test)}\n"
        f"if {HELPER}.is_value({holds}):\n"
        f"    {before} = {HELPER}.values({readers})\n"
        f"    {then} = {HELPER}.values({readers})\n"
        f"    ({left}) = {before}\n"
        f"    ({left}) = {HELPER}.selected({holds}, {then}, {HELPER}.values({readers}))\n"
        f"elif {holds}:\n"
        f"    pass\n"
    )
    assignment, choice = parts.body
    assert isinstance(choice, ast.If)
    first, second, restored, selected = choice.body
    in_branches = _InBranches()
    both = [[in_branches.visit(copy.deepcopy(each)) for each in statements] for statements in (node.body, node.orelse)]
    choice.body = [first, *both[0], second, restored, *both[1], selected]
    otherwise = choice.orelse[0]
    assert isinstance(otherwise, ast.If)
    otherwise.body, otherwise.orelse = node.body, node.orelse
    for each in (assignment, choice):
        _place_at(each, node)
    return [assignment, choice]


def _place_at(statement: ast.stmt, node: ast.If) -> None:
    """Give what was written for ``node`` its place; what was the model's own keeps its own."""
    own = {id(each) for branch in (node.body, node.orelse) for part in branch for each in ast.walk(part)}
    for each in ast.walk(statement):
        if "lineno" in each._attributes and id(each) not in own:
            ast.copy_location(each, node.test)


def _condition(test: ast.expr) -> str:
    """A condition whose operands are all asked where they are tensors; those behind the first call no model's code."""
    match test:
        case ast.BoolOp(op=op, values=[first, *others]):
            name = "all_of" if isinstance(op, ast.And) else "any_of"
            operands = [first, *(_InBranches().visit(copy.deepcopy(each)) for each in others)]
            return f"{HELPER}.{name}({', '.join(f'lambda: {_condition(each)}' for each in operands)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"{HELPER}.opposite({_condition(operand)})"
    return f"({ast.unparse(test)})"


class _InBranches(ast.NodeTransformer):
    """Calls that have to change nothing: they run where the model itself would not call."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = self.generic_visit(node)
        assert isinstance(called, ast.Call)
        called.args.insert(0, called.func)
        called.func = ast.Attribute(ast.Name(HELPER, ast.Load()), "called", ast.Load())
        return called
