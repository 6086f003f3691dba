"""The state of training under one plan becomes that under another: what ``ParallelModule.replan`` does.

Nothing changes before all ranks have described what they hold and need, and every check has passed.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from runtime.agreement.ranks_together import Ranks
from runtime.checkpoint.optimizer_state import (
    IMPLEMENTATION,
    NUMBERS,
    TENSORS,
    Group,
    RequestedState,
    merged_groups,
    put_groups,
    put_state,
)
from runtime.checkpoint.rectangles_of_tensors import Piece
from runtime.migration.state_entries import (
    Averages,
    HeldPiece,
    RankState,
    StateEntry,
    let_go,
    needed_pieces,
)
from runtime.migration.transfer_plan import MovingTensor, StateLost, TransferPlan, plan_transfers
from runtime.migration.transport import Transport
from runtime.parameters import ShardedParameter
from runtime.state.exchange import exchange
from runtime.state.owned import Owned


class Migration:
    """A migration of this rank's part of the state; all ranks must make one.

    Args:
        state: what this rank holds now.
        after: what it will hold: tensors on meta, which get memory. Tied tensors must have the same first name as in
            ``state``. It may be nothing.
        ranks: all that take part.

    Attributes:
        plan: the transfers.

    Raises:
        ValueError: on all ranks, for state that cannot be cut as its parameter, a dtype that would lose digits, and if
            ranks differ in what they hand over.
        StateLost: on all ranks, if none holds what one needs, or what there was when copies were made.
    """

    def __init__(
        self,
        state: Callable[[], RankState],
        after: Sequence[Owned],
        optimizers: Sequence[torch.optim.Optimizer],
        averages: Sequence[Averages],
        ranks: Ranks,
    ) -> None:
        self._after = after
        self._optimizers, self._averages = optimizers, averages
        self._results: dict[StateEntry, torch.Tensor] = {}
        facts = {"the optimizers": ", ".join(type(optimizer).__name__ for optimizer in optimizers)}
        ranks.check_alike({**facts, "the averages": str(len(averages))})
        held_state = ranks.together(state)
        self._is_live, self._pieces = held_state.is_live, dict(held_state.pieces)
        by_rank = [own for own in ranks.gathered(held_state.groups) if own is not None]
        self._groups = [merged_groups([own[number] for own in by_rank]) for number in range(len(optimizers))]
        held = ranks.gathered({entry: tuple(map(HeldPiece.of, pieces)) for entry, pieces in self._pieces.items()})
        entries = {entry: pieces[0] for rank_pieces in held for entry, pieces in rank_pieces.items()}
        lost = sorted(entry for own in ranks.gathered(held_state.of_all - entries.keys()) for entry in own)
        if lost:
            raise StateLost(f"no rank holds anything of {lost[0]}")
        self._needed = needed_pieces(entries, after)
        needed = ranks.gathered(self._needed)
        _refuse_rounding(entries, needed)
        nodes = ranks.gathered(socket.gethostname())
        self.plan: TransferPlan = plan_transfers([_moving(entry, held, needed) for entry in entries], nodes)

    def let_go(self, before: Sequence[Owned], shown: Iterable[ShardedParameter]) -> None:
        """Take the state from the users' parameters and the optimizers; what ran under the old plan is of no use."""
        let_go(before, shown, self._optimizers)

    def run(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Move everything, and fill the new tensors; ``hand_over`` must follow.

        Raises:
            RuntimeError: if another rank stopped answering; the state is lost then.
        """
        gc.collect()  # what ran under the old plan refers to itself
        sources = {entry: [piece.tensor for piece in pieces] for entry, pieces in self._pieces.items()}
        self._pieces.clear()
        stays = {moved.tensor.name: moved.tensor for batch in self.plan.batches for moved in batch}
        rank = 0 if group is None else dist.get_rank(group)

        def allocate(entry: StateEntry, own: torch.Tensor | None) -> torch.Tensor:
            if own is not None and self._is_live and stays[entry].stays(rank):
                return own
            needed = self._needed[entry]
            return torch.empty(needed.sizes, dtype=needed.dtype, device="cpu" if needed.on_host else device)

        try:
            self._results = Transport(group, device).move(self.plan, sources, allocate)
        except Exception as error:
            raise RuntimeError(
                f"the state was lost on its way to another plan ({type(error).__name__}: {error}): start again from "
                "the last checkpoint. If this is a lost connection or a time-out, another rank failed first: see its "
                "output"
            ) from error
        for piece in self._after:
            tensor = self._results.pop(StateEntry("model", piece.name), None)
            if tensor is not None:
                fill(piece.tensor, tensor)
            gradient = self._results.pop(StateEntry("gradient", piece.name), None)
            if gradient is not None:
                piece.tensor.grad = gradient

    def hand_over(self, shown: Mapping[str, ShardedParameter]) -> None:
        """Give the optimizers and the averages their state.

        Args:
            shown: the users' parameters under the new plan, by every name.
        """
        results, self._results = self._results, {}
        for number, (optimizer, groups) in enumerate(zip(self._optimizers, self._groups)):
            _regroup(optimizer, groups, shown)
            if not self._is_live:
                put_groups(optimizer, [_kept_options(group) for group in groups])
            put_state(_requested(results, number, self._after, shown, self._needed), optimizer)
        for number, averages in enumerate(self._averages):
            averages.clear()
            for entry, tensor in results.items():
                if entry.kind == "average" and entry.number == number:
                    parameter = shown.get(entry.name)
                    averages[entry.name] = tensor if parameter is None else parameter.placed(tensor)


def _moving(
    entry: StateEntry,
    held: Sequence[Mapping[StateEntry, tuple[HeldPiece, ...]]],
    needed: Sequence[Mapping[StateEntry, HeldPiece]],
) -> MovingTensor:
    holders = {rank: pieces[entry] for rank, pieces in enumerate(held) if entry in pieces}
    takers = {rank: pieces[entry] for rank, pieces in enumerate(needed) if entry in pieces}
    dtype = next(iter(holders.values()))[0].dtype
    new_dtype = next((piece.dtype for piece in takers.values()), dtype)
    return MovingTensor(
        entry,
        dtype.itemsize,
        {rank: tuple(piece.region for piece in pieces) for rank, pieces in holders.items()},
        {rank: piece.region for rank, piece in takers.items()},
        new_dtype.itemsize if new_dtype != dtype else 0,
        dtype,
    )


def _refuse_rounding(entries: Mapping[StateEntry, HeldPiece], needed: Sequence[Mapping[StateEntry, HeldPiece]]) -> None:
    """Refuse a plan that keeps a weight in a dtype with fewer digits than it is held in."""
    for pieces in needed:
        for entry, piece in pieces.items():
            held = entries[entry].dtype
            if torch.promote_types(held, piece.dtype) != piece.dtype:
                raise ValueError(
                    f"the new plan keeps {entry.name!r} in {piece.dtype}, the present one in {held}, which would be "
                    "rounded: plan with the same optimizer and precision"
                )


def fill(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give ``target``, which is on meta, the memory of ``tensor``; it stays the same object."""
    if isinstance(target, torch.nn.Parameter):
        tensor = torch.nn.Parameter(tensor, requires_grad=target.requires_grad)
    exchange(target, tensor)


def _regroup(optimizer: torch.optim.Optimizer, groups: Sequence[Group], shown: Mapping[str, ShardedParameter]) -> None:
    """Give each group this rank's parameters of those that any rank had in it."""
    for group, names in zip(optimizer.param_groups, groups):
        group["params"] = [shown[name] for name in names.names if name in shown]


def _kept_options(group: Group) -> dict[str, Any]:
    return {name: value for name, value in group.options.items() if name not in IMPLEMENTATION}


def _requested(
    results: Mapping[StateEntry, torch.Tensor],
    number: int,
    owned: Sequence[Owned],
    shown: Mapping[str, ShardedParameter],
    needed: Mapping[StateEntry, HeldPiece],
) -> RequestedState:
    """The state of one optimizer in the form in which checkpoints put it."""
    content: dict[str, Any] = {}
    states: dict[torch.Tensor, dict[str, str]] = {}
    pieces = {piece.name: piece for piece in owned}
    for entry, tensor in results.items():
        if entry.kind != "optimizer" or entry.number != number:
            continue
        full = f"{NUMBERS if entry.is_number else TENSORS}{entry.name}/{entry.key}"
        piece = pieces[entry.name]
        is_like = needed[entry].shape == piece.shape and bool(piece.shape)
        whole = Piece(tensor, tuple(tensor.shape), (0,) * tensor.dim())
        content[full] = Piece(tensor, piece.shape, piece.offsets) if is_like else whole
        states.setdefault(shown[entry.name], {})[entry.key] = full
    return RequestedState(content, states)
