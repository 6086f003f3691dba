"""The Triton kernels of a chain as source."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from passes.chains.formulas import COMMON
from passes.chains.gradient import Backward, fields_of, gradients_of
from passes.chains.iteration_space import COLUMN, ROW, SCALAR
from passes.chains.operator_chain import Member, Operand, OperatorChain
from passes.shard import Local

_NARROW = frozenset({"float16", "bfloat16"})
_SIZES = ("SPACE", "TILE: tl.constexpr")
_WIDTH = 118


def wide(dtype: str) -> str:
    """The type in which kernels compute what is stored as ``dtype``."""
    return "tl.float32" if dtype in _NARROW else "tl.int1" if dtype == "bool" else f"tl.{dtype}"


@functools.cache
def _promoted(dtypes: frozenset[str]) -> str:
    import torch

    promoted = functools.reduce(torch.promote_types, (getattr(torch, dtype) for dtype in sorted(dtypes)))
    return str(promoted).removeprefix("torch.")


class Statements:
    """Lines that compute values of a chain from values that are there; ``names`` are the variables."""

    def __init__(self, chain: OperatorChain, names: Mapping[Local, str]) -> None:
        self.chain = chain
        #: What holds each value: another's variable where a value is the same.
        self.names = dict(names)
        self.rounded = {
            local for member in chain.members for local in member.compute.inputs if local.value.dtype in _NARROW
        }

    def load(self, local: Local, name: str) -> str:
        """A tensor's elements, in the type that is computed in."""
        source = f"load({name}_ptr, {name}_strides, rows, columns, exists, SPACE)"
        cast = f".to({wide(local.value.dtype)})" if local.value.dtype in _NARROW else ""
        return f"{name} = {source}{cast}"

    def value(self, member: Member) -> list[str]:
        """One operator: a line, or none if its result is its operand."""
        formula = member.formula
        assert formula is not None
        source = formula.value.format(**self._arguments(member, formula.value))
        dtype = member.output.value.dtype
        if formula.casts and dtype in _NARROW and member.output in self.rounded:
            source = f"{_atom(source)}.to(tl.{dtype}).to({wide(dtype)})"
        if source.isidentifier():
            self.names[member.output] = source
            return []
        return [f"{self.names[member.output]} = {source}"]

    def gradient(self, member: Member, argument: str, grad: str) -> str:
        """What ``grad``, the gradient of a member's result, becomes for one of its arguments."""
        formula = member.formula
        assert formula is not None
        template = formula.gradients[argument]
        arguments = self._arguments(member, template)
        source = template.format(**{**arguments, "grad": grad, "out": self.names[member.output]})
        source_type, target_type = (wide(local.value.dtype) for local in (member.output, member.operands[argument]))
        return source if source_type == target_type else f"{_atom(source)}.to({target_type})"

    def _arguments(self, member: Member, template: str) -> dict[str, str]:
        formula = member.formula
        assert formula is not None
        if formula.operands == COMMON:
            dtype = _common_dtype(member)
        else:
            dtype = member.output.value.dtype
        return {
            name: self._argument(member, name, member.arguments[name], dtype)
            for name in fields_of(template)
            if name in member.arguments
        }

    def _argument(self, member: Member, name: str, value: Any, dtype: str) -> str:
        assert member.formula is not None
        if not isinstance(value, Operand):
            return number(_as_stored(value, dtype) if member.formula.operands == COMMON else value)
        local = member.compute.inputs[value.index]
        variable = self.names[local]
        if name in member.formula.truths:
            return variable if local.value.dtype == "bool" else f"({variable} != 0)"
        if wide(local.value.dtype) == wide(dtype):
            return variable
        return f"({variable} != 0)" if dtype == "bool" else f"{variable}.to({wide(dtype)})"


def _common_dtype(member: Member) -> str:
    """The type in which operands are compared: a fraction among whole numbers makes them fractions."""
    dtype = _promoted(frozenset(local.value.dtype for local in member.operands.values()))
    numbers = [value for value in member.arguments.values() if isinstance(value, float)]
    return "float32" if numbers and not dtype.startswith(("float", "bfloat")) else dtype


def _as_stored(value: Any, dtype: str) -> Any:
    """A number as torch compares with it: rounded to the type of the tensor."""
    if not isinstance(value, float) or dtype not in _NARROW:
        return value
    import torch

    return torch.tensor(value, dtype=getattr(torch, dtype)).item()


def number(value: Any) -> str:
    """A number as Triton source."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    text = repr(value)
    return f"({text})" if text.startswith("-") else text


def _atom(source: str) -> str:
    return source if source.isidentifier() else f"({source})"


def forward_kernel(
    chain: OperatorChain, function: str, names: Mapping[Local, str], extra: Sequence[Local]
) -> list[str]:
    """The kernel that reads the chain's inputs and writes its outputs, and ``extra`` where backward needs it."""
    statements = Statements(chain, names)
    read_names, written_names = (
        [names[local] for local in chain.inputs],
        [names[local] for local in (*chain.outputs, *extra)],
    )
    lines = ["rows, columns, exists = whole_tile(SPACE, TILE)"]
    lines += [statements.load(local, names[local]) for local in chain.inputs]
    reduced = {member.output for member in chain.members if member.reduces}
    lines += [line for member in chain.members for line in statements.value(member)]
    held = statements.names
    lines += [_store(names[local], held[local], reduced=local in reduced) for local in chain.outputs]
    for local in extra:
        lines += [f"if {names[local]}_ptr is not None:", f"    {_store(names[local], held[local])}"]
    return _kernel(function, read_names, written_names, lines)


