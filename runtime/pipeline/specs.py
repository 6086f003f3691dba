"""What a pipeline executor needs to know of the chunks that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cost_models.schedules import rank_of_chunk


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that one chunk sends to the next, as this rank has it.

    Attributes:
        shape: of this rank's part, for one micro-batch.
        dtype: any that the process group can send.
        requires_grad: whether its gradient (same shape and dtype) is sent back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class StageRunner(Protocol):
    """One chunk of the model, as one rank runs it.

    Attributes:
        index: the chunk's place in the model, from 0.
        received: what the chunk before sends (nothing for the first).
        sent: what goes to the next chunk (of the last chunk, not read).
        tokens: leaves that the chunk uses besides what it receives; their ``.grad`` is added to.
    """

    index: int
    received: tuple[TensorSpec, ...]
    sent: tuple[TensorSpec, ...]
    tokens: list[torch.nn.Parameter]

    def run(self, received: tuple[torch.Tensor, ...], microbatch: int) -> tuple[torch.Tensor, ...]:
        """What the chunk sends for that micro-batch; of the last chunk ``(loss,)``, its part of the loss.

        It changes no received tensor, but may return one. Inputs of the model it looks up itself.
        """
        ...


def check_tensors(tensors: tuple[torch.Tensor, ...], specs: tuple[TensorSpec, ...], *, chunk: int) -> None:
    """Check that ``tensors`` match what the chunk declares that it sends.

    Raises:
        RuntimeError: if they are not; the receiver would wait, or read something else.
    """
    actual = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    expected = tuple((spec.shape, spec.dtype) for spec in specs)
    if actual != expected:
        raise RuntimeError(f"chunk {chunk} returned tensors of shape and dtype {actual}, expected {expected}")


def check_chunks(stages: Sequence[StageRunner], *, schedule: str, num_chunks: int, rank: int, num_ranks: int) -> None:
    """Check that ``stages`` are the chunks of ``rank``.

    Raises:
        ValueError: if they are not.
    """
    expected = [
        chunk
        for chunk in range(num_chunks)
        if rank_of_chunk(schedule, chunk, num_ranks=num_ranks, num_chunks=num_chunks) == rank
    ]
    actual = sorted(stage.index for stage in stages)
    if actual != expected:
        raise ValueError(
            f"pipeline rank {rank} of {num_ranks} was given chunks {actual}, "
            f"but under {schedule} with {num_chunks} chunks it holds {expected}"
        )
