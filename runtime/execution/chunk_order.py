"""Runs the chunks of a step in order: on several ranks that send messages, or all in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypedDict

import torch
import torch.distributed as dist

from passes.emit import Program
from passes.plan.step_plan import StepPlan
from runtime.execution.chunk import ChunkRunner
from runtime.execution.rank_mapping import Places
from runtime.pipeline import PipelineExecutor
from runtime.pipeline.forward import forward_only
from runtime.pipeline.named_actions import action
from runtime.state.owned import rectangle


class Execution(Protocol):
    """Runs a batch, micro-batch after micro-batch."""

    def train(self, weight: float) -> list[torch.Tensor]:
        """Forward and backward of ``weight`` × the loss; the micro-batches' parts of the loss itself where the last
        chunk is, nothing elsewhere."""
        ...

    def forward(self) -> dict[str, torch.Tensor]:
        """The outputs of one pass over the whole batch, this rank's parts, on every rank."""
        ...

    def sums(self) -> dict[str, torch.Tensor]:
        """The outputs of all micro-batches added up, without gradients, this rank's parts, on every rank."""
        ...


class ExecutionSetting(TypedDict):
    """What all ranks of a pipeline agree on."""

    schedule: str
    num_chunks: int
    num_microbatches: int
    group: dist.ProcessGroup
    device: torch.device


class InOrder:
    """All chunks are here: one micro-batch after the other goes through them, forward and then backward."""

    def __init__(self, stages: Sequence[ChunkRunner], *, num_microbatches: int) -> None:
        self.stages = tuple(stages)
        self.num_microbatches = num_microbatches

    def train(self, weight: float) -> list[torch.Tensor]:
        losses = []
        for microbatch in range(self.num_microbatches):
            (loss,) = self._through(microbatch).values()
            with action("B", len(self.stages) - 1, microbatch):  # through all chunks at once
                loss.backward(torch.full_like(loss, weight))
            losses.append(loss.detach())
        return losses

    def forward(self) -> dict[str, torch.Tensor]:
        return self._through(0)

    @torch.no_grad()
    def sums(self) -> dict[str, torch.Tensor]:
        outputs = [self._through(microbatch) for microbatch in range(self.num_microbatches)]
        return {path: torch.stack([each[path] for each in outputs]).sum(0) for path in outputs[0]}

    def _through(self, microbatch: int) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = {}
        for chunk, stage in enumerate(self.stages):
            with action("F", chunk, microbatch):
                outputs = stage.outputs(tuple(outputs.values()), microbatch)
        return outputs


class Pipelined:
    """Chunks on several ranks, which send each other what crosses the cuts."""

    def __init__(
        self, stages: Sequence[ChunkRunner], step: StepPlan, places: Places, last: Program, *, num_microbatches: int
    ) -> None:
        assert places.pipeline_group is not None
        self.places = places
        self.last = last
        self.last_rank = step.chunks[-1].rank
        self.stages = tuple(stages)
        self.setting = ExecutionSetting(
            schedule=step.schedule,
            num_chunks=len(step.chunks),
            num_microbatches=num_microbatches,
            group=places.pipeline_group,
            device=places.layout.device,
        )
        self._executor: PipelineExecutor | None = None

    @property
    def executor(self) -> PipelineExecutor:
        """The executor that runs training steps."""
        if self._executor is None:
            self._executor = PipelineExecutor(self.stages, **self.setting)
        return self._executor

    def train(self, weight: float) -> list[torch.Tensor]:
        return self.executor.train(weight)

    def forward(self) -> dict[str, torch.Tensor]:
        return self._on_every_rank(forward_only(self.stages, **self.setting)[:1])

    def sums(self) -> dict[str, torch.Tensor]:
        results = forward_only(self.stages, **self.setting)
        return self._on_every_rank([tuple(torch.stack(parts).sum(0) for parts in zip(*results))] if results else [])

    def _on_every_rank(self, results: Sequence[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
        """What the rank of the last chunk has, if this is it, on all ranks of the pipeline."""
        outputs = {}
        for place, spec in enumerate(self.last.outputs):
            _, shape = rectangle(spec.shape, spec.placement, self.last.mesh, self.places.layout.coordinate)
            dtype = getattr(torch, spec.dtype)
            local = results[0][place] if results else torch.empty(shape, dtype=dtype, device=self.places.layout.device)
            outputs[spec.path] = self.places.from_stage(local, self.last_rank)
        return outputs


def execution_of(
    stages: Sequence[ChunkRunner], step: StepPlan, places: Places, last: Program, *, num_microbatches: int
) -> Execution:
    """The execution for these chunks."""
    if places.stage is None or places.num_stages == 1:
        return InOrder(stages, num_microbatches=num_microbatches)
    return Pipelined(stages, step, places, last, num_microbatches=num_microbatches)
