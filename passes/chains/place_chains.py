"""Replace operators by the chains that compute them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from passes.chains.find_chains import find_groups
from passes.chains.formulas import ROW_OPERATORS
from passes.chains.iteration_space import best_split, contiguous_strides, fold
from passes.chains.operator_chain import INDUCTOR, TRITON, Member, OperatorChain, bytes_of
from passes.ir.graph import Node, Ref
from passes.ir.types import MeshShape
from passes.shard import Local, Repeat, RepeatedBlock, Section, ShardedGraph
from passes.shard.operations import Operation, made_by, used_by

CHAIN = "meshwright.chain"
#: The widest row that one program of a kernel reduces: its registers hold half a dozen such rows in float32.
WIDEST_ROW = 8192
#: The same where backward holds the row again, with its gradients, to find the largest number.
_WIDEST_ROW_OF_LARGEST = 2048


def chain_up(sharded: ShardedGraph) -> ShardedGraph:
    """``sharded`` with the elementwise operators of each section as chains, wherever that moves fewer bytes.

    Constants stay as they are. If the plan was made without fused operators, so does everything.
    """
    if sharded.plan.fusion is None:
        return sharded
    return dataclasses.replace(sharded, main=_Chaining(sharded.mesh).section(sharded.main))


class _Chaining:
    """Rewrites sections; one that several loops run stays one."""

    def __init__(self, mesh: MeshShape) -> None:
        self.mesh = mesh
        self.done: dict[int, Section] = {}

    def section(self, section: Section) -> Section:
        if id(section) not in self.done:
            self.done[id(section)] = dataclasses.replace(section, body=self._body(section))
        return self.done[id(section)]

    def _body(self, section: Section) -> tuple[Operation, ...]:
        outside = _Outside(section)
        chains = []
        for members in find_groups(section, self.mesh):
            chain = _chain_of(members, outside)
            if chain is not None:
                chains.append(chain)
        body = _in_order(section.body, chains)
        return tuple(self._inside(operation) if isinstance(operation, Repeat) else operation for operation in body)

    def _inside(self, repeat: Repeat) -> Repeat:
        block: RepeatedBlock = dataclasses.replace(repeat.block, section=self.section(repeat.block.section))
        return dataclasses.replace(repeat, block=block)


class _Outside:
    """Who uses what in a section."""

    def __init__(self, section: Section) -> None:
        self.users: dict[Local, set[int]] = {}
        for operation in section.body:
            for local in used_by(operation):
                self.users.setdefault(local, set()).add(id(operation))
        self.results = set(section.results)
        for operation in section.body:
            if isinstance(operation, Repeat):
                self.results.update(step.source for step in operation.between)

    def needs(self, local: Local, inside: set[int]) -> bool:
        return local in self.results or not self.users.get(local, set()) <= inside


def _chain_of(members: Sequence[Member], outside: _Outside) -> OperatorChain | None:
    """The chain of these operators; None if it moves no fewer bytes than they do."""
    inside = {id(member.compute) for member in members}
    produced = {member.output: None for member in members}
    chain_inputs = dict.fromkeys(
        local for member in members for local in member.compute.inputs if local not in produced
    )
    chain_outputs = [local for local in produced if outside.needs(local, inside)]
    apart = sum(bytes_of(*dict.fromkeys(member.compute.inputs), member.output) for member in members)
    fused = bytes_of(*chain_inputs, *chain_outputs)
    if not chain_outputs or fused >= apart:
        return None
    space = max((local.shape for member in members for local in (member.output, *member.compute.inputs)), key=_extent)
    reason = _reason_for_compiler(members, tuple(chain_inputs), space)
    return OperatorChain(
        node=_node_of(members, tuple(chain_inputs), tuple(chain_outputs)),
        inputs=tuple(chain_inputs),
        outputs=tuple(chain_outputs),
        choices=(),
        rule=None,
        members=tuple(members),
        space=space,
        backend=INDUCTOR if reason else TRITON,
        reason=reason,
        bytes_apart=apart,
        bytes_fused=fused,
    )


def _extent(shape: Sequence[int]) -> tuple[int, int]:
    count = 1
    for size in shape:
        count *= size
    return count, len(shape)


def _node_of(members: Sequence[Member], chain_inputs: Sequence[Local], chain_outputs: Sequence[Local]) -> Node:
    first = members[0].compute.node
    return Node(
        first.name,
        CHAIN,
        tuple(Ref(local.value.name) for local in chain_inputs),
        {},
        tuple(local.value for local in chain_outputs),
        _common_path([member.compute.node.module_path for member in members]),
        first.module_class,
    )


def _common_path(paths: Sequence[str]) -> str:
    split = [path.split(".") for path in paths]
    common = []
    for parts in zip(*split):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _reason_for_compiler(members: Sequence[Member], chain_inputs: Sequence[Local], space: tuple[int, ...]) -> str:
    """Why ``torch.compile`` makes the better kernel; empty if Triton code is written here."""
    used = {local for member in members for local in member.compute.inputs}
    for member in members:
        op = member.compute.node.op
        if op in ROW_OPERATORS or (member.reduces and member.output in used):
            return f"{_short(op)} is a reduction whose rows are used again"
        if member.formula is None:
            return f"{_short(op)} has no gradient in the fuser's table"
        if member.reduces and space[-1] > _widest_row(member):
            return f"rows of {space[-1]} elements are wider than one program holds"
        if not member.reduces and member.output.shape != space:
            return f"{_short(op)} computes one number a row"
    shapes = [local.shape for local in chain_inputs]
    reduces = any(member.reduces for member in members)
    columns = 1 if reduces else best_split([local.shape for local in chain_inputs if local.value.requires_grad], space)
    if fold(space, [contiguous_strides(shape, space) for shape in shapes], columns=columns) is None:
        return "its operands are broadcast over too many dims in turn"
    return ""


def _widest_row(member: Member) -> int:
    assert member.formula is not None
    finds_again = any("exists" in template for template in member.formula.gradients.values())
    return _WIDEST_ROW_OF_LARGEST if finds_again and member.output.value.requires_grad else WIDEST_ROW


def _short(op: str) -> str:
    return op.split(".")[1]


def _in_order(body: Sequence[Operation], chains: Sequence[OperatorChain]) -> tuple[Operation, ...]:
    """Operations with chains in place of their members: each where the last of them was, or earlier if it is needed."""
    chain_of = {id(member.compute): chain for chain in chains for member in chain.members}
    last = {id(chain): id(chain.members[-1].compute) for chain in chains}
    maker: dict[Local, Operation] = {}
    for operation in body:
        chain = chain_of.get(id(operation))
        outputs = made_by(operation)
        maker.update(dict.fromkeys(outputs, operation if chain is None else chain))
    placed: dict[int, Operation] = {}

    def add(operation: Operation) -> None:
        stack = [operation]
        while stack:
            current = stack[-1]
            missing = [
                maker[local]
                for local in used_by(current)
                if local in maker and id(maker[local]) not in placed and maker[local] is not current
            ]
            if id(current) in placed or not missing:
                placed.setdefault(id(current), current)
                stack.pop()
            else:
                stack.extend(missing)

    for operation in body:
        chain = chain_of.get(id(operation))
        if chain is None:
            add(operation)
        elif last[id(chain)] == id(operation):
            add(chain)
    return tuple(placed.values())
