"""One chunk of a step on this rank: its program, its units, and how it runs a micro-batch."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import spmd_types as spmd
import torch
from torch import nn

from passes.emit import OutputSpec, Program
from passes.emit.emitted_program import ENTRY_POINT, InputSpec
from passes.pipeline_cut import BATCH_AXIS, StageGraph
from runtime import ops
from runtime.execution.batch_split import BatchSplit
from runtime.execution.binding import BoundUnit, ChunkUnits
from runtime.execution.expert_load import chunk_begins
from runtime.execution.followed_constants import FollowedConstants
from runtime.execution.step_state import StepState
from runtime.mesh.layout import Layout
from runtime.pipeline import TensorSpec
from runtime.programs.tensor_makers import makes_tensors
from runtime.state.owned import rectangle
from runtime.state.weight_tree import WeightTree
from runtime.torch_compat.spmd_internals import mesh_of_thread, use_mesh
from runtime.zero.unit import Unit

#: Returns a program's input of this name (a model input or a total) for a micro-batch.
InputOf = Callable[[InputSpec, int], torch.Tensor]


class ProgramRunner:
    """A program of a step with its buffers and constants, run for one micro-batch at a time.

    Args:
        scratch: buffers that are not the model's, this rank's parts by path.
    """

    def __init__(
        self,
        program: Program,
        state: StepState,
        *,
        split: BatchSplit,
        scratch: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.program = program
        self.state = state
        self.split = split
        self._followed = FollowedConstants(
            [spec for spec in program.states if spec.kind == "constant"], state.places.layout
        )
        self.literals = dict(self._followed.local)
        self.literals |= {spec.path: scratch[spec.path] for spec in program.states if scratch and spec.path in scratch}
        self.tree = self._tree()
        self.entry = program.load()[ENTRY_POINT](self.tree)
        self._constants: tuple[torch.Tensor, ...] | None = None
        self._makes_tensors = makes_tensors(program.source)
        #: The mesh as ``spmd_types`` keeps it; to look up its groups takes as long as several operators.
        self._mesh: Any = None

    def _tree(self) -> WeightTree:
        """Buffers and literals; parameters are put in while a unit, or the program itself, uses them."""
        tree = WeightTree()
        for spec in self.program.states:
            info = self.state.infos.get(spec.path)
            if info is None:
                tree.put(spec.path, self.literals[spec.path])
            else:
                tree.put(spec.path, None if info.trainable else self.state.find(spec.path))
        return tree

    def follow_literals(self) -> None:
        """Take up what a script has written into tensors that are constants of the program."""
        if self._followed.follow():
            self._constants = None

    def forget_constants(self) -> None:
        """Compute constants again: they may depend on buffers, which may have moved."""
        self._constants = None
        for spec in self.program.states:
            info = self.state.infos.get(spec.path)
            if info is not None and not info.trainable:
                self.tree.put(spec.path, self.state.find(spec.path))

    def __call__(self, tensors: Sequence[torch.Tensor], microbatch: int) -> dict[str, torch.Tensor]:
        """Outputs by path."""
        with self._running(microbatch), self._reading(ops.values_before()):
            if self._constants is None:
                with torch.no_grad(), self._on_device():
                    self._constants = tuple(self.entry.constants())
            with self._on_device() if self._makes_tensors else contextlib.nullcontext():
                outputs: dict[str, torch.Tensor] = self.entry(*tensors, *self._constants)
        return outputs

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Make tensors on the program's device."""
        device = self.state.places.layout.device
        return contextlib.nullcontext() if device.type == "cpu" else torch.device(device)

    @contextlib.contextmanager
    def _reading(self, before: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Read what stands in the place of buffers, by their ids."""
        paths = [spec.path for spec in self.program.states if spec.path in self.state.infos] if before else []
        buffers = {path: self.state.find(path) for path in paths if not self.state.infos[path].is_parameter}
        buffers = {path: buffer for path, buffer in buffers.items() if id(buffer) in before}
        for path, buffer in buffers.items():
            self.tree.put(path, before[id(buffer)])
        try:
            yield
        finally:
            for path, buffer in buffers.items():
                self.tree.put(path, buffer)

    @contextlib.contextmanager
    def _running(self, microbatch: int) -> Iterator[None]:
        """The mesh that collectives mean, and the micro-batch."""
        layout = self.state.places.layout
        if self._mesh is None:
            with spmd.set_current_mesh(layout.device_mesh):
                self._mesh = mesh_of_thread()
        this = ops.Microbatch(microbatch, self.split.num_microbatches, BATCH_AXIS)
        with use_mesh(self._mesh), ops.in_microbatch(this):
            yield


class ChunkRunner:
    """Runs one chunk; what a pipeline executor calls (``runtime.pipeline.StageRunner``).

    Args:
        graph: the chunk.
        program: its program.
        units: of its program, in order of use; ``shared`` is for what is used outside of them.
        input_of: gives its inputs other than what it receives.
        compiled: whether ``torch.compile`` compiles its blocks.
    """

    def __init__(
        self,
        graph: StageGraph,
        runner: ProgramRunner,
        *,
        units: Sequence[BoundUnit],
        shared: BoundUnit | None,
        input_of: InputOf,
        compiled: bool = False,
    ) -> None:
        self.index = graph.index
        self.graph = graph
        self.runner = runner
        self.shared = shared
        #: How often one micro-batch uses each unit.
        bound_units = (*(() if shared is None else (shared,)), *units)
        self.uses: Mapping[Unit, int] = Counter(unit for bound in bound_units for unit in bound.units)
        #: The chunk's units, each once.
        self.units = tuple(self.uses)
        self.input_of = input_of
        mesh = runner.state.places.layout.device_mesh
        self.chunk_units = ChunkUnits(units, compiled_on=mesh if compiled else None)
        runner.entry.runner = self.chunk_units
        #: The leaves of its autograd graph besides what it receives.
        self.tokens: list[nn.Parameter] = [leaf for unit in self.units for leaf in unit.leaves]
        specs = runner.program.inputs
        layout = runner.state.places.layout
        received = (spec for spec in specs if spec.path[0] == "received" and len(spec.path) == 2)
        self.received = tuple(_spec(spec, runner.program, layout) for spec in received)
        self.sent = tuple(_spec(spec, runner.program, layout) for spec in runner.program.outputs)

    @property
    def program(self) -> Program:
        return self.runner.program

    def run(self, received: tuple[torch.Tensor, ...], microbatch: int) -> tuple[torch.Tensor, ...]:
        """The chunk's results for a micro-batch."""
        return tuple(self.outputs(received, microbatch).values())

    def outputs(self, received: Sequence[torch.Tensor], microbatch: int) -> dict[str, torch.Tensor]:
        """The chunk's outputs for a micro-batch, by path."""
        specs = self.runner.program.inputs[len(received) :]
        tensors = [*received, *(self.input_of(spec, microbatch) for spec in specs)]
        chunk_begins(self.graph)
        self.chunk_units.restart()
        if self.shared is not None:
            self.shared.lend(self.runner.tree)
        return self.runner(tensors, microbatch)


def _spec(spec: InputSpec | OutputSpec, program: Program, layout: Layout) -> TensorSpec:
    """What this rank sends or receives of a tensor, which may be less than the first rank."""
    _, shape = rectangle(spec.shape, spec.placement, program.mesh, layout.coordinate)
    return TensorSpec(shape, getattr(torch, spec.dtype), spec.requires_grad)


def uses_of(stages: Sequence[ChunkRunner]) -> dict[Unit, int]:
    """How often a micro-batch uses each unit of this rank's chunks."""
    counts: dict[Unit, int] = {}
    for stage in stages:
        for unit, count in stage.uses.items():
            counts[unit] = counts.get(unit, 0) + count
    return counts


def in_order_of_use(stages: Sequence[ChunkRunner]) -> tuple[Any, ...]:
    """The units of this rank's chunks in the order in which a micro-batch uses them, each once."""
    return tuple({id(unit): unit for stage in stages for unit in stage.units}.values())


def in_turn(stages: Sequence[ChunkRunner]) -> list[Unit]:
    """The units that a micro-batch uses exactly once, in that order: each of them knows what comes next.

    After one that is used again elsewhere (a tied embedding) other units come each time.
    """
    uses = uses_of(stages)
    return [unit for unit in in_order_of_use(stages) if uses[unit] == 1]
