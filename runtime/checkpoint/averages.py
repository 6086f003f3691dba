"""Averages of the weights (EMA) in a checkpoint: placed as their parameters are, and stored under the same names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from runtime.checkpoint.rectangles_of_tensors import Content, Piece, check_pieces, names_under
from runtime.parameters import ShardedParameter
from runtime.state.owned import Owned

#: Averages of parameters (EMA) that a user keeps: tensors placed as the parameters are, by their names.
Averages = MutableMapping[str, torch.Tensor]

PREFIX = "average/"


def listed_averages(averages: Averages | Sequence[Averages]) -> list[Averages]:
    """One or several as a list.

    Raises:
        ValueError: for what is neither.
    """
    listed = [averages] if isinstance(averages, MutableMapping) else list(averages)
    for one in listed:
        if not isinstance(one, MutableMapping):
            raise ValueError(
                f"averages are tensors by the names of their parameters (or several such mappings), got {one!r:.60}"
            )
    return listed


def average_pieces(owned: Sequence[Owned], averages: Averages) -> Iterator[tuple[Owned, Piece]]:
    """This rank's pieces, and whose averages they are.

    Raises:
        ValueError: for averages that are not placed as their parameters.
    """
    by_name = {name: piece for piece in owned for name in (piece.name, *piece.aliases)}
    for name, tensor in averages.items():
        piece = by_name.get(name)
        if piece is None or tuple(tensor.shape) != piece.shape:
            raise ValueError(
                f"the averages have {name!r} of shape {list(tensor.shape)}, which is no tensor of this rank: keep them "
                "by the names of parallel.named_parameters(), each of its parameter's shape "
                "({name: parameter.detach().clone() for name, parameter in parallel.named_parameters()})"
            )
        local = getattr(tensor, "to_local", lambda plain=tensor: plain)()
        if local.shape != piece.tensor.shape:
            raise ValueError(f"the average of {name!r} is not placed as its parameter: make it from that")
        yield piece, Piece(local.detach(), piece.shape, piece.offsets)


def averages_to_save(owned: Sequence[Owned], averages: Sequence[Averages]) -> Content:
    """What this rank writes.

    Raises:
        ValueError: as ``average_pieces``.
    """
    return {
        f"{PREFIX}{number}/{whose.name}": piece
        for number, own in enumerate(averages)
        for whose, piece in average_pieces(owned, own)
        if whose.primary
    }


def averages_to_load(
    owned: Sequence[Owned], averages: Sequence[Averages], metadata: Metadata, device: torch.device | str
) -> Content:
    """What this rank requests, with memory of its own.

    Raises:
        ValueError: if the checkpoint has not as many, or of another model.
    """
    stored = names_under(metadata, PREFIX)
    count = len({name.removeprefix(PREFIX).partition("/")[0] for name in stored})
    if averages and count != len(averages):
        raise ValueError(
            f"the checkpoint has {count} averages of the weights, {len(averages)} are asked for: give as many as "
            "were saved, or none"
        )
    content: Content = {}
    for number in range(len(averages)):
        for piece in owned:
            name = f"{PREFIX}{number}/{piece.name}"
            described = metadata.state_dict_metadata.get(name)
            if isinstance(described, TensorStorageMetadata):
                local = torch.empty(piece.tensor.shape, dtype=described.properties.dtype, device=device)
                content[name] = Piece(local, piece.shape, piece.offsets)
    check_pieces(content, metadata)
    return content


def put_averages(content: Content, averages: Sequence[Averages], parameters: Mapping[str, torch.Tensor]) -> None:
    """Replace what averages hold by what was read.

    Args:
        parameters: the model's, by every name.
    """
    for number, own in enumerate(averages):
        own.clear()
        prefix = f"{PREFIX}{number}/"
        for full, piece in content.items():
            if full.startswith(prefix):
                name = full.removeprefix(prefix)
                parameter = parameters.get(name)
                own[name] = parameter.placed(piece.tensor) if isinstance(parameter, ShardedParameter) else piece.tensor
