"""Chains in the program's file: the plain function, the kernels beside it, and the object that chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from passes.chains.gradient import Backward, backward_of, columns_of, is_differentiable
from passes.chains.operator_chain import TRITON, Member, OperatorChain
from passes.emit.chain_kernels import backward_kernel, forward_kernel
from passes.emit.imports import KERNEL_NAMES
from passes.emit.local_call import LocalCall, LocalTensor
from passes.emit.quoting import comment, literal
from passes.emit.roles import RoleNames, operator, state_name
from passes.emit.variable_names import Names, identifier
from passes.ir.types import MeshShape
from passes.shard import Local

Expression = Callable[[LocalCall], str]

#: Names that kernels use for something else.
_RESERVED = KERNEL_NAMES | {"rows", "columns", "exists", "first", "last", "start"}
#: A chain's name says its operators, if they are no more.
_MOST_WORDS = 4


@dataclass(frozen=True)
class ChainReport:
    """What a program says of one of its chains, which several places may share.

    ``num_bytes`` are what its operators move in forward one by one, and fused.
    """

    name: str
    operators: tuple[str, ...]
    modules: tuple[str, ...]
    backend: str
    reason: str
    num_bytes: tuple[int, int]


class _Definition:
    """One distinct chain; ``modules`` are those that use it, as they come up."""

    def __init__(self, name: str, chain: OperatorChain) -> None:
        self.name, self.chain = name, chain
        self.modules: dict[str, None] = {}


class Chains:
    """The distinct chains of a file."""

    def __init__(self, mesh: MeshShape, expression: Expression, names: Names, roles: RoleNames) -> None:
        self.mesh, self.expression, self.names, self.roles = mesh, expression, names, roles
        self.definitions: dict[str, _Definition] = {}

    def call(self, chain: OperatorChain, arguments: Sequence[str], *, title: Callable[[str], str]) -> str:
        """Source of a call; ``title`` makes of a module's path what stands for it in all copies of its block."""
        plain = {local: f"v{index}" for index, local in enumerate(_locals(chain))}
        key = "\n".join(self._definition("chain", chain, plain))
        definition = self.definitions.get(key)
        if definition is None:
            definition = self.definitions[key] = _Definition(self.names.new(_chain_name(chain)), chain)
        paths = (member.compute.node.module_path for member in chain.members)
        definition.modules.update((title(path) if path else "the model itself", None) for path in paths)
        return f"_{definition.name}({', '.join(arguments)})"

    def source(self) -> str:
        """Every definition, with a comment that says what it stands for."""
        parts = []
        for definition in self.definitions.values():
            names = self._readable(definition.chain)
            lines = [*_comment(definition), *self._definition(f"_{definition.name}", definition.chain, names)]
            parts.append("".join(f"{line}\n" for line in lines))
        return "\n\n".join(parts)

    def report(self) -> tuple[ChainReport, ...]:
        """One entry for each definition."""
        return tuple(
            ChainReport(
                definition.name,
                tuple(member.compute.node.op for member in definition.chain.members),
                tuple(definition.modules),
                definition.chain.backend,
                definition.chain.reason,
                (definition.chain.bytes_apart, definition.chain.bytes_fused),
            )
            for definition in self.definitions.values()
        )

    def _readable(self, chain: OperatorChain) -> dict[Local, str]:
        """Variables called by what they are for."""
        names = Names(_RESERVED)
        return {local: names.new(self._role(local)) for local in _locals(chain)}

    def _role(self, local: Local) -> str:
        return self.roles.of(local.value) if local.state is None else state_name(local.state.path)

    def _definition(self, name: str, chain: OperatorChain, names: Mapping[Local, str]) -> list[str]:
        lines = self._plain(f"{name}_plain", chain, names)
        if chain.backend != TRITON:
            return [*lines, "", "", f"{name} = kernels.Chain(plain={name}_plain, backend={literal(chain.backend)})"]
        backward = backward_of(chain)
        extra = backward.extra if backward is not None else ()
        lines += ["", "", *forward_kernel(chain, f"{name}_forward", names, extra)]
        if backward is not None and backward.inputs:
            lines += ["", "", *backward_kernel(chain, f"{name}_backward", names, backward)]
        return [*lines, "", "", *_object(name, chain, names, backward)]

    def _plain(self, function: str, chain: OperatorChain, names: Mapping[Local, str]) -> list[str]:
        """The chain as torch operators."""
        lines = [f"def {function}({', '.join(names[local] for local in chain.inputs)}):"]
        for member in chain.members:
            compute = member.compute
            call = LocalCall(
                node=compute.node,
                inputs=tuple(_tensor(local, names[local]) for local in compute.inputs),
                outputs=(_tensor(member.output, ""),),
                choices=compute.choices,
                mesh=self.mesh,
                rule=compute.rule,
            )
            lines.append(f"    {names[member.output]} = {self.expression(call)}")
        return [*lines, f"    return {', '.join(names[local] for local in chain.outputs)}"]


