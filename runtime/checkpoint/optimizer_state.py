"""The optimizer's part of a checkpoint, by parameter names: tensors as rectangles, scalars, and the groups' options.

``Optimizer.state_dict`` numbers parameters as one rank has them; another plan has others. So its state is read and
written by parameter here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from runtime.checkpoint.rectangles_of_tensors import Content, Piece, names_under
from runtime.parameters import SCALARS, ShardedParameter, local_of
from runtime.parameters.offloaded_optimizer import MASTER, OffloadedOptimizer
from runtime.parameters.optimizer_steps import follow_plan
from runtime.state.owned import Owned
from runtime.torch_compat.dtensors import local_part

TENSORS = "optimizer/tensor/"
NUMBERS = "optimizer/number/"
#: How an optimizer computes, which depends on the device: the running one's own choice stays.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class Group:
    """One of ``param_groups``: its options, and names of its parameters."""

    options: dict[str, Any]
    names: tuple[str, ...]


def _owners(owned: Sequence[Owned], optimizer: torch.optim.Optimizer) -> dict[int, Owned]:
    """Owned pieces of the optimizer's parameters, by ``id``.

    Raises:
        ValueError: for a parameter that is not the model's.
    """
    follow_plan(optimizer)
    owners = {id(piece.tensor): piece for piece in owned}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Of a number, ranks that do not hold it have an empty stand-in.
            if id(local_of(parameter)) not in owners and parameter.numel():
                raise ValueError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is not among this model's: "
                    "make it from parallel.parameters()"
                )
    return owners


def groups_of(owned: Sequence[Owned], optimizer: torch.optim.Optimizer) -> tuple[Group, ...]:
    """This rank's groups."""
    owners = _owners(owned, optimizer)
    return tuple(
        Group(
            {name: value for name, value in group.items() if name != "params"},
            tuple(owners[key].name for key in map(id, map(local_of, group["params"])) if key in owners),
        )
        for group in optimizer.param_groups
    )


def merged_groups(by_rank: Sequence[Sequence[Group]]) -> list[Group]:
    """The groups of all ranks, each of which names only what it holds.

    Raises:
        ValueError: if ranks have different numbers of groups.
    """
    counts = {len(groups) for groups in by_rank}
    if len(counts) != 1:
        raise ValueError(
            f"ranks have {sorted(counts)} parameter groups: make the same groups on all ranks, in the same order; "
            "one may be empty where a rank holds none of its parameters"
        )
    merged = []
    for parts in zip(*by_rank):
        names = tuple(dict.fromkeys(name for part in parts for name in part.names))
        merged.append(Group(parts[0].options, names))
    return merged


def optimizer_to_save(owned: Sequence[Owned], optimizer: torch.optim.Optimizer, *, every_copy: bool = False) -> Content:
    """What this rank writes of the optimizer's state; with ``every_copy`` all that it holds.

    Raises:
        ValueError: for state that is neither a number, nor a tensor of the parameter's shape or of some of its dims.
    """
    owners = _owners(owned, optimizer)
    content: Content = {}
    for parameter, state in optimizer.state.items():
        piece = owners.get(id(local_of(parameter)))
        if piece is None:
            continue
        for key, value in state.items():
            name = f"{piece.name}/{key}"
            if value is None:
                continue
            if _is_like(value, parameter):
                if piece.primary or every_copy:
                    local = parameter.local(value) if isinstance(parameter, ShardedParameter) else value
                    content[TENSORS + name] = Piece(local.detach(), piece.shape, piece.offsets)
                continue
            if not concerns_whole(value, piece.shape):
                raise ValueError(
                    f"the optimizer keeps {_described(value)} as {key!r} of {piece.name!r} (here "
                    f"{list(parameter.shape)}): only numbers, tensors of the parameter's shape and statistics over "
                    "some of its dims can be stored so that another plan can resume them"
                )
            whole = value.full_tensor() if isinstance(value, DTensor) else value  # by all ranks of its mesh
            if every_copy or _holds_the_first_element(piece):
                place = TENSORS if isinstance(whole, torch.Tensor) else NUMBERS
                # Python's numbers have 64 bits.
                dtype = torch.float64 if isinstance(whole, float) else None
                device = whole.device if isinstance(whole, torch.Tensor) else "cpu"
                tensor = torch.as_tensor(whole, dtype=dtype, device=device).detach()
                content[place + name] = Piece(tensor, tuple(tensor.shape), (0,) * tensor.dim())
    return content


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    """Whether state is held as its parameter is: element by element."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return isinstance(value, DTensor) or not isinstance(parameter, ShardedParameter)


def concerns_whole(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a value is the same on all ranks: a number, or a statistic of some dims of a parameter of ``shape``.

    A plain tensor of any other shape may be of this rank's part alone.
    """
    if isinstance(value, (int, float, DTensor)):
        return True
    if not isinstance(value, torch.Tensor):
        return False
    dims = iter(shape)
    return all(size == 1 or size in dims for size in value.shape)  # in this order


