"""State of an ordinary optimizer, ``torch.save(optimizer.state_dict())`` of one process, for the shards of any plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from runtime.agreement.ranks_together import gathered, together
from runtime.checkpoint.manager import Owner
from runtime.checkpoint.optimizer_state import (
    IMPLEMENTATION,
    NUMBERS,
    TENSORS,
    Group,
    RequestedState,
    concerns_whole,
    groups_of,
    merged_groups,
    put_groups,
    put_state,
)
from runtime.checkpoint.rectangles_of_tensors import Content, Piece
from runtime.parameters import local_of
from runtime.parameters.offloaded_optimizer import OffloadedOptimizer
from runtime.parameters.optimizer_steps import ELEMENTWISE
from runtime.state.owned import Owned
from runtime.weight_files import named_alike

#: What groups hold beside options.
_OF_PARAMETERS = ("params", "param_names")


def load_optimizer(
    parallel: Owner,
    optimizer: torch.optim.Optimizer,
    source: str | Path | Mapping[str, Any],
    *,
    names: Sequence[Sequence[str]] | None = None,
) -> None:
    """Give ``optimizer`` the state that a torch optimizer of the original model had; all ranks must call this together.

    Such state numbers parameters in the order in which the optimizer was given them, in each of its groups: here that
    of ``optimizer``. Where ranks have a pipeline's stage each, it is the order of ``model.parameters()``. Every tensor
    must have the shape of its parameter or of some of its dims, or be one number.

    Args:
        optimizer: over ``parallel.parameters()``, of the same class, with the same groups.
        source: ``optimizer.state_dict()``, or the path of a file that ``torch.save`` made of it. The file is read as
            tensors and plain data (``weights_only``), so nothing in it is run.
        names: of the parameters of each group in its order, where that is another one.

    Raises:
        ValueError: on all ranks, if the file cannot be read or is of another optimizer, other groups or another model,
            and under a pipeline if ``optimizer`` has parameters in another order than the model.
    """
    getattr(parallel, "plan", None)  # without one tensors are whole, and would not be cut with their state
    owned = named_alike(parallel.owned(), parallel.state_names)
    by_rank = gathered(together(lambda: groups_of(owned, optimizer)))
    own_groups = merged_groups(by_rank)

    def fitted() -> tuple[RequestedState, list[dict[str, Any]]]:
        state = _read(source) if isinstance(source, (str, Path)) else source
        _check_form(state)
        in_order = [list(group) for group in names] if names else _stock_order(by_rank, parallel.state_names)
        numbers = _numbers(state["param_groups"], in_order, own_groups)
        options = [
            {name: value for name, value in group.items() if name not in (*_OF_PARAMETERS, *IMPLEMENTATION)}
            for group in state["param_groups"]
        ]
        return _requested(owned, optimizer, state["state"], numbers), options

    requested, options = together(fitted)
    put_state(requested, optimizer)
    put_groups(optimizer, options)


def whole_optimizer_state(parallel: Owner, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The ``state_dict()`` that the optimizer would have on one process, on every rank; all must call this together.

    What ``load_optimizer`` reads: whole tensors, parameters numbered as the original model has them.
    """
    owned = named_alike(parallel.owned(), parallel.state_names)
    by_rank = gathered(groups_of(owned, optimizer))
    groups, in_order = merged_groups(by_rank), _stock_order(by_rank, parallel.state_names)
    names = {id(piece.tensor): piece.name for piece in owned}
    state = {
        names[id(local_of(parameter))]: {key: _whole(value) for key, value in entry.items()}
        for parameter, entry in optimizer.state.items()
    }
    held = gathered(sorted(state))
    if any(some != held[0] for some in held):  # stages of a pipeline
        state = {name: entry for part in gathered(state) for name, entry in part.items()}
    numbers = {name: number for number, name in enumerate(name for some in in_order for name in some)}
    return {
        "state": {numbers[name]: state[name] for name in sorted(state, key=lambda name: numbers[name])},
        "param_groups": [
            {**group.options, "params": [numbers[name] for name in some]} for group, some in zip(groups, in_order)
        ],
    }


