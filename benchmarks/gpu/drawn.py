"""Losses of a model that draws random numbers; as a command, on a processor, as JSON."""

from __future__ import annotations

import copy
import json

import torch

import planner
from benchmarks.gpu.user_models import Drawing

ONE_DEVICE = {"pp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 1, "zero": 0}
STEPS = 3


def drawn(device: str) -> list[float]:
    """Losses of some steps and norms of the gradients, without and with recomputation."""
    process = planner.init(device=device)
    torch.manual_seed(0)
    model, x = Drawing(), torch.randn(8, 32).to(process.device)
    results = []
    for recompute in ("none", "full"):
        planner.seed(3)
        fix = {**ONE_DEVICE, "recompute": recompute, "num_microbatches": 1}
        parallel = planner.compile(copy.deepcopy(model), "dgx-h100:1x1", example_inputs={"x": x}, fix=fix)
        results += [float(parallel.train_step(x=x)) for _ in range(STEPS)]
        results += [float(gradient.double().norm()) for gradient in parallel.full_gradients().values()]
    return results


if __name__ == "__main__":
    print(json.dumps(drawn("cpu")))
