"""Passes through a pipeline without gradients, and telling all its ranks what only the last chunk's rank knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from cost_models.schedules import rank_of_chunk
from runtime.pipeline.specs import StageRunner, TensorSpec, check_chunks, check_tensors


@torch.no_grad()
def forward_only(
    stages: Sequence[StageRunner],
    *,
    schedule: str,
    num_chunks: int,
    num_microbatches: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[tuple[torch.Tensor, ...]]:
    """Run all micro-batches through all chunks.

    Micro-batches pass a chunk ``num_ranks`` at a time, so that ranks with several chunks are all busy.

    Args: as of ``PipelineExecutor``; the schedule only says which rank holds which chunk.

    Returns:
        what the last chunk returned (any tensors) for each micro-batch on its rank, nothing elsewhere.

    Raises:
        ValueError: if ``stages`` are not this rank's chunks.
        RuntimeError: if a chunk sends other tensors than it was said to, or another rank stopped answering.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    check_chunks(stages, schedule=schedule, num_chunks=num_chunks, rank=rank, num_ranks=num_ranks)
    rank_of = [rank_of_chunk(schedule, k, num_ranks=num_ranks, num_chunks=num_chunks) for k in range(num_chunks)]
    transfers = _Transfers(group, device)
    runners = {stage.index: stage for stage in stages}
    received: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
    results = []
    for chunk, microbatch in _in_rounds(num_chunks, num_microbatches, num_ranks):
        runner, following = runners.get(chunk), runners.get(chunk + 1)
        if runner is None:
            # all ranks post transfers in the same order, so that no pair of them waits for each other
            if following is not None:
                received[chunk + 1, microbatch] = transfers.start_receiving(following.received, rank_of[chunk])
            continue
        outputs = runner.run(transfers.wait_for(received.pop((chunk, microbatch), ())), microbatch)
        if chunk == num_chunks - 1:
            results.append(outputs)
            continue
        check_tensors(outputs, runner.sent, chunk=chunk)
        if following is not None:
            received[chunk + 1, microbatch] = outputs
        else:
            transfers.start_sending(outputs, rank_of[chunk + 1])
    transfers.finish()
    return results


def broadcast_from_last(
    value: torch.Tensor | None,
    *,
    schedule: str,
    num_chunks: int,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The scalar ``value`` of the rank that holds the last chunk, on every rank of the pipeline, as ``dtype``."""
    source = rank_of_chunk(schedule, num_chunks - 1, num_ranks=dist.get_world_size(group), num_chunks=num_chunks)
    scalar = torch.zeros((), dtype=dtype, device=device)
    if dist.get_rank(group) == source:
        if value is None or value.numel() != 1:
            raise ValueError(f"the rank of the last chunk has a scalar to broadcast, not {value!r}")
        scalar = value.detach().to(device, dtype).reshape(()).clone()
    dist.broadcast(scalar, group=group, group_src=source)
    return scalar


def _in_rounds(num_chunks: int, num_microbatches: int, per_round: int) -> Iterator[tuple[int, int]]:
    """(chunk, micro-batch) in the order in which all ranks go through them."""
    for first in range(0, num_microbatches, per_round):
        for chunk in range(num_chunks):
            for microbatch in range(first, min(first + per_round, num_microbatches)):
                yield chunk, microbatch


class _Transfers:
    """Tensors in transfer between ranks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.sending: list[dist.Work] = []
        self.receiving: dict[int, dist.Work] = {}

    def start_receiving(self, specs: Sequence[TensorSpec], source: int) -> tuple[torch.Tensor, ...]:
        """Tensors that the transfer will fill: see ``wait_for``."""
        buffers = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs)
        for buffer in buffers:
            work = dist.irecv(buffer, group=self.group, group_src=source)
            assert work is not None, "this rank is in the group"
            self.receiving[id(buffer)] = work
        return buffers

    def wait_for(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The tensors, once received (those from this rank are there already)."""
        for tensor in tensors:
            work = self.receiving.pop(id(tensor), None)
            if work is not None:
                work.wait()
        return tensors

    def start_sending(self, tensors: Sequence[torch.Tensor], destination: int) -> None:
        for tensor in tensors:
            work = dist.isend(tensor.contiguous(), group=self.group, group_dst=destination)
            assert work is not None, "this rank is in the group"
            self.sending.append(work)

    def finish(self) -> None:
        while self.sending:
            self.sending.pop(0).wait()
