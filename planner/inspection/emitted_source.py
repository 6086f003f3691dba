"""The programs that ranks run under a saved plan, as text: its model is captured, cut and emitted again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from passes.plan import Plan
from passes.plan.step_plan import StepPlan

if TYPE_CHECKING:
    from passes.capture.call_arguments import ExampleInputs

#: Numbers of layers in paths, and of chunks: where programs of a pipeline's chunks differ that do the same.
_NUMBERS = re.compile(r"(?<=[a-z_]\.)(?:\d+|\{\d+\.\.\d+\})|(?<=[a-z_]\[)\d+(?=\])|(?<=chunk )\d+")


def emitted_sources(
    plan: Plan,
    model: Any = None,
    *,
    example_inputs: ExampleInputs | None = None,
    loss_fn: Callable[..., Any] | None = None,
) -> dict[str, str]:
    """Name of every pipeline chunk → the source of its program; one entry where there is no pipeline.

    Of chunks that run the same on other layers, the first stands for all.

    Args:
        model, example_inputs, loss_fn: of a plan that is not of a config in the library, as ``planner.plan`` takes
            them.

    Raises:
        ValueError: if the plan does not name its model and none is passed, if the model is another, or if no programs
            can be made of the plan.
    """
    from passes.chains import chain_up
    from passes.emit import emit
    from passes.fuse import pair_rotaries
    from passes.pipeline_cut import step_programs
    from planner.auditing.subject import subject_of

    graph = subject_of(plan, model, example_inputs=example_inputs, loss_fn=loss_fn).graph
    outputs = None if graph.loss is not None else tuple(graph.outputs)
    programs = step_programs(graph, plan, num_microbatches=None if graph.loss is not None else 1, outputs=outputs)
    alike: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    for stage in programs.stages:
        text = emit(chain_up(pair_rotaries(stage.sharded))).source
        kind = _NUMBERS.sub("#", text)
        alike.setdefault(kind, []).append(stage.index)
        texts.setdefault(kind, text)
    sources = {_names(plan.step, chunks): texts[kind] for kind, chunks in alike.items()}
    for stage in programs.counting:
        name = f"{_names(plan.step, [stage.index])}, a pass that counts what the loss needs of the whole batch"
        sources[name] = emit(chain_up(pair_rotaries(stage.sharded))).source
    if programs.totals is not None:
        sources["Totals of a batch, on every rank"] = emit(chain_up(pair_rotaries(programs.totals))).source
    return sources


def _names(step: StepPlan, chunks: Sequence[int]) -> str:
    """Which chunks a program is of, with the pipeline ranks that run them."""
    if len(step.chunks) <= 1:
        return "Every rank"
    first = f"Chunk {chunks[0] + 1} of {len(step.chunks)}, on pipeline rank {step.chunks[chunks[0]].rank}"
    return first if len(chunks) == 1 else f"{first}, and {len(chunks) - 1} more of other layers that run the same"
