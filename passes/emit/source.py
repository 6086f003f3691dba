"""A sharded graph as a Python file: one class for each distinct block, one for the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from passes.emit.chains import ChainReport, Chains
from passes.emit.names import RESERVED, Names, class_name
from passes.emit.program import ENTRY_POINT
from passes.emit.quoting import comment, docstring, literal
from passes.emit.render import Expression, Renderer, describe_local, roots_comment
from passes.shard import Block, Local, Repeat, Section, ShardedGraph

_HEADER = '''\
"""{model} on mesh {mesh}{part}, written by Meshwright.

Each rank runs this on its own part of every tensor; "global shape → local shape {{axis: type}}" stands where they
change. S(d): sharded along dim d; P: partial sums; R: the same on all ranks, gradient partial; I: the same on all
ranks, gradient too.
"""

import math

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, P, R, S, V

from runtime import {modules}
from runtime.program import Block
'''


def render(sharded: ShardedGraph, expression: Expression) -> tuple[str, tuple[ChainReport, ...]]:
    """The whole file, and what it has of chains."""
    loops = _distinct([operation for operation in sharded.main.body if isinstance(operation, Repeat)])
    names = Names(RESERVED | {ENTRY_POINT})
    block_names = {id(loop.block.section): names.new(class_name(loop.block.module_class)) for loop in loops}
    chains = Chains(sharded.mesh, expression, names)
    renderer = Renderer(
        sharded.main,
        mesh=sharded.mesh,
        expression=expression,
        block_names=block_names,
        constants=sharded.constants.results,
        batch_axis=sharded.batch_axis,
        chains=chains,
    )
    program = _program_class(sharded, renderer, expression)
    parts = []
    for loop in loops:
        key = id(loop.block.section)
        name, arguments = block_names[key], renderer.entry_names[key]
        parts.append(_block_class(loop.block, name, arguments, sharded, expression, chains))
    parts.append(program)
    if chains.found:
        parts.insert(0, chains.source())
    modules = "kernels, ops" if any("kernels." in part for part in parts) else "ops"
    model, mesh, part = map(docstring, (sharded.graph.model_name, str(sharded.mesh), sharded.part))
    header = _HEADER.format(model=model, mesh=mesh, part=part, modules=modules)
    return "\n\n".join([_with_imports(header, chains.imports()), *parts]), chains.report()


def _with_imports(header: str, imports: str) -> str:
    """The header with more imports, in their place in the alphabet."""
    last = "from runtime.program import Block\n"
    return header.replace(last, imports + last)


def _distinct(loops: Sequence[Repeat]) -> list[Repeat]:
    """One of the loops over each block: of those that run the same section, one over all their copies."""
    found: dict[int, Repeat] = {}
    for loop in loops:
        known = found.setdefault(id(loop.block.section), loop)
        if known is not loop:
            block = dataclasses.replace(known.block, roots=(*known.block.roots, *loop.block.roots))
            found[id(loop.block.section)] = dataclasses.replace(known, block=block)
    return list(found.values())


def _block_class(
    block: Block, name: str, arguments: Sequence[str], sharded: ShardedGraph, expression: Expression, chains: Chains
) -> str:
    """A block, its arguments called as the program around it calls them."""
    renderer = Renderer(
        block.section,
        mesh=sharded.mesh,
        expression=expression,
        roots=block.roots[0],
        argument_names=arguments,
        batch_axis=sharded.batch_axis,
        chains=chains,
        copies=block.roots,
    )
    body = list(renderer.body())
    weights = [renderer.weights_name(root) for root in range(len(block.roots[0]))]
    lines = [
        f"class {name}(Block):{roots_comment(block.roots)}",
        _signature("forward", renderer.arguments),
        *_weights_lines(weights),
        *_argument_comments(block.section.arguments, renderer.arguments, sharded),
        *body,
        _return(renderer, block.section.results),
    ]
    return _indented(lines)


def _weights_lines(weights: Sequence[str]) -> list[str]:
    return [f"{', '.join(weights)} = self.weights" if len(weights) > 1 else f"{weights[0]} = self.weights"]


def _program_class(sharded: ShardedGraph, renderer: Renderer, expression: Expression) -> str:
    body = list(renderer.body())
    outputs = [
        f"{literal(path)}: {renderer.source_of(local)}"
        for path, local in zip(sharded.graph.outputs, sharded.main.results)
    ]
    lines = [f"class {ENTRY_POINT}(Block):"]
    if sharded.constants.body:
        lines += [*_constants_method(sharded.constants, sharded, expression), ""]
    lines += [
        _signature("forward", [*renderer.arguments, *renderer.constants]),
        "w = self.weights",
        *_argument_comments(sharded.main.arguments, renderer.arguments, sharded),
        *body,
        f"return {{{', '.join(outputs)}}}",
    ]
    return _indented(lines)


def _constants_method(section: Section, sharded: ShardedGraph, expression: Expression) -> list[str]:
    """What depends on the shapes alone: computed once, whole on every rank."""
    renderer = Renderer(section, mesh=sharded.mesh, expression=expression)
    body = list(renderer.body())
    results = ", ".join(renderer.source_of(local) for local in section.results)
    comma = "," if len(section.results) == 1 else ""
    return [
        "    def constants(self):",
        "# They depend on the shapes alone: computed once, whole on every rank.",
        "w = self.weights",
        *body,
        f"return ({results}{comma})",
    ]


def _signature(name: str, arguments: Sequence[str]) -> str:
    line = f"    def {name}({', '.join(['self', *arguments])}):"
    if len(line) <= 118:
        return line
    wrapped = "".join(f"        {argument},\n" for argument in ("self", *arguments))
    return f"    def {name}(\n{wrapped}    ):"


def _argument_comments(arguments: Sequence[Local], names: Sequence[str], sharded: ShardedGraph) -> Iterator[str]:
    for name, local in zip(names, arguments):
        yield f"# {name}: {comment(describe_local(local, sharded.mesh))}"


def _return(renderer: Renderer, results: Sequence[Local]) -> str:
    return f"return {', '.join(renderer.source_of(local) for local in results)}"


def _indented(lines: Sequence[str]) -> str:
    """Class and method headers stay where they are, all else is a method's body."""
    return "".join(
        f"{line}\n" if not line or line.startswith(("class ", "    def ")) else f"        {line}\n" for line in lines
    )
