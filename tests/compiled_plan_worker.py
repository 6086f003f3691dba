"""One rank of the tests of plans whose blocks run through ``torch.compile``, and of models with checkpoints inside."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import planner
import runtime.execution.binding
from runtime.program_tools.compiling import as_compiled
from tests.ranks import answer, task
from tests.small_models import TiedClassifier, seeded, token_batch


class Checkpointed(nn.Module):
    """Two layers that run under a checkpoint each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: F.gelu(layer(x)).sin(), x, use_reentrant=False)
        return {"loss": x.square().sum()}


def compiled_step(mesh: str) -> dict[str, Any]:
    """Largest relative differences of the loss and the gradients of a step with compiled blocks; graphs compiled."""
    model, batch = seeded(TiedClassifier), token_batch()
    traced = functools.partial(as_compiled, backend="aot_eager")  # traced as ever, without the time to generate code
    with mock.patch.object(runtime.execution.binding, "as_compiled", traced):
        parallel = planner.compile(seeded(TiedClassifier), mesh, example_inputs=batch, compiled=True)
        loss = parallel.train_step(**batch)
    expected = model(**batch)["loss"]
    expected.backward()
    gradients = parallel.full_gradients()
    errors = [_error(loss, expected.detach())]
    errors += [_error(gradients[name], weight.grad) for name, weight in model.named_parameters() if name in gradients]
    return {"error": max(errors), "compared": len(errors), "graphs": counters["stats"]["unique_graphs"]}


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def checkpoints() -> dict[str, Any]:
    """The policies of a plan of a checkpointed model, what a plan of a mesh says, whether gradients are right."""
    model, x = seeded(Checkpointed), torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)
    parallel = planner.compile(seeded(Checkpointed), "pp=1,dp=2", example_inputs={"x": x})
    parallel.train_step(x=x)
    model(x)["loss"].backward()
    gradients = parallel.full_gradients()
    error = max(_error(gradients[name], weight.grad) for name, weight in model.named_parameters())
    on_mesh = planner.compile(seeded(Checkpointed), "dp=2", example_inputs={"x": x})
    try:
        planner.compile(seeded(Checkpointed), "dp=2")(x=x)
        refusal = ""
    except ValueError as refused:
        refusal = str(refused)
    return {"source": parallel.source, "on mesh": on_mesh.source, "error": error, "refusal": refusal}


def main() -> None:
    meshes = task()
    results: dict[str, Any] = {mesh: compiled_step(mesh) for mesh in meshes}
    answer({**results, "checkpoints": checkpoints()})


if __name__ == "__main__":
    main()