def stock_order(parallel: Owner, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Names of the parameters of each group as an ordinary optimizer has them; all ranks must call this.

    Raises:
        ValueError: on all ranks, if it is not known: under a pipeline, of parameters in another order than the model's.
    """
    owned = named_alike(parallel.owned(), parallel.state_names)
    return _stock_order(gathered(groups_of(owned, optimizer)), parallel.state_names)


def _stock_order(by_rank: Sequence[Sequence[Group]], state_names: Sequence[str]) -> list[list[str]]:
    places = {name: place for place, name in enumerate(state_names)}
    order = []
    for number, parts in enumerate(zip(*by_rank, strict=True)):
        own = [list(part.names) for part in parts]
        longest = max(own, key=len)
        if all(names == [name for name in longest if name in set(names)] for names in own):
            order.append(longest)  # of a number, some ranks have nothing
            continue
        if any(names != sorted(names, key=places.__getitem__) for names in own):
            raise ValueError(
                f"parameter group {number} has its parameters in another order than the model, and each rank has those "
                "of its stage alone: say by names= in which order an ordinary optimizer has them"
            )
        order.append(sorted({name for names in own for name in names}, key=places.__getitem__))
    return order


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _read(path: str | Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # unpickling raises whatever it likes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} is not a file of tensors and plain data as torch.save(optimizer.state_dict(), path) makes one: "
            f"{reason}"
        ) from error


def _check_form(state: Any) -> None:
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping) or "param_groups" not in state:
        holds = f"a mapping of {sorted(map(str, state))[:8]}" if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"an optimizer's state_dict() is a mapping of 'param_groups' and 'state', this is {holds}: give the part "
            "of it that is the optimizer's"
        )


def _numbers(
    saved: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], own: Sequence[Group]
) -> dict[str, Any]:
    """The number of every parameter in the saved state, by name.

    Raises:
        ValueError: if the groups are others.
    """
    if not len(saved) == len(names) == len(own):
        raise ValueError(
            f"the saved optimizer has {len(saved)} parameter groups, this one has {len(own)}: make the same groups"
            + (f" (names= is of {len(names)})" if len(names) != len(own) else "")
        )
    numbers: dict[str, Any] = {}
    for place, (group, of_group, own_group) in enumerate(zip(saved, names, own)):
        _check_options(group, own_group.options, place)
        of_saved = group.get("param_names") or of_group
        if len(of_saved) != len(group["params"]) or set(of_saved) != set(own_group.names):
            raise ValueError(
                f"parameter group {place} of the saved optimizer has {len(group['params'])} parameters, this one's has "
                f"{len(own_group.names)} ({', '.join(own_group.names[:3])}, …): make the same groups of the same "
                "parameters (frozen ones too, if those were in it), or say by names= which they are"
            )
        numbers.update(zip(of_saved, group["params"]))
    return numbers


def _check_options(saved: Mapping[str, Any], own: Mapping[str, Any], place: int) -> None:
    def rates(options: Mapping[str, Any]) -> set[str]:
        """Options that are numbers: an optimizer has its own, and versions of torch add flags alone."""
        return {name for name, value in options.items() if isinstance(value, (float, tuple)) and name != "initial_lr"}

    lacking, strange = sorted(rates(own) - set(saved)), sorted(rates(saved) - set(own))
    if lacking or strange:
        raise ValueError(
            f"the saved state is of another optimizer: its parameter group {place} has "
            + " and ".join(
                [*(f"no {name!r}" for name in lacking), *(f"{name!r}, which this has not" for name in strange)]
            )
        )


def _requested(
    owned: Sequence[Owned], optimizer: torch.optim.Optimizer, states: Mapping[Any, Any], numbers: Mapping[str, Any]
) -> RequestedState:
    """This rank's rectangles of the state, and where they go.

    Raises:
        ValueError: for a tensor that is neither of its parameter's shape, nor of some of its dims, nor a number.
    """
    owners = {id(piece.tensor): piece for piece in owned}
    has_statistics = type(optimizer) not in (*ELEMENTWISE, OffloadedOptimizer)
    content: Content = {}
    by_parameter: dict[torch.Tensor, dict[str, str]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = owners.get(id(local_of(parameter)))
            if owner is None:
                continue
            for key, value in states.get(numbers[owner.name], {}).items():
                if value is None:
                    continue
                full = f"{TENSORS if isinstance(value, torch.Tensor) else NUMBERS}{owner.name}/{key}"
                content[full] = _piece(key, torch.as_tensor(value), owner, group, has_statistics=has_statistics)
                by_parameter.setdefault(parameter, {})[key] = full
    return RequestedState(content, by_parameter)


def _piece(key: str, value: torch.Tensor, owner: Owned, group: Mapping[str, Any], *, has_statistics: bool) -> Piece:
    own = owner.tensor
    # As torch does when it loads: in the dtype of the parameter.
    dtype = own.dtype if own.is_floating_point() and value.is_floating_point() else value.dtype
    if tuple(value.shape) == owner.shape and key != "step":
        part = value[tuple(slice(at, at + size) for at, size in zip(owner.offsets, own.shape))]
        return Piece(torch.empty_like(own, dtype=dtype).copy_(part), owner.shape, owner.offsets)
    if has_statistics and value.dim() and key != "step" and concerns_whole(value, owner.shape):  # every rank has all
        return Piece(value.to(own.device, dtype, copy=True), tuple(value.shape), (0,) * value.dim())
    if value.numel() != 1:
        raise ValueError(
            f"the saved {key!r} of {owner.name!r} has shape {list(value.shape)}, the parameter {list(owner.shape)}: it "
            "is of another model, or its optimizer was given the parameters in another order (say it by names=)"
        )
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return Piece(value.reshape(()).clone().to(own.device if on_device else "cpu"), (), ())