def _tensor(local: Local, name: str) -> LocalTensor:
    value = local.value
    return LocalTensor(name, local.shape, value.shape, local.placement, value.requires_grad, value.dtype)


def _locals(chain: OperatorChain) -> list[Local]:
    return [*chain.inputs, *(member.output for member in chain.members)]


def _chain_name(chain: OperatorChain) -> str:
    """``add_gelu``; of a long chain the module that it is in, with its last operator."""
    words = [identifier(_short(member)) for member in chain.members]
    if len(words) <= _MOST_WORDS:
        return "_".join(words)
    module = next((part for part in reversed(chain.node.module_path.split(".")) if not part.isdigit()), "")
    return "_".join(filter(None, (identifier(module) if module else "", words[0], "to", words[-1])))


def _comment(definition: _Definition) -> list[str]:
    chain = definition.chain
    operators = ", ".join(_short(member) for member in chain.members)
    lines = [f"# {operators}", f"# of {', '.join(definition.modules)}"]
    if chain.reason:
        lines.append(f"# For torch.compile: {chain.reason}.")
    return [comment(line) for line in lines]


def _short(member: Member) -> str:
    return operator(member.compute.node)


def _object(name: str, chain: OperatorChain, names: Mapping[Local, str], backward: Backward | None) -> list[str]:
    reduced = {member.output: member for member in chain.members if member.reduces}
    fields = {
        "plain": f"{name}_plain",
        "forward": f"{name}_forward",
        "inputs": _dtypes(chain.inputs, names),
        "outputs": _dtypes(chain.outputs, names),
    }
    if reduced:
        keepdim_of = {
            names[local]: bool(reduced[local].arguments.get("keepdim")) for local in chain.outputs if local in reduced
        }
        fields["rows"] = repr(keepdim_of)
    columns = columns_of(chain)
    if columns:
        fields["columns"] = str(columns)
    if backward is not None and backward.inputs:
        fields["backward"] = f"{name}_backward"
        fields["grads"] = repr([names[local] for local in backward.outputs])
        fields["saved"] = repr([names[local] for local in backward.saved])
        if backward.extra:
            fields["extra"] = _dtypes(backward.extra, names)
        fields["gradients"] = repr({names[local]: kind for local, kind in backward.inputs.items()})
        if backward.holds_rows:
            fields["holds_rows"] = "True"
    if backward is not None and backward.passed:
        fields["passed"] = repr({names[local]: names[output] for local, output in backward.passed.items()})
    if backward is not None and backward.shared:
        fields["shared"] = repr({names[local]: names[other] for local, other in backward.shared.items()})
    with_gradient = set() if backward is None else {*backward.inputs, *backward.passed, *backward.shared}
    fixed = [names[local] for local in chain.inputs if is_differentiable(local) and local not in with_gradient]
    if fixed:
        fields["fixed"] = repr(fixed)
    return [f"{name} = kernels.Chain(", *(f"    {field}={value}," for field, value in fields.items()), ")"]


def _dtypes(locals_: Sequence[Local], names: Mapping[Local, str]) -> str:
    return repr({names[local]: local.value.dtype for local in locals_})
