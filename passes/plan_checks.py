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


def check_step(plan: PlanData) -> None:
    """The mesh of a plan of a whole step is its step's without the pipeline, and every micro-batch is accounted for."""
    step = plan.step
    if step is None:
        return
    if sorted(step.axes) != sorted(("pp", *plan.mesh.names)):
        raise ValueError(f"step: axes {', '.join(step.axes)} do not go with mesh {plan.mesh}")
    for name, size in plan.mesh.as_dict().items():
        if step.axes[name] != size:
            raise ValueError(f"step: axis {name!r} has size {step.axes[name]}, but {size} in mesh {plan.mesh}")
    samples = step.axes.get("dp", 1) * step.num_microbatches * step.local_batch
    if samples != step.global_batch:
        raise ValueError(
            f"step: {step.num_microbatches} micro-batches of {step.local_batch} on dp={step.axes.get('dp', 1)} are "
            f"{samples} samples, not {step.global_batch}"
        )
