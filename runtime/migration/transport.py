"""Moving tensors as a plan of transfers says: batched sends and receives, one batch of tensors after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from runtime.migration.tensor_regions import Region, overlap
from runtime.migration.transfer_plan import TensorTransfers, TransferPlan


class Transport:
    """One rank's part in the transfers.

    Args:
        group: of all ranks that take part, numbered as in the plan; its time-out bounds how long a rank waits for one
            that failed. None for a rank alone.
        device: of what the group sends and receives.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._device = device

    def move(
        self,
        plan: TransferPlan,
        sources: MutableMapping[Any, list[torch.Tensor]],
        allocate: Callable[[Any, torch.Tensor | None], torch.Tensor],
    ) -> dict[Any, torch.Tensor]:
        """What this rank needs, by the tensors' names; ``sources`` is emptied on the way.

        Args:
            sources: of each tensor that this rank holds, one for each region.
            allocate: an empty tensor for what this rank needs of a name, or what it holds already, where that is the
                same.

        Raises:
            RuntimeError: if another rank stopped answering; the state is lost then.
        """
        results: dict[Any, torch.Tensor] = {}
        for batch in plan.batches:
            for moved in batch:
                if self._rank in moved.tensor.takers:
                    own = sources.get(moved.tensor.name, ())
                    results[moved.tensor.name] = allocate(moved.tensor.name, own[0] if own else None)
                    self._take_own(moved, sources, results)
            for relayed in (False, True):
                self._exchange(batch, sources, results, relayed=relayed)
            for moved in batch:
                sources.pop(moved.tensor.name, None)
        return results

    def _take_own(
        self, moved: TensorTransfers, sources: Mapping[Any, Sequence[torch.Tensor]], results: Mapping[Any, torch.Tensor]
    ) -> None:
        """Copy what this rank holds already of what it needs."""
        tensor, needed = moved.tensor, moved.tensor.takers[self._rank]
        target = results[tensor.name]
        for own, held in zip(sources.get(tensor.name, ()), tensor.holders.get(self._rank, ())):
            shared = overlap(held, needed)
            if shared is not None and own is not target:
                _part(target, needed, shared).copy_(_part(own, held, shared))

    def _exchange(
        self,
        batch: Iterable[TensorTransfers],
        sources: Mapping[Any, Sequence[torch.Tensor]],
        results: Mapping[Any, torch.Tensor],
        *,
        relayed: bool,
    ) -> None:
        """Send and receive what moves of a batch: first from holders, then what they relay."""
        operations: list[dist.P2POp] = []
        arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []
        for moved in batch:
            name, messages = moved.tensor.name, dict[Region, torch.Tensor]()
            for transfer in moved.transfers:
                if transfer.relayed is not relayed:
                    continue
                if transfer.source == self._rank:
                    if transfer.region not in messages:
                        part = (
                            _part(results[name], moved.tensor.takers[self._rank], transfer.region)
                            if relayed
                            else _part_of_any(sources[name], moved.tensor.holders[self._rank], transfer.region)
                        )
                        messages[transfer.region] = part.to(self._device).contiguous()
                    operations.append(self._operation(dist.isend, messages[transfer.region], transfer.destination))
                elif transfer.destination == self._rank:
                    target = _part(results[name], moved.tensor.takers[self._rank], transfer.region)
                    buffer = self._buffer_for(target, moved.tensor.sent_dtype)
                    operations.append(self._operation(dist.irecv, buffer, transfer.source))
                    arrivals.append((target, buffer))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for target, buffer in arrivals:
            if buffer.data_ptr() != target.data_ptr():
                target.copy_(buffer)

    def _buffer_for(self, target: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Where to receive: the target itself where it is in one stretch and of the dtype that is sent."""
        if target.is_contiguous() and target.dtype == dtype and target.device == self._device:
            return target
        return torch.empty(target.shape, dtype=dtype, device=self._device)

    def _operation(self, operation: Any, tensor: torch.Tensor, peer: int) -> dist.P2POp:
        # As bytes: backends do not know all dtypes.
        return dist.P2POp(operation, tensor.reshape(-1).view(torch.uint8), group=self._group, group_peer=peer)


def _part_of_any(tensors: Sequence[torch.Tensor], regions: Sequence[Region], region: Region) -> torch.Tensor:
    """The view of ``region`` in the first of ``tensors`` that has all of it."""
    tensor, held = next(one for one in zip(tensors, regions, strict=True) if overlap(one[1], region) == region)
    return _part(tensor, held, region)


def _part(tensor: torch.Tensor, held: Region, region: Region) -> torch.Tensor:
    """The view of ``region`` in a tensor that holds ``held`` of the whole."""
    part = tensor
    for dim, ((begin, end), (first, _)) in enumerate(zip(region, held, strict=True)):
        part = part.narrow(dim, begin - first, end - begin)
    return part
