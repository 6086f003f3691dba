"""The operators of experts that a chunk calls, in the order in which it calls them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from passes.ir.types import MeshShape, shard_dim
from passes.pipeline_cut.step_programs import StageGraph
from passes.rules.expert_rules import is_experts
from passes.shard import Compute, Repeat, Section


@dataclass(frozen=True)
class ExpertCall:
    """One call: the module it comes from, and on how many ranks (or micro-batches) its tokens are the same."""

    path: str
    num_copies: int


def expert_calls(stage: StageGraph) -> tuple[ExpertCall, ...]:
    """Every call for one micro-batch, those of blocks once for each copy."""
    main, mesh = stage.sharded.main, stage.sharded.mesh
    calls: list[ExpertCall] = []
    for operation in main.body:
        if isinstance(operation, Repeat):
            block = operation.block
            for roots in block.roots:
                calls += (
                    ExpertCall(_path_in_copy(compute, block.section_roots, roots), _num_copies(compute, mesh))
                    for compute in _experts_of(block.section)
                )
        elif isinstance(operation, Compute) and is_experts(operation.node):
            calls.append(ExpertCall(operation.node.module_path, _num_copies(operation, mesh)))
    return tuple(calls)


def _experts_of(section: Section) -> Iterator[Compute]:
    for operation in section.body:
        if isinstance(operation, Compute) and is_experts(operation.node):
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
