"""Sections as lines of Python."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from passes.chains import Chain
from passes.emit.chains import Chains, output_names
from passes.emit.collectives import conversion_call, conversion_comment
from passes.emit.expressions import LocalCall, LocalTensor
from passes.emit.names import Names, base_name, name_of_output
from passes.emit.quoting import comment as comment_text
from passes.emit.quoting import literal
from passes.ir.types import MeshShape, Placement
from passes.shard import Block, Compute, Convert, Local, Repeat, Section, UnitPolicy

Expression = Callable[[LocalCall], str]

#: Where comments start inside a method, if the code before them is not longer.
COMMENT_COLUMN = 72


#: A comment that would end behind this column stands on a line of its own, above.
LINE_WIDTH = 140

#: Operators whose result keeps the name of what they convert.
_CASTS = frozenset({"aten.to.dtype", "aten._to_copy.default", "aten.to.dtype_layout", "aten.type_as.default"})


def with_comment(line: str, comment: str) -> list[str]:
    """A line with a comment to its right, or above it where there is no room."""
    if not comment:
        return [line]
    comment = comment_text(comment)
    together = f"{line.ljust(COMMENT_COLUMN)}  # {comment}"
    if len(together) <= LINE_WIDTH:
        return [together]
    indent = line[: len(line) - len(line.lstrip())]
    return [f"{indent}# {comment}", line]


def attribute(base: str, path: str) -> str:
    """``w`` and ``layers.0.proj`` → ``w.layers[0].proj``."""
    source = base
    if not path:
        return source
    for part in path.split("."):
        if part.isdecimal() and part.isascii():
            source += f"[{part}]"
        elif part.isascii() and part.isidentifier() and not keyword.iskeyword(part):
            source += f".{part}"
        else:
            source += f"[{literal(part)}]"
    return source


def describe_local(local: Local, mesh: MeshShape) -> str:
    """``[4, 16, 64] → [2, 16, 64] {dp: S(0)}``: global shape, local shape where it differs, type on each axis."""
    shapes = str(list(local.value.shape))
    if local.shape != local.value.shape:
        shapes += f" → {list(local.shape)}"
    return f"{shapes} {describe_placement(local.placement, mesh)}"


def describe_placement(placement: Placement, mesh: MeshShape) -> str:
    """``{dp: S(0), tp: R}``, without axes of size 1."""
    types = (f"{name}: {spmd_type}" for name, size, spmd_type in zip(mesh.names, mesh.sizes, placement) if size > 1)
    return "{" + ", ".join(types) + "}"


class Renderer:
    """Renders one section: gives each local tensor a variable, reusing a name where its old value is done with."""

    def __init__(
        self,
        section: Section,
        *,
        mesh: MeshShape,
        expression: Expression,
        roots: tuple[str, ...] = (),
        block_names: dict[int, str] | None = None,
        constants: Sequence[Local] = (),
        argument_names: Sequence[str] | None = None,
        batch_axis: str | None = None,
        chains: Chains | None = None,
        copies: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        self.batch_axis = batch_axis
        self.chains = chains
        #: Module paths of all copies of the section, ``roots`` first.
        self.copies = copies
        self.section = section
        #: Draws are numbered within a block; the program's own numbers are those of the model.
        self.first_draw = (section.first_draw or 0) if roots else 0
        self.mesh = mesh
        self.expression = expression
        self.roots = roots
        self.block_names = block_names or {}
        self.names = Names(frozenset(self.block_names.values()))
        self.variables: dict[Local, str] = {}
        self.last_use = _last_uses(section)
        self.lines: list[str] = []
        self.module_path: str | None = None
        # What goes from layer to layer is x; the first layer's comes from here.
        self.preferred: dict[Local, str] = {}
        #: What a block's arguments are called here, by the block.
        self.entry_names: dict[int, list[str]] = {}
        for operation in section.body:
            if isinstance(operation, Repeat):
                self.preferred.update((operation.entries[index], "x") for index, _ in operation.carried)
        names = argument_names or [base_name(local.value.name) for local in section.arguments]
        self.arguments = [self._bind(local, name) for local, name in zip(section.arguments, names)]
        self.constants = [self._bind(local, base_name(local.value.name)) for local in constants]

    def _bind(self, local: Local, base: str) -> str:
        name = self.names.new(self.preferred.get(local, base))
        self.variables[local] = name
        return name

    def source_of(self, local: Local) -> str:
        """A local tensor as source: a variable, or a state in the weights."""
        if local.state is None:
            return self.variables[local]
        root = self.weights_name(local.state.root)
        return attribute(root, local.state.path)

    def weights_name(self, root: int | None) -> str:
        return "w" if root is None or len(self.roots) < 2 else f"w{root}"

    def body(self) -> list[str]:
        """Lines of the body, not indented, without the return."""
        for position, operation in enumerate(self.section.body):
            if isinstance(operation, Compute):
                self._compute(operation)
            elif isinstance(operation, Convert):
                self._convert(operation, position)
            else:
                self._repeat(operation, position)
        return self.lines

    def _compute(self, compute: Compute) -> None:
        self._module_comment(compute.node.module_path)
        value = self._value(compute)
        targets = [self._bind(local, self._output_name(compute, index)) for index, local in enumerate(compute.outputs)]
        before = next((local for local in compute.inputs if local.state is None), None)
        first = compute.outputs[0]
        same = before is not None and (before.value.shape, before.placement) == (first.value.shape, first.placement)
        self._write(f"{', '.join(targets)} = {value}", "" if same else describe_local(first, self.mesh))

    def _value(self, compute: Compute) -> str:
        if isinstance(compute, Chain):
            assert self.chains is not None
            return self.chains.call(compute, [self.source_of(local) for local in compute.inputs], title=self._title)
        call = LocalCall(
            node=compute.node,
            inputs=tuple(self.tensor(local) for local in compute.inputs),
            outputs=tuple(self.tensor(local, name="") for local in compute.outputs),
            choices=compute.choices,
            mesh=self.mesh,
            rule=compute.rule,
            draw=0 if compute.node.draw is None else compute.node.draw - self.first_draw,
        )
        return self.expression(call)

    def _title(self, path: str) -> str:
        """A module's path with the numbers of all copies of the block that it is in."""
        for index, root in enumerate(self.roots):
            if path == root or path.startswith(f"{root}."):
                return roots_title(tuple((copy[index],) for copy in self.copies)) + path[len(root) :]
        return path

    def _output_name(self, compute: Compute, index: int) -> str:
        """A weight's name for what is made from weights, a module's for what is made with its weights."""
        if isinstance(compute, Chain):
            return output_names(compute)[index]
        if compute.inputs and all(local.state is not None for local in compute.inputs):
            return _state_name(compute.inputs[0])
        if compute.node.op in _CASTS and compute.inputs and compute.inputs[0].state is None:
            return base_name(self.variables[compute.inputs[0]])
        has_state = any(local.state is not None or local.value.kind == "parameter" for local in compute.inputs)
        return name_of_output(compute.node, index, has_state=has_state)

    def tensor(self, local: Local, *, name: str | None = None) -> LocalTensor:
        return LocalTensor(
            name=self.source_of(local) if name is None else name,
            shape=local.shape,
            placement=local.placement,
            requires_grad=local.value.requires_grad,
            dtype=local.value.dtype,
        )

    def _write(self, line: str, comment: str = "") -> None:
        self.lines.extend(with_comment(line, comment))

    def _module_comment(self, path: str) -> None:
        for root in self.roots:
            if path == root or path.startswith(f"{root}."):
                path = path[len(root) + 1 :]
                break
        if path != self.module_path:
            if path:
                self._write(f"# {comment_text(path)}")
            self.module_path = path

    def _convert(self, convert: Convert, position: int) -> None:
        if convert.source.state is not None:
            self._module_comment(self._next_path(position))
        source = self.source_of(convert.source)
        reusable = convert.source.state is None and self.last_use.get(convert.source) == position
        if reusable and convert.target not in self.preferred:
            name = self.variables[convert.source]
            self.variables[convert.target] = name
        else:
            name = self._bind(convert.target, self._converted_name(convert))
        call = conversion_call(convert, source, self.mesh, batch_axis=self.batch_axis)
        self._write(f"{name} = {call}", conversion_comment(convert))

    def _next_path(self, position: int) -> str:
        """Module path of the operator that a conversion is for."""
        later = (operation for operation in self.section.body[position:] if isinstance(operation, Compute))
        return next((compute.node.module_path for compute in later), "")

    def _converted_name(self, convert: Convert) -> str:
        if convert.source.state is not None:
            return _state_name(convert.source)
        return self.variables[convert.source]

    def _repeat(self, repeat: Repeat, position: int) -> None:
        block = repeat.block
        self.module_path = None
        if block.roots[0] != ("",):
            self._write(f"# {comment_text(roots_title(block.roots))}")
        carried = dict(repeat.carried)
        variables = [self.source_of(entry) for entry in repeat.entries]
        for index in carried:
            entry = repeat.entries[index]
            if entry.state is not None or self.last_use.get(entry) != position or variables.count(variables[index]) > 1:
                name = self.names.new("x")
                self._write(f"{name} = {variables[index]}")
                variables[index] = name
        names = [
            "x" if index in carried else base_name(name) if name.isidentifier() else name.rpartition(".")[2]
            for index, name in enumerate(variables)
        ]
        self.entry_names.setdefault(id(block.section), names)
        between = self._name_results(repeat, variables, carried)
        targets = ", ".join(self.variables[result] for result in repeat.results)

        def call(weights: str) -> str:
            instance = f"{self.block_names[id(block.section)]}({weights})"
            runs = instance if repeat.policy is None else _unit(instance, repeat.policy)
            return f"{targets} = {runs}({', '.join(variables)})"

        self._loops(block, call, between, "" if repeat.policy is None else f"ZeRO {repeat.policy.zero}")

    def _name_results(self, repeat: Repeat, variables: list[str], carried: dict[int, Local]) -> list[str]:
        """Name what the block gives; returns the lines that convert it for the next copy."""
        first_of = {convert.target: convert for convert in repeat.between}
        for index, made_of in carried.items():
            start = made_of
            while start in first_of:
                self.variables[start] = variables[index]
                start = first_of[start].source
            self.variables[start] = variables[index]
        for result in repeat.results:
            if result not in self.variables:
                self._bind(result, base_name(result.value.name))
        lines = []
        for convert in repeat.between:
            call = conversion_call(convert, self.variables[convert.source], self.mesh, batch_axis=self.batch_axis)
            lines += with_comment(f"    {self.variables[convert.target]} = {call}", conversion_comment(convert))
        return lines

    def _loops(self, block: Block, call: Callable[[str], str], between: list[str], comment: str) -> None:
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
            slices.append(_arithmetic(block.first_draws[:looped]))
            weights += ", first_draw=draw"
        listed = slices[0] if len(slices) == 1 else f"zip({', '.join(slices)})"
        copies = f"{looped} copies" if looped > 1 else ""
        self._write(f"for {', '.join(variables)} in {listed}:", ", ".join(filter(None, (copies, comment))))
        self._write(f"    {call(weights)}")
        self.lines.extend(between)
        if between:
            self._write(call(_one_copy(block, -1)))


