"""Runs one rank's chunks of a pipeline: training steps under the plan's schedule, and passes without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cost_models.schedules import Action
from runtime.pipeline.forward import forward_only
from runtime.pipeline.specs import StageRunner, check_chunks
from runtime.pipeline.stage import PipelineStage
from runtime.pipeline.torch_schedules import build_schedule, is_run_by_actions


@dataclass(frozen=True)
class _Pipeline:
    """What all ranks agree on."""

    schedule: str
    num_chunks: int
    num_microbatches: int
    group: dist.ProcessGroup
    device: torch.device


class PipelineExecutor:
    """One rank's part in a pipeline.

    Args:
        stages: this rank's chunks, those that ``cost_models.schedules.rank_of_chunk`` places on it.
        schedule: a name of ``cost_models.schedules.SCHEDULES``.
        num_chunks, num_microbatches: of the whole pipeline; all ranks give the same.
        group: the ranks of the pipeline; its time-out bounds how long a rank waits for one that failed.
        device: where received tensors go.

    Attributes:
        order: what this rank ran in the last step, in order.

    Raises:
        ValueError: if the schedule cannot run that many micro-batches or chunks, or these are not this rank's chunks.
    """

    def __init__(
        self,
        stages: Sequence[StageRunner],
        *,
        schedule: str,
        num_chunks: int,
        num_microbatches: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        check_chunks(stages, schedule=schedule, num_chunks=num_chunks, rank=self._rank, num_ranks=num_ranks)
        self._runners = tuple(stages)
        self._pipeline = _Pipeline(schedule, num_chunks, num_microbatches, group, device)
        self.order: list[Action] = []
        by_actions = is_run_by_actions(
            schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks
        )
        self._stages = [
            PipelineStage(
                runner,
                num_stages=num_chunks,
                device=device,
                group=group,
                sends_itself=by_actions,
                record=self._record,
            )
            for runner in sorted(stages, key=lambda runner: runner.index)
        ]
        self._schedule = build_schedule(schedule, self._stages, num_microbatches=num_microbatches)
        self._broken = False

    def _record(self, action: Action) -> None:
        self.order.append(action)

    @property
    def bytes_sent(self) -> dict[tuple[int, int], int]:
        """Bytes that this rank sent to others in the last step, by (from chunk, to chunk)."""
        return {
            (stage.stage_index, chunk): count for stage in self._stages for chunk, count in stage.sent_bytes.items()
        }

    def train(self, loss_weight: float = 1.0) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches; gradients are added to the leaves' ``.grad``.

        Args:
            loss_weight: gradients are those of ``loss_weight`` × the loss.

        Returns:
            the micro-batches' losses (detached scalars, in order) on the rank of the last chunk, nothing elsewhere.

        Raises:
            RuntimeError: if a chunk failed here, or another rank stopped answering; the pipeline is then unusable.
        """
        if self._broken:
            raise RuntimeError("this pipeline stopped in the middle of a step: start the processes again")
        self.order.clear()
        losses: list[torch.Tensor] = []
        for stage in self._stages:
            stage.loss_weight = loss_weight
        target = torch.empty(self._pipeline.num_microbatches, device="cpu")
        try:
            self._schedule.step(target=target, losses=losses, return_outputs=False)
            for stage in self._stages:
                stage.wait_for_sends()
        except Exception as error:
            self._broken = True
            raise RuntimeError(self._where(error)) from error
        return losses

    def forward_only(self) -> list[tuple[torch.Tensor, ...]]:
        """All micro-batches through all chunks without gradients: see ``runtime.pipeline.forward.forward_only``."""
        return forward_only(self._runners, **vars(self._pipeline))

    def _where(self, error: Exception) -> str:
        chunks = ", ".join(str(stage.stage_index) for stage in self._stages)
        last = "before its first action"
        if self.order:
            action = self.order[-1]
            last = f"after {action.kind} of chunk {action.chunk}, micro-batch {action.microbatch}"
        return (
            f"pipeline rank {self._rank} (chunks {chunks}) stopped {last}: {type(error).__name__}: {error}. "
            "If this is a lost connection or a time-out, another rank failed first: see its output."
        )
