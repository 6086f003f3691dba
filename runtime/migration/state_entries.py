"""What a rank holds of the state of training, by entry, and what it needs of each under another plan.

The pieces are those of checkpoints (``runtime.checkpoint``), from every rank that holds one and not from the first
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from runtime.checkpoint.averages import Averages, average_pieces
from runtime.checkpoint.model_state import PREFIX, model_to_save
from runtime.checkpoint.optimizer_state import NUMBERS, TENSORS, Group, groups_of, optimizer_to_save
from runtime.checkpoint.rectangles_of_tensors import Piece
from runtime.migration.tensor_regions import Region, region_of
from runtime.parameters import ShardedParameter
from runtime.state.owned import Owned


class StateEntry(NamedTuple):
    """One tensor of the state.

    Attributes:
        number: of the optimizer, or of the averages.
        name: of the model's tensor that it belongs to.
        key: of the optimizer's state.
        is_number: whether the optimizer keeps a number of Python's.
    """

    kind: Literal["model", "gradient", "optimizer", "average"]
    name: str
    number: int = 0
    key: str = ""
    is_number: bool = False


@dataclass(frozen=True)
class HeldPiece:
    """A rank's piece of an entry, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region
    on_host: bool

    @staticmethod
    def of(piece: Piece) -> HeldPiece:
        tensor = piece.tensor
        on_host = tensor.device.type == "cpu"
        return HeldPiece(tuple(piece.shape), tensor.dtype, region_of(piece.offsets, tensor.shape), on_host)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.region)


@dataclass(frozen=True)
class RankState:
    """What a rank holds of the state of training.

    Attributes:
        pieces: of every entry that it has something of.
        groups: of every optimizer; None on a rank that holds nothing.
        is_live: whether training runs on the pieces themselves, and not on a copy.
        of_all: entries that any rank had when a copy was made.
    """

    pieces: Mapping[StateEntry, Sequence[Piece]]
    groups: Sequence[Sequence[Group]] | None
    is_live: bool
    of_all: frozenset[StateEntry] = frozenset()

    @staticmethod
    def live(
        owned: Sequence[Owned], optimizers: Sequence[torch.optim.Optimizer], averages: Sequence[Averages]
    ) -> RankState:
        """What training runs on.

        Raises:
            ValueError: as ``held_pieces``, and for an optimizer with parameters that are not ``owned``.
        """
        pieces = held_pieces(owned, optimizers, averages)
        groups = [groups_of(owned, one) for one in optimizers]
        return RankState({entry: (piece,) for entry, piece in pieces.items()}, groups, is_live=True)


#: Of a rank that is without work.
NO_STATE = RankState({}, None, is_live=False)


def held_pieces(
    owned: Sequence[Owned], optimizers: Sequence[torch.optim.Optimizer], averages: Sequence[Averages]
) -> dict[StateEntry, Piece]:
    """This rank's pieces; tensors that are still on meta have none.

    Raises:
        ValueError: for state of an optimizer that is neither a tensor nor a number, and for averages that are not
            placed as their parameters.
    """
    pieces: dict[StateEntry, Piece] = {}
    with_values = [piece for piece in owned if not piece.tensor.is_meta]
    for name, piece in model_to_save(with_values, every_copy=True).items():
        pieces[StateEntry("model", name.removeprefix(PREFIX))] = piece
    for part in with_values:
        if part.tensor.grad is not None:
            pieces[StateEntry("gradient", part.name)] = Piece(part.tensor.grad.detach(), part.shape, part.offsets)
    devices = {part.name: part.tensor.device for part in with_values}
    for number, optimizer in enumerate(optimizers):
        for full, piece in optimizer_to_save(with_values, optimizer, every_copy=True).items():
            for prefix in (TENSORS, NUMBERS):
                if full.startswith(prefix):
                    name, _, key = full.removeprefix(prefix).rpartition("/")
                    entry = StateEntry("optimizer", name, number, key, prefix == NUMBERS)
                    pieces[entry] = _beside(devices.get(name), piece)
    for number, averaged in enumerate(averages):
        for whose, piece in average_pieces(with_values, averaged):
            pieces[StateEntry("average", whose.name, number)] = piece
    return pieces


def _beside(device: torch.device | None, piece: Piece) -> Piece:
    """State that is kept on the host, where ranks send each other what devices hold; numbers as they are."""
    if device is None or not piece.shape or piece.tensor.device == device:
        return piece
    return Piece(piece.tensor.to(device), piece.shape, piece.offsets)


def needed_pieces(entries: Mapping[StateEntry, HeldPiece], owned: Sequence[Owned]) -> dict[StateEntry, HeldPiece]:
    """What this rank needs of ``entries`` (described by any rank that holds them) to hold ``owned``.

    Gradients and optimizer state of parameters that are frozen are left behind.
    """
    by_name = {piece.name: piece for piece in owned}
    needed = {}
    for entry, described in entries.items():
        piece = by_name.get(entry.name)
        if piece is None or (entry.kind in ("gradient", "optimizer") and not piece.trainable):
            continue
        own_region = region_of(piece.offsets, piece.tensor.shape)
        dtype = piece.tensor.dtype if entry.kind == "model" else described.dtype
        if described.shape == piece.shape and described.shape:
            needed[entry] = HeldPiece(piece.shape, dtype, own_region, on_host=False)
        else:
            whole = region_of((0,) * len(described.shape), described.shape)
            needed[entry] = HeldPiece(described.shape, dtype, whole, described.on_host)
    return needed


def let_go(
    owned: Sequence[Owned], shown: Iterable[ShardedParameter], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Drop what the parameters, their gradients and the optimizers hold: the pieces alone hold it from now on."""
    parameters = list(shown)
    for parameter in parameters:
        parameter.drop_gradient()
    for piece in owned:
        if isinstance(piece.tensor, torch.nn.Parameter) and not piece.tensor.is_meta:
            element = torch.empty((), dtype=piece.tensor.dtype, device=piece.tensor.device)
            piece.tensor.data = element.expand(piece.tensor.shape)  # of one element, in the shape that DTensors have
    for parameter in parameters:
        parameter.refresh()
    for optimizer in optimizers:
        optimizer.state.clear()
