"""One rank of a pipeline whose model returns its loss beside other outputs: which expectations fail, by container."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import planner
from tests.output_containers import Named, Plain
from tests.ranks import answer, result_of, task
from tests.small_models import seeded

CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "tuple": lambda loss, logits: (loss, logits),
    "list": lambda loss, logits: [loss, logits],
    "named tuple": Named,
    "dataclass": Plain,
    "ModelOutput": lambda loss, logits: CausalLMOutput(loss=loss, logits=logits),
    "nested": lambda loss, logits: {"losses": {"loss": loss}, "logits": (logits, logits), "flag": True},
}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.second(self.first(x).tanh())
        return CONTAINERS[self.kind]((logits - y).square().mean(), logits)


def failures(kind: str) -> list[str]:
    model, (x, y) = seeded(Model, kind=kind), torch.randn(2, 4, 8, dtype=torch.float64)
    parallel = planner.compile(seeded(Model, kind=kind), "pp=2", example_inputs=(x, y))
    outputs, own = parallel(x, y), model(x, y)
    expectations: dict[str, Callable[[], bool]] = {"class": lambda: isinstance(outputs, type(own))}
    left_out = "under a pipeline a call in training mode computes its loss"
    if isinstance(own, (tuple, list)):
        loss, logits = outputs
        expectations |= {
            "length": lambda: len(outputs) == 2,
            "slice": lambda: outputs[:1][0] is loss,
            "place": lambda: left_out in result_of(lambda: outputs[1]),
            "method": lambda: left_out in result_of(lambda: logits.argmax(-1)),
            "part": lambda: left_out in result_of(lambda: logits[:, 0]),
            "operator": lambda: left_out in result_of(lambda: 1 - logits),
            "function": lambda: left_out in result_of(lambda: nn.functional.mse_loss(logits, y)),
        }
    elif kind == "nested":
        loss = outputs["losses"]["loss"]
        expectations |= {
            "keys": lambda: list(outputs) == ["losses", "flag"] and outputs["flag"] is True,
            "key": lambda: left_out in result_of(lambda: outputs["logits"]),
        }
    else:
        loss = outputs.loss
        expectations["field"] = lambda: left_out in result_of(lambda: outputs.logits)
        expectations["hasattr"] = lambda: not hasattr(outputs, "logits")
    if kind in ("dict", "ModelOutput"):
        expectations |= {
            "keys": lambda: list(outputs) == ["loss"] and dict(outputs)["loss"] is loss and outputs[0] is loss,
            "get": lambda: left_out in result_of(lambda: outputs.get("logits")),
        }
    loss.backward()
    whole = own["losses"]["loss"] if kind == "nested" else own["loss"] if kind == "dict" else getattr(own, "loss", None)
    whole = own[0] if whole is None else whole
    whole.backward()
    gradients = parallel.full_gradients()
    expectations["loss"] = lambda: torch.allclose(loss, whole)
    expectations["gradients"] = lambda: all(
        torch.allclose(gradients[name], parameter.grad) for name, parameter in model.named_parameters()
    )
    return [name for name, holds in expectations.items() if result_of(holds) is not True]


if __name__ == "__main__":
    task()
    answer({kind: result_of(failures, kind) for kind in CONTAINERS})