def _one_copy(block: Block, copy: int) -> str:
    """What a block is made of for one of its copies."""
    draws = [f"first_draw={block.first_draws[copy]}"] if block.first_draws and block.first_draws[copy] else []
    return ", ".join([*(attribute("w", root) for root in block.roots[copy]), *draws])


def _arithmetic(numbers: Sequence[int]) -> str:
    """Numbers as source: ``range(1, 37, 3)`` if they are equally spaced, else one by one."""
    steps = {later - earlier for earlier, later in pairwise(numbers)} or {1}
    step = steps.pop()
    if steps or step < 1:
        return f"({', '.join(map(str, numbers))})"
    return f"range({numbers[0]}, {numbers[-1] + 1}{f', {step}' if step > 1 else ''})"


def _unit(block: str, policy: UnitPolicy) -> str:
    """A block as a unit of a step: its weights are there while it runs."""
    return f"self.unit({block}{'' if policy.recompute == 'none' else f', recompute={policy.recompute!r}'})"


def _state_name(local: Local) -> str:
    """``q_proj_weight``: a name for what is made from a weight alone."""
    assert local.state is not None
    return "_".join([part for part in local.state.path.split(".") if not part.isdigit()][-2:])


def list_slice(paths: Sequence[str]) -> str:
    """The entries of a list of modules as source: ``w.model.layers[1:12]``."""
    parents = {path.rpartition(".")[0] for path in paths}
    indices = [int(path.rpartition(".")[2]) for path in paths]
    steps = {later - earlier for earlier, later in pairwise(indices)} or {1}
    if len(parents) != 1 or len(steps) != 1 or min(steps) < 1:
        return f"[{', '.join(attribute('w', path) for path in paths)}]"
    (parent,), (step,) = parents, steps
    start = str(indices[0]) if indices[0] else ""
    stride = f":{step}" if step > 1 else ""
    base = attribute("w", parent) if parent else "w"
    return f"{base}[{start}:{indices[-1] + 1}{stride}]"


def roots_title(roots: tuple[tuple[str, ...], ...]) -> str:
    """``model.layers.{0..31}``."""
    titles = []
    for first, last in zip(roots[0], roots[-1]):
        parent, _, index = first.rpartition(".")
        prefix = f"{parent}." if parent else ""
        final = last.rpartition(".")[2]
        titles.append(first if index == final else f"{prefix}{{{index}..{final}}}")
    return ", ".join(titles)


def roots_comment(roots: tuple[tuple[str, ...], ...]) -> str:
    """What a block's class says of its copies; nothing for a stretch of the model itself."""
    return "" if roots[0] == ("",) else f"  # {comment_text(roots_title(roots))}"


def _last_uses(section: Section) -> dict[Local, int]:
    uses: dict[Local, int] = {}
    for position, operation in enumerate(section.body):
        for local in _used(operation):
            uses[local] = position
    uses.update((local, len(section.body)) for local in section.results)
    return uses


def _used(operation: Compute | Convert | Repeat) -> Iterable[Local]:
    if isinstance(operation, Compute):
        return operation.inputs
    if isinstance(operation, Convert):
        return (operation.source,)
    return operation.entries
