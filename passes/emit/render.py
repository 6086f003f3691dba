"""Sections as lines of Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Sequence

from passes.chains import OperatorChain
from passes.emit.aliases import Aliases
from passes.emit.chains import Chains
from passes.emit.conversion_calls import conversion_call, conversion_comment, converted_name
from passes.emit.expressions import LocalCall, LocalTensor
from passes.emit.paths import arithmetic, attribute, describe_local, list_slice, roots_title
from passes.emit.quoting import comment as comment_text
from passes.emit.roles import STREAM, RoleNames
from passes.emit.source_layout import fits, with_comment
from passes.emit.statements import Sisters, Statement, given_by, statements_of, taken_by
from passes.emit.variable_names import Variables
from passes.ir.types import MeshShape
from passes.shard import Compute, Convert, Local, Repeat, RepeatedBlock, Section, UnitPolicy

Expression = Callable[[LocalCall], str]

#: Sisters whose numbers of heads differ are given their shape in one line that leaves that number open.
_NUMBER_OF_HEADS = re.compile(r"(?<=\.unflatten\(-1, \()\d+(?=, \d+\)\))")


class Renderer:
    """Renders one section: gives each local tensor a variable, reusing a name where its old value is done with."""

    def __init__(
        self,
        section: Section,
        *,
        mesh: MeshShape,
        expression: Expression,
        roles: RoleNames,
        roots: tuple[str, ...] = (),
        block_names: dict[int, str] | None = None,
        constants: Sequence[Local] = (),
        carried: Collection[int] = (),
        batch_axis: str | None = None,
        chains: Chains | None = None,
        copies: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        """Take up ``section``, whose operators stand under ``roots``.

        Args:
            constants: what the section takes behind its arguments.
            carried: which arguments come from the copy before.
            copies: module paths of all copies of the section.
        """
        self.batch_axis = batch_axis
        self.chains = chains
        self.copies = copies
        self.section = section
        #: Draws are numbered within a block; the program's own numbers are those of the model.
        self.first_draw = (section.first_draw or 0) if roots else 0
        self.mesh = mesh
        self.expression = expression
        self.roles = roles
        self.roots = roots
        self.block_names = block_names or {}
        #: What goes from copy to copy is x.
        self.preferred = dict.fromkeys((section.arguments[index] for index in carried), STREAM)
        for operation in section.body:
            if isinstance(operation, Repeat):
                self.preferred.update((operation.entries[index], STREAM) for index, _ in operation.carried)
        self.items = statements_of(section, self._role)
        self.lines: list[str] = []
        self.module_path = ""
        locals_ = [*section.arguments, *constants, *(local for item in self.items for local in given_by(item))]
        named = set(map(self._role, locals_))
        self.aliases = Aliases(section.body, self.weights_name, beside=named)
        last_use = {local: position for position, item in enumerate(self.items) for local in taken_by(item)}
        last_use.update((local, len(self.items)) for local in section.results)
        self.variables = Variables((*self.block_names.values(), *self.aliases.names), last_use)
        self.arguments = [self._argument(local, ()) for local in section.arguments]
        self.constants = [self._argument(local, self.arguments) for local in constants]

    def _argument(self, local: Local, beside: Iterable[str]) -> str:
        names_in_use = {*self.variables.names.values(), *beside}
        return self.variables.bind(local, self._role(local), -1, beside=names_in_use)

    def _role(self, local: Local) -> str:
        return self.preferred.get(local) or self.roles.of(local.value)

    def source_of(self, local: Local) -> str:
        """A local tensor as source: a variable, or a state in the weights."""
        if local.state is None:
            return self.variables[local]
        return attribute(self.weights_name(local.state.root), local.state.path)

    def _operand(self, local: Local) -> str:
        """As ``source_of``, by the short name of a state's module, which ``_heading`` introduced."""
        return self.variables[local] if local.state is None else self.aliases.source_of(local.state)

    def weights_name(self, root: int | None) -> str:
        """What the method calls the weights below one of the roots."""
        return "w" if root is None or len(self.roots) < 2 else f"w{root}"

    def body(self) -> list[str]:
        """Lines of the body, not indented, without the return."""
        for position, item in enumerate(self.items):
            if isinstance(item, Repeat):
                self._repeat(item, position)
                continue
            self._heading(item, position)
            if isinstance(item, Convert):
                self._convert(item, position)
            elif isinstance(item, Sisters):
                self._sisters(item, position)
            else:
                self._statement(item, position)
        return self.lines

    # -- operators ------------------------------------------------------------------------------------------------

    def _statement(self, statement: Statement, position: int) -> None:
        head = self._head(statement)
        only = statement.outputs[0]
        if len(statement.outputs) == 1 and not statement.views and head == self._first_variable(statement):
            self.variables.share(only, head)
            return
        targets: list[str] = []
        for local in statement.outputs:
            targets.append(self.variables.bind(local, self._role(local), position, beside=set(targets) - {"_"}))
        self._assign(statement, ", ".join(targets), head)

    def _assign(self, statement: Statement, targets: str, head: str) -> None:
        """``targets`` from an operator and its views: in one line, or in two if it is too long."""
        comment = self._described(statement)
        if targets == "_" and not statement.views:
            self._write(head)
            return
        line = f"{targets} = {self._views(statement, head)}"
        if statement.views and not fits(line):
            self._write(f"{targets} = {head}")
            line = f"{targets} = {self._views(statement, targets)}"
        self._write(line, comment)

    def _sisters(self, sisters: Sisters, position: int) -> None:
        """In one line if there is room; then their views, in one line if they are alike."""
        members = sisters.members
        views_alone = all(member.is_view for member in members)
        heads = [self._head(member) for member in members]
        sources = [self._operand(member.inputs[0]) for member in members] if views_alone else []
        read = [{self._operand(local) for local in member.inputs} for member in members]
        names: list[str] = []
        for index, member in enumerate(members):
            others = set[str]().union(*(each for place, each in enumerate(read) if place != index))
            names.append(self.variables.bind(member.outputs[0], self._role(member.outputs[0]), position,
                                             beside=others | set(names)))  # fmt: skip
        together = ", ".join(names)
        line = f"{together} = {', '.join(heads)}"
        views = {_NUMBER_OF_HEADS.sub("-1", self._views(member, "each")) for member in members}
        if views_alone:
            views = {
                _NUMBER_OF_HEADS.sub("-1", self._views(member, self._call(member.compute, ["each"])))
                for member in members
            }
            line = f"{together} = {', '.join(self._views(member, head) for member, head in zip(members, heads))}"
        comments = self._described_together(members, names)
        alike = len(views) == 1 and views != {"each"}
        in_turn = f"{together} = [{next(iter(views))} for each in ({', '.join(sources or names)})]"
        if views_alone and len(views) == 1 and len(line) > len(in_turn):
            self._write(in_turn, *comments)
        elif not fits(line) or (not alike and views != {"each"} and not views_alone):
            for member, name, head in zip(members, names, heads):
                self._assign(member, name, head)
        elif views_alone or not alike:
            self._write(line, *comments)
        else:
            self._write(line)
            self._write(in_turn, *comments)

    def _head(self, statement: Statement) -> str:
        compute = statement.compute
        sources = [self._operand(local) for local in compute.inputs]
        if isinstance(compute, OperatorChain):
            assert self.chains is not None
            return self.chains.call(compute, sources, title=self._title)
        return self._call(compute, sources)

    def _views(self, statement: Statement, source: str) -> str:
        """``source`` with the statement's views behind it."""
        for view in statement.views:
            source = self._call(view, [_with_brackets(source)])
        return source

    def _call(self, compute: Compute, sources: Sequence[str]) -> str:
        call = LocalCall(
            node=compute.node,
            inputs=tuple(_tensor(local, source) for local, source in zip(compute.inputs, sources)),
            outputs=tuple(_tensor(local, "") for local in compute.outputs),
            choices=compute.choices,
            mesh=self.mesh,
            rule=compute.rule,
            draw=0 if compute.node.draw is None else compute.node.draw - self.first_draw,
        )
        return self.expression(call)

    def _first_variable(self, statement: Statement) -> str | None:
        local = next((local for local in statement.inputs if local.state is None), None)
        return None if local is None else self.variables[local]

    def _described(self, statement: Statement) -> str:
        """Shapes and types of what a statement gives, where its types are others than those of what it takes."""
        before = next((local for local in statement.inputs if local.state is None), None)
        first = statement.outputs[0]
        return "" if before is not None and before.placement == first.placement else describe_local(first, self.mesh)

    def _described_together(self, members: Sequence[Statement], names: Sequence[str]) -> list[str]:
        """As ``_described``, each description once."""
        named: dict[str, list[str]] = {}
        for member, name in zip(members, names):
            named.setdefault(self._described(member), []).append(name)
        if len(named) == 1:
            return [f"each {text}" for text in named if text]
        return [f"{', '.join(alike)}: {text}" for text, alike in named.items() if text]

    def _title(self, path: str) -> str:
        """A module's path with the numbers of all copies of the block that it is in."""
        for index, root in enumerate(self.roots):
            if path == root or path.startswith(f"{root}."):
                return roots_title(tuple((copy[index],) for copy in self.copies)) + path[len(root) :]
        return path

    # -- comments -------------------------------------------------------------------------------------------------

    def _write(self, line: str, *comments: str) -> None:
        *above, beside = comments or ("",)
        self.lines.extend(f"# {comment_text(comment)}" for comment in above)
        self.lines.extend(with_comment(line, beside))

    def _heading(self, item: Statement | Sisters | Convert, position: int) -> None:
        """Say which modules the lines that follow are of: by short names for their weights, or in a comment."""
        lines, module = self.aliases.introduce(local.state for local in taken_by(item) if local.state is not None)
        for line in lines:
            self._write(line)
        if module:
            self.module_path = module
            return
        path, is_shown = self._module_of(item, position)
        apart = not (_is_inside(path, self.module_path) or _is_inside(self.module_path, path))
        if path and apart and not is_shown:
            self._write(f"# {comment_text(path)}")
        if path and (apart or is_shown):
            self.module_path = path

    def _module_of(self, item: Statement | Sisters | Convert, position: int) -> tuple[str, bool]:
        """Path of the module that computes, and whether its weights in the line say so."""
        computes: Statement | Sisters | None = None
        if not isinstance(item, Convert):
            computes = item
        elif item.source.state is not None:
            later = (after for after in self.items[position:] if isinstance(after, (Statement, Sisters)))
            computes = next(later, None)
        if computes is None:
            return "", False
        first = computes.members[0] if isinstance(computes, Sisters) else computes
        path = self._relative(first.compute.node.module_path)
        states = [self._relative(local.state.path) for local in taken_by(item) if local.state is not None]
        own = any(state.startswith(f"{path}.") for state in states)
        weights = own or any(local.value.kind in ("parameter", "buffer") for local in first.inputs)
        return (path.rpartition(".")[0] or path) if weights else path, own

    def _relative(self, path: str) -> str:
        for root in self.roots:
            if path == root or path.startswith(f"{root}."):
                return path[len(root) + 1 :]
        return path

    # -- conversions ----------------------------------------------------------------------------------------------

    def _convert(self, convert: Convert, position: int) -> None:
        source = self._operand(convert.source)
        call = conversion_call(convert, source, self.mesh, batch_axis=self.batch_axis)
        if convert.source.state is not None:
            base = self._role(convert.target)
        elif convert.target in self.preferred or self.variables.is_done(convert.source, position):
            base = self.preferred.get(convert.target, source)
        else:
            base = converted_name(convert, source)
        name = self.variables.bind(convert.target, base, position)
        self._write(f"{name} = {call}", conversion_comment(convert))

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _repeat(self, repeat: Repeat, position: int) -> None:
        block = repeat.block
        if block.roots[0] != ("",):
            self._write(f"# {comment_text(roots_title(block.roots))}")
        carried = dict(repeat.carried)
        variables = [self.source_of(entry) for entry in repeat.entries]
        for index in carried:
            entry = repeat.entries[index]
            is_free = entry.state is None and self.variables.is_done(entry, position)
            if not is_free or variables.count(variables[index]) > 1:
                fresh = self.variables.free(STREAM, position, beside=variables)
                self._write(f"{fresh} = {variables[index]}")
                variables[index] = fresh
        between = self._name_results(repeat, variables, carried, position)
        targets = ", ".join(self.variables[result] for result in repeat.results)

        def call(weights: str) -> str:
            instance = f"{self.block_names[id(block.section)]}({weights})"
            runs = instance if repeat.policy is None else _unit(instance, repeat.policy)
            return f"{targets} = {runs}({', '.join(variables)})"

        zero = 0 if repeat.policy is None else repeat.policy.zero
        self._loops(block, call, between, f"ZeRO {zero}" if zero else "")

    def _name_results(
        self, repeat: Repeat, variables: list[str], carried: dict[int, Local], position: int
    ) -> list[str]:
        """Name what the block gives; returns the lines that convert it for the next copy."""
        first_of = {convert.target: convert for convert in repeat.between}
        for index, made_of in carried.items():
            start = made_of
            while start in first_of:
                self.variables.share(start, variables[index])
                start = first_of[start].source
            self.variables.share(start, variables[index])
        for result in repeat.results:
            if result not in self.variables:
                beside = {*variables, *(self.variables[each] for each in repeat.results if each in self.variables)}
                loops = len(repeat.block.roots) > 1
                self.variables.bind(result, self._role(result), position, beside=beside if loops else ())
        lines = []
        for convert in repeat.between:
            call = conversion_call(convert, self.variables[convert.source], self.mesh, batch_axis=self.batch_axis)
            lines += with_comment(f"    {self.variables[convert.target]} = {call}", conversion_comment(convert))
        return lines

    def _loops(self, block: RepeatedBlock, call: Callable[[str], str], between: list[str], comment: str) -> None:
        count = len(block.roots)
        if count == 1:
            self._write(call(_one_copy(block, 0)), comment)
            return
        looped = count - 1 if between else count
        variables = ["layer"] if len(block.roots[0]) == 1 else [f"layer{i}" for i in range(len(block.roots[0]))]
        slices = [list_slice([copy[i] for copy in block.roots[:looped]]) for i in range(len(block.roots[0]))]
        weights = ", ".join(variables)
        if block.first_draws:
            variables.append("draw")
            slices.append(arithmetic(block.first_draws[:looped]))
            weights += ", first_draw=draw"
        listed = slices[0] if len(slices) == 1 else f"zip({', '.join(slices)})"
        copies = f"{looped} copies" if looped > 1 else ""
        self._write(f"for {', '.join(variables)} in {listed}:", ", ".join(filter(None, (copies, comment))))
        self._write(f"    {call(weights)}")
        self.lines.extend(between)
        if between:
            self._write(call(_one_copy(block, -1)))


def _is_inside(path: str, module: str) -> bool:
    """Whether ``path`` is ``module`` or in it."""
    return path == module or path.startswith(f"{module}.")


def _tensor(local: Local, source: str) -> LocalTensor:
    value = local.value
    return LocalTensor(source, local.shape, value.shape, local.placement, value.requires_grad, value.dtype)


def _with_brackets(source: str) -> str:
    """``source`` as something whose methods can be called."""
    kind = ast.parse(source, mode="eval").body
    return source if isinstance(kind, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)) else f"({source})"


def _one_copy(block: RepeatedBlock, copy: int) -> str:
    """What a block is made of for one of its copies."""
    draws = [f"first_draw={block.first_draws[copy]}"] if block.first_draws and block.first_draws[copy] else []
    return ", ".join([*(attribute("w", root) for root in block.roots[copy]), *draws])


def _unit(block: str, policy: UnitPolicy) -> str:
    """A block as a unit of a step: its weights are there while it runs."""
    return f"self.unit({block}{'' if policy.recompute == 'none' else f', recompute={policy.recompute!r}'})"
