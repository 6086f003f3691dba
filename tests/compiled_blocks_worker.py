"""One rank of the tests of compiled blocks: a small Llama whose layer is compiled, beside the same layer uncompiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
from torch._dynamo.utils import counters

import planner
import runtime.execution.binding
from passes.capture import keep_float64
from planner.library import build_model, load_config, random_batch
from runtime.execution.binding import ChunkUnits
from runtime.program_tools.compiling import as_compiled, can_be_one_graph
from runtime.programs.program import Block
from tests.ranks import answer, task
from tests.tracing import traced_once

#: Beginnings of the operators' names: compiled graphs call variants that write in place.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
#: Columns, then rows, as Megatron cuts a layer: it sends in both passes.
TENSOR_PARALLEL = {
    **{f"*.{name}_proj.weight": {"tp": "S(0)"} for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj.weight": {"tp": "S(1)"} for name in ("o", "down")},
}


def main() -> None:
    torch._inductor.config.compile_threads = 1  # else each rank starts processes that import torch for one graph
    answer(compare(task()))


def compare(backends: dict[str, str]) -> dict[str, Any]:
    """By policy, of layers uncompiled and compiled by a backend: the largest relative difference from the plain layers
    in float64, collectives sent again, graphs compiled."""
    torch.manual_seed(0)
    config = load_config("tiny-llama")
    config.num_hidden_layers = 2
    model = build_model(config, device="cpu").double()
    batch = random_batch(model, batch_size=8, seq_len=12)
    with keep_float64():
        parallel = planner.compile(model, "tp=2", example_inputs=batch, constraints=TENSOR_PARALLEL)
        parallel(**batch)  # its program is made, which sends what is checked
    plain, sent = run(parallel, batch, "none")
    results: dict[str, Any] = {}
    for policy, backend in backends.items():
        eager, eager_sent = run(parallel, batch, policy)
        counters.clear()
        torch._dynamo.reset()
        step(parallel, batch, policy, backend=backend)  # compiles, of which a profile would have every operator
        compiled, compiled_sent = run(parallel, batch, policy, backend=backend)
        results[policy] = {
            "eager": {"error": difference(eager, plain), "again": dict(eager_sent - sent)},
            "compiled": {
                "error": difference(compiled, plain),
                "again": dict(compiled_sent - sent),
                "graphs": counters["stats"]["unique_graphs"],
                "breaks": sum(counters["graph_break"].values()),
            },
        }
    return results


def run(
    parallel: Any, batch: Any, policy: str, *, backend: str | None = None
) -> tuple[list[torch.Tensor], Counter[str]]:
    """Loss and gradients of a step, and what was sent."""
    with torch.profiler.profile() as profile:
        loss = step(parallel, batch, policy, backend=backend)
    operators = [event.name.removeprefix("_c10d_functional::") for event in profile.events()]
    sent = Counter(name for name in COLLECTIVES for operator in operators if operator.startswith(name))
    return [loss, *(weight.grad.clone() for weight in parallel.parameters() if weight.grad is not None)], sent


def step(parallel: Any, batch: Any, policy: str, *, backend: str | None) -> torch.Tensor:
    """The loss; gradients are in place, with layers recomputed by ``policy``, compiled if there is a backend."""
    run_unit, mesh = ChunkUnits.__call__, parallel.layout.device_mesh

    def call(units: ChunkUnits, block: Block, recompute: str) -> Callable[..., Any]:
        is_layer = type(block).__name__.endswith("DecoderLayer")
        assert not is_layer or can_be_one_graph(block)
        units.compiled_on = mesh if is_layer and backend is not None else None
        return run_unit(units, block, policy if is_layer else recompute)

    parallel.zero_grad()
    by_backend = mock.patch.object(runtime.execution.binding, "as_compiled", partial(as_compiled, backend=backend))
    with mock.patch.object(ChunkUnits, "__call__", call), by_backend:
        loss = parallel(**batch).loss
        loss.backward()
    return loss.detach()


def difference(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    assert len(actual) == len(expected)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(actual, expected))


if __name__ == "__main__":
    with traced_once():
        main()
