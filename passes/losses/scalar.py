"""The loss of a captured model."""

from __future__ import annotations

from passes.ir.graph import Graph


def scalar_loss(graph: Graph) -> str:
    """The output path of the loss.

    Raises:
        ValueError: if no output is one; it says what there is instead.
    """
    if graph.loss is not None:
        return graph.loss
    raise ValueError(
        f"{graph.model_name} returns no loss to train on, but {_outputs_of(graph)}: a loss is a scalar floating-point "
        "tensor with a gradient. Pass the labels, reduce losses per sample (.mean()), or give planner.compile a "
        "loss_fn(outputs, batch)"
    )


def _outputs_of(graph: Graph) -> str:
    if not graph.outputs:
        return "no tensor at all"
    values = [(path, graph.values[name]) for path, name in graph.outputs.items()]
    return ", ".join(
        f"{repr(path) + ' ' if path else ''}{list(value.shape)} {value.dtype}"
        f"{'' if value.requires_grad else ' without a gradient'}"
        for path, value in values[:4]
    )
