"""Checking an emitted program with ``spmd_types``' own checker, on meta tensors.

The program runs once with every tensor typed as its plan says, on a fake process group of the mesh's size: no data,
no communication, the same on every rank, whatever process group is initialised outside. Of a repeated block two
copies are run (the first takes the entry, the second what a copy gives), so depth costs nothing.
"""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import spmd_types.checker
import torch
from torch import nn

from passes.capture.stand_in import autocast_dtype
from passes.emit import OutputSpec, Program
from passes.emit.emitted_program import ENTRY_POINT
from passes.ir.types import I, MeshShape, P, Placement, R, describe, shard_dim
from runtime import ops
from runtime.mesh.virtual import virtual_mesh
from runtime.program_tools.adapters import apply_adapters
from runtime.state.weight_tree import WeightTree

_LETTERS = {R: spmd.R, I: spmd.I, P: spmd.P}


class ProgramTypeError(TypeError):
    """The emitted program would compute something else than its plan says: a fault of ours, never of the user's."""


class _FoldedWeights(WeightTree):
    max_copies = 2


def typecheck(program: Program) -> None:
    """Check that ``program`` has the types of its plan.

    Raises:
        ProgramTypeError: if an operation gets types that it cannot take, or an output has another type or shape
            than the plan says; the message shows the emitted line.
    """
    apply_adapters()
    entry = program.load()[ENTRY_POINT]
    random_state = ops.get_random_state()
    try:
        with virtual_mesh(program.mesh) as mesh, spmd.set_current_mesh(mesh), torch.device("meta"):
            _check(program, entry, mesh_shape=program.mesh)
    except (spmd.SpmdTypeError, AssertionError, RuntimeError, ValueError) as error:
        raise ProgramTypeError(
            f"the emitted program is wrongly typed: {error}\n{_emitted_line(program, error)}"
        ) from error
    finally:
        ops.set_random_state(random_state)


def _check(program: Program, entry: Any, *, mesh_shape: MeshShape) -> None:
    weights = _FoldedWeights()
    tensors: list[tuple[torch.Tensor, Placement]] = []
    for state in program.states:
        tensor: torch.Tensor = _meta(state.local_shape, state.dtype)
        if state.kind == "parameter":
            tensor = nn.Parameter(tensor, requires_grad=state.trainable)
        weights.put(state.path, tensor)
        tensors.append((tensor, state.placement))
    arguments = [_meta(spec.local_shape, spec.dtype) for spec in program.inputs]
    for argument, input_spec in zip(arguments, program.inputs):
        argument.requires_grad_(input_spec.requires_grad)
        tensors.append((argument, input_spec.placement))
    constants = [_meta(spec.local_shape, spec.dtype) for spec in program.constants]
    tensors.extend((tensor, spec.placement) for tensor, spec in zip(constants, program.constants))
    with spmd.checker.typecheck(local=True):
        for tensor, placement in tensors:
            spmd.assert_type(tensor, local_types(placement, mesh_shape))
        outputs = entry(weights)(*arguments, *constants)
        for spec in program.outputs:
            _check_output(spec, outputs[spec.path], program)


def _check_output(spec: OutputSpec, output: torch.Tensor, program: Program) -> None:
    # Autocast, which decides dtypes where the program runs, is off on meta tensors.
    is_alike = str(output.dtype) == f"torch.{spec.dtype}" or autocast_dtype() is not None
    if tuple(output.shape) != spec.local_shape or not is_alike:
        raise ProgramTypeError(
            f"output {spec.path!r} is {list(output.shape)} {output.dtype}, expected {list(spec.local_shape)} "
            f"torch.{spec.dtype}"
        )
    planned = local_types(spec.placement, program.mesh)
    actual = {axis: spmd.get_axis_local_type(output, axis) for axis in planned}
    for axis, wanted_type in planned.items():
        # Where no gradient flows, R and I are one.
        alike = not output.requires_grad and {actual[axis], wanted_type} == {spmd.R, spmd.I}
        if actual[axis] != wanted_type and not alike:
            raise ProgramTypeError(
                f"output {spec.path!r} is {actual[axis]} on mesh axis {axis}, planned was "
                f"{describe(spec.placement, program.mesh)}"
            )


def local_types(placement: Placement, mesh: MeshShape) -> dict[str, Any]:
    """A placement as the local checker knows it: any shard is V; axes of size 1 have no type."""
    return {
        name: spmd.V if shard_dim(spmd_type) is not None else _LETTERS[spmd_type]
        for name, size, spmd_type in zip(mesh.names, mesh.sizes, placement)
        if size > 1
    }


def _meta(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _emitted_line(program: Program, error: BaseException) -> str:
    """The emitted line that raised ``error``."""
    trace, line_text = error.__traceback__, ""
    lines = program.source.splitlines()
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == program.filename:
            line_text = f"line {trace.tb_lineno} of the emitted program: {lines[trace.tb_lineno - 1].strip()}"
        trace = trace.tb_next
    return line_text
