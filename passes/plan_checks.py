"""What holds in every plan beyond the kinds of its fields."""

from __future__ import annotations

from passes.ir.types import parse_type
from passes.plan_data import PlanData


def check_placements(plan: PlanData) -> None:
    """Every placement has one readable type for each mesh axis."""
    placements = [
        *((f"inputs.{name}", tensor.placement) for name, tensor in plan.inputs.items()),
        *((f"states.{name}", tensor.placement) for name, tensor in plan.states.items()),
        *((f"outputs.{name}", tensor.placement) for name, tensor in plan.outputs.items()),
        *((f"nodes.{key}", placement) for key, node in plan.nodes.items() for placement in node.outputs),
        *((f"conversions of {item.value}", p) for item in plan.conversions for p in (item.source, item.target)),
        *((f"blocks of {block.first_node}", placement) for block in plan.blocks for placement in block.carried),
    ]
    for where, placement in placements:
        if len(placement) != len(plan.mesh.names):
            raise ValueError(f"{where}: {len(placement)} types for the {len(plan.mesh.names)} axes of mesh {plan.mesh}")
        for spmd_type in placement:
            parse_type(spmd_type)
    for conversion in plan.conversions:
        if conversion.axis not in plan.mesh.names:
            raise ValueError(f"conversions of {conversion.value}: no axis {conversion.axis!r} in mesh {plan.mesh}")
