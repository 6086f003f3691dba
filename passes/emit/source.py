"""A sharded graph as a Python file: one class for each distinct block, one for the program."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from passes.emit.chains import ChainReport, Chains
from passes.emit.conversion_calls import reduced_dtypes
from passes.emit.emitted_program import ENTRY_POINT
from passes.emit.imports import imports
from passes.emit.paths import describe_local, roots_comment
from passes.emit.quoting import comment, docstring, literal
from passes.emit.render import Expression, Renderer
from passes.emit.roles import RoleNames
from passes.emit.source_layout import WIDTH, fitted
from passes.emit.variable_names import Names, class_name
from passes.shard import Convert, Local, Repeat, Section, ShardedGraph
from passes.shard.operations import used_by

_HEADER = """\
Each rank runs this on its own part of every tensor; "global shape → local shape {axis: type}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too."""


def render(sharded: ShardedGraph, expression: Expression) -> tuple[str, tuple[ChainReport, ...]]:
    """The whole file, and what it has of chains."""
    loops = _distinct(_loops(sharded))
    names = Names({ENTRY_POINT})
    block_names = {id(loop.block.section): names.new(class_name(loop.block.module_class)) for loop in loops}
    writer = _SourceWriter(sharded, expression, block_names, names)
    parts = [*(writer.block_class(loop) for loop in loops), writer.program_class()]
    if writer.chains.definitions:
        parts.insert(0, writer.chains.source())
    body = "\n\n".join(parts)
    source = "\n".join((_docstring(sharded), "", imports(body, reduced_dtypes(_converts(sharded))), "", body))
    return fitted(source), writer.chains.report()


def _docstring(sharded: ShardedGraph) -> str:
    model, mesh, part = map(docstring, (sharded.graph.model_name, str(sharded.mesh), sharded.part))
    title = textwrap.wrap(f'"""{model} on mesh {mesh}{part}, written by Meshwright.', WIDTH, break_long_words=False)
    return "\n".join((*title, "", _HEADER, '"""'))


def _loops(sharded: ShardedGraph) -> list[Repeat]:
    return [operation for operation in sharded.main.body if isinstance(operation, Repeat)]


def _converts(sharded: ShardedGraph) -> Iterator[Convert]:
    """Every conversion of a program."""
    for operation in sharded.main.body:
        inside = (*operation.block.section.body, *operation.between) if isinstance(operation, Repeat) else (operation,)
        yield from (convert for convert in inside if isinstance(convert, Convert))


def _distinct(loops: Sequence[Repeat]) -> list[Repeat]:
    """One of the loops over each block: of those that run the same section, one over all their copies."""
    loop_by_section: dict[int, Repeat] = {}
    for loop in loops:
        earlier = loop_by_section.setdefault(id(loop.block.section), loop)
        if earlier is not loop:
            block = dataclasses.replace(earlier.block, roots=(*earlier.block.roots, *loop.block.roots))
            loop_by_section[id(loop.block.section)] = dataclasses.replace(earlier, block=block)
    return list(loop_by_section.values())


class _SourceWriter:
    """Writes the classes of one file."""

    def __init__(
        self, sharded: ShardedGraph, expression: Expression, block_names: dict[int, str], names: Names
    ) -> None:
        self.sharded = sharded
        self.expression = expression
        self.block_names = block_names
        sections = [sharded.main, sharded.constants, *(loop.block.section for loop in _loops(sharded))]
        used = (local for section in sections for operation in section.body for local in used_by(operation))
        states = {local.value.name: local.state.path for local in used if local.state is not None}
        self.roles = RoleNames(sharded.graph, states)
        self.chains = Chains(sharded.mesh, expression, names, self.roles)

    def _renderer(self, section: Section, **options: Any) -> Renderer:
        return Renderer(
            section,
            mesh=self.sharded.mesh,
            expression=self.expression,
            roles=self.roles,
            batch_axis=self.sharded.batch_axis,
            chains=self.chains,
            **options,
        )

    def block_class(self, loop: Repeat) -> str:
        """A block: what its copies do."""
        block = loop.block
        carried = tuple(index for index, _ in loop.carried)
        renderer = self._renderer(block.section, roots=block.section_roots, carried=carried, copies=block.roots)
        body = renderer.body()
        returned = f"return {', '.join(renderer.source_of(local) for local in block.section.results)}"
        weights = [renderer.weights_name(root) for root in range(len(block.roots[0]))]
        lines = [
            f"class {self.block_names[id(block.section)]}(Block):{roots_comment(block.roots)}",
            _signature("forward", renderer.arguments),
            *_weights_lines(weights, [*body, returned]),
            *_argument_comments(block.section.arguments, renderer.arguments, self.sharded),
            *body,
            returned,
        ]
        return _indented(lines)

    def program_class(self) -> str:
        """What runs the step, and what computes its constants."""
        sharded = self.sharded
        renderer = self._renderer(sharded.main, block_names=self.block_names, constants=sharded.constants.results)
        body = renderer.body()
        outputs = [
            f"{literal(path)}: {renderer.source_of(local)}"
            for path, local in zip(sharded.graph.outputs, sharded.main.results)
        ]
        returned = f"return {{{', '.join(outputs)}}}"
        lines = [f"class {ENTRY_POINT}(Block):"]
        if sharded.constants.body:
            lines += [*self._constants_method(), ""]
        lines += [
            _signature("forward", [*renderer.arguments, *renderer.constants]),
            *_weights_lines(["w"], [*body, returned]),
            *_argument_comments(sharded.main.arguments, renderer.arguments, sharded),
            *body,
            returned,
        ]
        return _indented(lines)

    def _constants_method(self) -> list[str]:
        """What depends on the shapes alone: computed once, whole on every rank."""
        section = self.sharded.constants
        renderer = self._renderer(section)
        body = renderer.body()
        results = ", ".join(renderer.source_of(local) for local in section.results)
        comma = "," if len(section.results) == 1 else ""
        returned = f"return ({results}{comma})"
        return [
            "    def constants(self):",
            "# They depend on the shapes alone: computed once, whole on every rank.",
            *_weights_lines(["w"], [*body, returned]),
            *body,
            returned,
        ]


def _weights_lines(weights: Sequence[str], body: Sequence[str]) -> list[str]:
    """``w = self.weights``, if the method uses any."""
    code = "\n".join(line.partition("#")[0] for line in body)
    if len(weights) == 1 and not re.search(rf"\b{weights[0]}\b", code):
        return []
    return [f"{', '.join(weights)} = self.weights"]


def _signature(name: str, arguments: Sequence[str]) -> str:
    return f"    def {name}({', '.join(['self', *arguments])}):"


def _argument_comments(arguments: Sequence[Local], names: Sequence[str], sharded: ShardedGraph) -> Iterator[str]:
    for name, local in zip(names, arguments):
        yield f"# {name}: {comment(describe_local(local, sharded.mesh))}"


def _indented(lines: Sequence[str]) -> str:
    """Class and method headers stay where they are, all else is a method's body."""
    return "".join(
        f"{line}\n" if not line or line.startswith(("class ", "    def ")) else f"        {line}\n" for line in lines
    )
