"""The operators of experts that a chunk calls, in the order in which it calls them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from passes.ir.types import MeshShape, shard_dim
from passes.pipeline_cut.step_programs import StageGraph
from passes.rules.expert_rules import EXPERTS
from passes.shard import Compute, Repeat, Section


@dataclass(frozen=True)
class ExpertCall:
    """One call: the module it comes from, and on how many ranks (or micro-batches) its tokens are the same.

    ``key`` is that of the operator that it calls, in the graph of the whole model.
    """

    path: str
    num_copies: int
    key: str


def expert_calls(stage: StageGraph, operator: str = EXPERTS) -> tuple[ExpertCall, ...]:
    """Every call of ``operator`` for one micro-batch, those of blocks once for each copy."""
    main, mesh = stage.sharded.main, stage.sharded.mesh
    calls: list[ExpertCall] = []
    for operation in main.body:
        if isinstance(operation, Repeat):
            block = operation.block
            for roots in block.roots:
                calls += (
                    _call(compute, _path_in_copy(compute, block.section_roots, roots), mesh)
                    for compute in _calls_of(block.section, operator)
                )
        elif isinstance(operation, Compute) and operation.node.op == operator:
            calls.append(_call(operation, operation.node.module_path, mesh))
    return tuple(calls)


def _call(compute: Compute, path: str, mesh: MeshShape) -> ExpertCall:
    key = path + compute.node.key.removeprefix(compute.node.module_path)
    return ExpertCall(path, _num_copies(compute, mesh), key)


def _calls_of(section: Section, operator: str) -> Iterator[Compute]:
    for operation in section.body:
        if isinstance(operation, Compute) and operation.node.op == operator:
            yield operation


def _path_in_copy(compute: Compute, section_roots: Sequence[str], roots: Sequence[str]) -> str:
    path = compute.node.module_path
    for first, root in zip(section_roots, roots):
        if path == first or path.startswith(f"{first}."):
            return root + path[len(first) :]
    return path


def _num_copies(compute: Compute, mesh: MeshShape) -> int:
    placement = compute.inputs[1].placement  # expert_ids
    return math.prod(size for size, spmd_type in zip(mesh.sizes, placement) if shard_dim(spmd_type) is None)