def _store(name: str, value: str, *, reduced: bool = False) -> str:
    if reduced:
        return f"store_rows({name}_ptr, {value}, rows, SPACE)"
    return f"store({name}_ptr, {value}, rows, columns, exists, SPACE)"


def backward_kernel(chain: OperatorChain, function: str, names: Mapping[Local, str], plan: Backward) -> list[str]:
    """The kernel that computes gradients of inputs; where rows are summed, a program walks its share of them."""
    statements = Statements(chain, names)
    grads = {local: f"grad_{name}" for local, name in names.items()}
    loaded = {**{grads[local]: local for local in plan.outputs}, **{names[local]: local for local in plan.saved}}
    written = [grads[local] for local in plan.inputs]
    lines = [statements.load(local, name) for name, local in loaded.items()]
    lines += [line for member in plan.again for line in statements.value(member)]
    steps, held = _gradients(statements, plan, grads)
    lines += steps
    results = {local: (grads[local], held[local]) for local in plan.inputs}
    if not any(kind in (ROW, COLUMN, SCALAR) for kind in plan.inputs.values()):
        stores = [_store(*result) for result in results.values()]
        return _kernel(function, loaded, written, ["rows, columns, exists = whole_tile(SPACE, TILE)", *lines, *stores])
    before, inside, behind = _sums(plan, results)
    body = ["rows, exists = rows_from(start, last, columns, SPACE, TILE)", *lines, *inside]
    walking = ["for start in range(first, last, TILE[0]):", *(f"    {line}" for line in body)]
    lines = ["first, last, columns = share_of_rows(SPACE, TILE, SHARES)", *before, *walking, *behind]
    return _kernel(function, loaded, written, lines, shares=True)


def _gradients(
    statements: Statements, plan: Backward, grads: Mapping[Local, str]
) -> tuple[list[str], dict[Local, str]]:
    """A line for each value on the way from the outputs to the inputs, and what then holds each gradient."""
    parts: dict[Local, list[str]] = {local: [grads[local]] for local in plan.outputs}
    held: dict[Local, str] = {}
    lines = []

    def add_up(local: Local) -> None:
        total = " + ".join(parts[local])
        if total.isidentifier():
            held[local] = total
            return
        held[local] = grads[local]
        lines.append(f"{grads[local]} = {total}")

    reached = {*plan.inputs, *(member.output for member in plan.members)}
    for member in reversed(plan.members):
        add_up(member.output)
        for argument, local in gradients_of(member):
            if local in reached:
                parts.setdefault(local, []).append(statements.gradient(member, argument, held[member.output]))
    for local in plan.inputs:
        add_up(local)
    return lines, held


def _sums(plan: Backward, results: Mapping[Local, tuple[str, str]]) -> tuple[list[str], list[str], list[str]]:
    """What stands before, inside and behind the loop over rows for each gradient."""
    before, inside, behind = [], [], []
    for local, kind in plan.inputs.items():
        name, value = results[local]
        if kind in (ROW, SCALAR):
            before.append(f"{name}_total = tl.full(TILE, 0.0, {wide(local.value.dtype)})")
            inside.append(f"{name}_total += tl.where(exists, {value}, 0.0)")
            store = "store_column_sums" if kind == ROW else "store_sum"
            behind.append(f"{store}({name}_ptr, {name}_total, columns, SPACE, TILE)")
        elif kind == COLUMN:
            inside.append(f"store_row_sums({name}_ptr, {value}, rows, exists, SPACE, TILE)")
        else:
            inside.append(_store(name, value))
    return before, inside, behind


def _kernel(
    function: str, loaded: Iterable[str], written: Iterable[str], lines: Iterable[str], *, shares: bool = False
) -> list[str]:
    """A kernel whose parameters are pointers to what it reads and writes, strides of what it reads, and sizes."""
    loaded = tuple(loaded)
    parameters = [f"{name}_ptr" for name in (*loaded, *written)]
    parameters += [f"{name}_strides" for name in loaded]
    parameters += [*_SIZES, *(["SHARES"] if shares else [])]
    header = f"def {function}({', '.join(parameters)}):"
    signature = [header] if len(header) <= _WIDTH else [f"def {function}(", *_wrapped(parameters), "):"]
    return ["@triton.jit", *signature, *(f"    {line}" for line in lines)]


def _wrapped(arguments: Sequence[str]) -> list[str]:
    """Arguments on as few lines as they fit on."""
    lines = [""]
    for argument in arguments:
        if len(lines[-1]) + len(argument) + 2 > _WIDTH - 4:
            lines.append("")
        lines[-1] += f"{argument}, "
    return [f"    {line.rstrip()}" for line in lines]