def _described(value: Any) -> str:
    return f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _holds_the_first_element(piece: Owned) -> bool:
    """Exactly one rank does: it writes what concerns the whole parameter."""
    return piece.primary and piece.tensor.numel() > 0 and not any(piece.offsets)


@dataclass(frozen=True)
class RequestedState:
    """State of the optimizer to be read: ``content`` is what to ask for, ``states`` where it goes."""

    content: Content
    states: Mapping[torch.Tensor, Mapping[str, str]]


def optimizer_to_load(owned: Sequence[Owned], optimizer: torch.optim.Optimizer, metadata: Metadata) -> RequestedState:
    """The optimizer state that this rank requests."""
    owners = _owners(owned, optimizer)
    keys: dict[str, list[str]] = {}
    for prefix in (TENSORS, NUMBERS):
        for full in names_under(metadata, prefix):
            keys.setdefault(full.removeprefix(prefix).rpartition("/")[0], []).append(full)
    content: Content = {}
    states: dict[torch.Tensor, dict[str, str]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = owners.get(id(local_of(parameter)))
            if owner is None:
                continue
            for full in keys.get(owner.name, ()):
                content[full] = _empty(full, metadata, owner, group)
                states.setdefault(parameter, {})[full.rpartition("/")[2]] = full
    return RequestedState(content, states)


def _empty(full: str, metadata: Metadata, owner: Owned, group: Mapping[str, Any]) -> Piece:
    """A piece to read state into: the parameter's rectangle, or what concerns the whole parameter."""
    parameter = owner.tensor
    stored = metadata.state_dict_metadata[full]
    assert isinstance(stored, TensorStorageMetadata)
    dtype = stored.properties.dtype
    if tuple(stored.size) == owner.shape:
        # On meta: it gets memory once everything is found to fit.
        return Piece(torch.empty_like(parameter, dtype=dtype, device="meta"), owner.shape, owner.offsets)
    # PyTorch keeps a step count on the CPU unless the update itself reads it on the device.
    on_device = full.rpartition("/")[2] != "step" or group.get("capturable") or group.get("fused")
    on_device = on_device and full.startswith(TENSORS)
    size = tuple(stored.size)
    device = "cpu" if not on_device else "meta" if size else parameter.device
    return Piece(torch.empty(size, dtype=dtype, device=device), size, (0,) * len(size))


def with_state_memory(requested: RequestedState, device: torch.device | str) -> None:
    """Allocate memory for the requested pieces that are on meta."""
    for full, piece in requested.content.items():
        if piece.tensor.is_meta:
            requested.content[full] = Piece(torch.empty_like(piece.tensor, device=device), piece.shape, piece.offsets)


def put_state(requested: RequestedState, optimizer: torch.optim.Optimizer) -> None:
    """Replace the optimizer's whole state by what was read."""
    optimizer.state.clear()
    for parameter, keys in requested.states.items():
        entry = {key: _state_of(parameter, key, requested.content[full], full) for key, full in keys.items()}
        if not isinstance(optimizer, OffloadedOptimizer):
            _take_master(parameter, entry.pop(MASTER, None))
        optimizer.state[parameter] = entry


@torch.no_grad()
def _take_master(parameter: torch.Tensor, master: Any) -> None:
    """Give a weight the bits that its master copy on a host had more of it."""
    if isinstance(master, torch.Tensor):
        local_of(parameter).copy_(local_part(master) if isinstance(master, DTensor) else master)


def _state_of(parameter: torch.Tensor, key: str, piece: Piece, full: str) -> Any:
    if not full.startswith(TENSORS):
        return piece.tensor.item()
    if isinstance(parameter, ShardedParameter) and piece.shape == tuple(parameter.shape) and key not in SCALARS:
        return parameter.placed(piece.tensor)
    if isinstance(parameter, ShardedParameter) and piece.shape:
        return parameter.whole_beside(piece.tensor)
    return piece.tensor


def matched_groups(
    owned: Sequence[Owned], optimizer: torch.optim.Optimizer, saved: Sequence[Group]
) -> list[dict[str, Any]]:
    """New options of every group of ``optimizer``.

    Raises:
        ValueError: if its groups hold other parameters than the checkpoint's.
    """
    own_groups = groups_of(owned, optimizer)
    if len(own_groups) != len(saved):
        raise ValueError(f"the optimizer has {len(own_groups)} parameter groups, the checkpoint's had {len(saved)}")
    for number, (group, stored) in enumerate(zip(own_groups, saved)):
        strange = [name for name in group.names if name not in set(stored.names)]
        if strange:
            raise ValueError(
                f"{strange[0]!r} is in parameter group {number} of the optimizer, but was not when the checkpoint was "
                "saved: make the same groups in the same order"
            )
    return [{name: value for name, value in stored.options.items() if name not in IMPLEMENTATION} for stored in saved]


def put_groups(optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Give the groups their stored options."""
    for group, stored in zip(optimizer.param_groups, options):
        group.update(stored)
