"""Models that recompute parts of themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from passes.ir.graph import Graph


def enables_checkpoints(model: torch.nn.Module) -> bool:
    """Whether a model of transformers was told to recompute itself (``gradient_checkpointing_enable()``)."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


class CheckpointedModel(ValueError):
    """The model runs parts of itself under ``torch.utils.checkpoint``, which a plan on a mesh alone does not say."""


def refuse_checkpoints(graph: Graph) -> None:
    """Raise CheckpointedModel for a model with activation checkpoints, on a mesh whose plan recomputes nothing."""
    if graph.checkpointed:
        raise CheckpointedModel(
            "the model runs parts of itself under torch.utils.checkpoint, but a plan "
            "on a given mesh alone recomputes nothing: plan a whole step (a cluster, or fix={'recompute': 'full'} "
            "beside the mesh), give planner.compile example_inputs, which it does so for, or switch the model's "
            "checkpoints off"
        )
