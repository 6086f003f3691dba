"""Optimizers on parameters of a parallel module: at full speed, and not on those of the model it was made from.

PyTorch lets everyone see every optimizer's step (``register_optimizer_step_pre_hook``). Optimizers that work element by
element are given the plain tensors for the length of a step: what they compute is the same, without DTensor's cost for
every operator.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as hooks
from torch.utils.weak import WeakTensorKeyDictionary

from runtime import kernels
from runtime.parameters.lent_state import LentState
from runtime.parameters.saved_parts import refuse_parts_of_others
from runtime.parameters.sharded import SCALARS, ShardedParameter
from runtime.parameters.tensors import ParameterTensor
from runtime.torch_compat.dtensors import has_step_hooks, local_part, local_parts, spec_of
from runtime.torch_compat.optimizer_loads import watch_loads

#: Each element of a parameter is updated from that element of its gradient and state, and from numbers.
ELEMENTWISE = frozenset(
    {
        kernels.AdamW,
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    }
)


@dataclass(frozen=True)
class _Loan:
    """What an optimizer holds outside of a step: its groups' lists, its state, and its parameters.

    Attributes:
        again: by parameters' identities, what it was lent before and is lent again.
    """

    lists: tuple[list[torch.Tensor], ...]
    state: defaultdict[torch.Tensor, Any]
    parameters: tuple[ShardedParameter, ...]
    again: dict[int, LentState]


#: Optimizers that have stepped on parameters of parallel modules.
_stepped: WeakSet[torch.optim.Optimizer] = WeakSet()
_loans: WeakKeyDictionary[torch.optim.Optimizer, _Loan] = WeakKeyDictionary()
#: Parameters of models that parallel modules were made from, with their names.
_originals = WeakTensorKeyDictionary()


def remember_originals(model: nn.Module) -> None:
    """Let optimizers that hold the parameters of ``model`` refuse to step while those have no gradients."""
    _watch_optimizers()
    for name, parameter in model.named_parameters():
        _originals[parameter] = name


def optimizers_of(parameters: Collection[ShardedParameter]) -> list[torch.optim.Optimizer]:
    """Optimizers that have stepped and hold any of ``parameters``."""
    identities = set(map(id, parameters))
    return [one for one in _stepped if any(id(parameter) in identities for parameter in _parameters_of(one))]


@functools.cache
def _watch_optimizers() -> None:
    hooks.register_optimizer_step_pre_hook(_before_step)
    hooks.register_optimizer_step_post_hook(_after_step)
    watch_loads(_before_load)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _give_back(optimizer)  # after a step that failed
    if any(isinstance(parameter, ShardedParameter) for parameter in _parameters_of(optimizer)):
        _stepped.add(optimizer)
    _refuse_stale(optimizer)
    follow_plan(optimizer)
    _refuse_originals(optimizer)
    _refuse_flattening(optimizer)
    _refuse_state_on_device(optimizer)
    if _is_elementwise(optimizer, args, kwargs):
        _lend(optimizer)


def _before_load(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Refuse state that another rank saved, before it is cast and moved, which leaves no trace of that."""
    parameters = list(_parameters_of(optimizer))
    sharded = [one for one in parameters if isinstance(one, ShardedParameter)]
    if not sharded:
        return
    numbers = [number for group in state_dict.get("param_groups", ()) for number in group["params"]]
    paths = {number: getattr(one, "path", number) for number, one in zip(numbers, parameters)}
    named = (
        (f"{key!r} of {paths.get(number, number)!r}", value)
        for number, entry in state_dict.get("state", {}).items()
        if isinstance(entry, Mapping)
        for key, value in entry.items()
    )
    refuse_parts_of_others(named, of_stage=any(one.of_stage for one in sharded))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _give_back(optimizer)


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def follow_plan(optimizer: Any) -> None:
    """Let go of what a plan, made after the optimizer, gave to other ranks, and cut state as the plan cuts parameters.

    State that an optimizer had before there was a plan is of whole parameters.

    Args:
        optimizer: or what has ``param_groups`` and ``state`` like one.
    """
    for group in optimizer.param_groups:
        others = [one for one in group["params"] if isinstance(one, ShardedParameter) and one.of_another_rank]
        if others:
            identities = set(map(id, others))
            group["params"] = [one for one in group["params"] if id(one) not in identities]
        for parameter in others:
            optimizer.state.pop(parameter, None)
        for parameter in group["params"]:
            if isinstance(parameter, ShardedParameter) and parameter.placed_anew:
                _cut_state(parameter, optimizer.state.get(parameter, {}))


def _cut_state(parameter: ShardedParameter, entry: dict[str, Any]) -> None:
    for key, value in entry.items():
        is_like = isinstance(value, DTensor) and value.shape == parameter.shape
        if is_like and value.device_mesh is not parameter.device_mesh:
            entry[key] = parameter.placed(parameter.local(value))


def _refuse_stale(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer that was not handed to ``replan``, which gave its parameters to other ranks."""
    for parameter in _parameters_of(optimizer):
        if isinstance(parameter, ShardedParameter) and parameter.left_by_replan:
            raise ValueError(
                f"this {type(optimizer).__name__} holds {parameter.path!r}, which a replan gave to another rank: hand "
                "the optimizer to parallel.replan(target, optimizer), or make it again from parallel.parameters()"
            )


def _refuse_originals(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to train the model that a parallel module was made from in its place.

    Raises:
        ValueError: if the optimizer holds parameters of such a model, and nothing that it holds has a gradient.
    """
    name = None
    for parameter in _parameters_of(optimizer):
        if parameter.grad is not None:
            return
        name = name or _originals.get(parameter)
    if name is not None:
        raise ValueError(
            f"this {type(optimizer).__name__} holds the parameters of the model that was given to planner.compile "
            f"({name!r} and others), which the parallel module does not train: make it after compile from "
            "parallel.parameters(), or hand it to planner.compile(..., optimizer=optimizer)"
        )


def _refuse_flattening(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for LBFGS, which makes one vector of all parameters."""
    sharded = any(isinstance(parameter, ShardedParameter) for parameter in _parameters_of(optimizer))
    if sharded and isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS makes one vector of all parameters, which shards of several ranks and layouts do not form: use an "
            "optimizer that updates each parameter for itself (AdamW, SGD, Adafactor, Muon, …)"
        )


def _refuse_state_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer that would keep its state on the device where the plan has it on the host."""
    if getattr(optimizer, "keeps_state_on_host", False):
        return
    if any(isinstance(one, ShardedParameter) and one.state_on_host for one in _parameters_of(optimizer)):
        raise ValueError(
            f"the plan has optimizer state in the host's memory, and this {type(optimizer).__name__} keeps it on the "
            "device: step planner.OffloadedOptimizer(optimizer) in its place, or plan without offload"
        )


def _is_elementwise(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> bool:
    """Whether nobody can tell the plain tensors from the DTensors during this step."""
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    return (
        type(optimizer) in ELEMENTWISE
        and closure is None
        and not torch.compiler.is_compiling()
        and not any(group.get("differentiable") for group in optimizer.param_groups)
        and not has_step_hooks(optimizer, of_all=1)
    )


def _lend(optimizer: torch.optim.Optimizer) -> None:
    """Put plain tensors in the place of parameters and their state."""
    parameters = tuple(one for one in _parameters_of(optimizer) if isinstance(one, ShardedParameter))
    if not parameters:
        return
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    again: dict[int, LentState] = {}
    for parameter in parameters:
        entry = optimizer.state.get(parameter)
        if not entry:
            continue
        lent = _lent_before(entry, parameter)
        if lent is not None:
            again[id(parameter)] = lent
            state[parameter.owner] = lent.local
        elif _is_placed_alike(entry, parameter):
            state[parameter.owner] = dict(zip(entry, local_parts(entry.values())))
        else:
            return
    for parameter in parameters:
        parameter.take_gradient()
    state.update((key, entry) for key, entry in optimizer.state.items() if not isinstance(key, ShardedParameter))
    lists = tuple(group["params"] for group in optimizer.param_groups)
    _loans[optimizer] = _Loan(lists, optimizer.state, parameters, again)
    optimizer.state = state
    for group in optimizer.param_groups:
        group["params"] = [one.owner if isinstance(one, ShardedParameter) else one for one in group["params"]]


def _lent_before(entry: dict[str, Any], parameter: ShardedParameter) -> LentState | None:
    """The entry with plain tensors, as an earlier step left it; None if it has changed since."""
    for value in entry.values():
        if isinstance(value, ParameterTensor):
            lent = value.lent
            return lent if lent is not None and lent.is_of(entry, spec_of(parameter)) else None
    return None


def _is_placed_alike(entry: dict[str, Any], parameter: ShardedParameter) -> bool:
    return all(
        spec_of(value).placements == spec_of(parameter).placements and value.shape == parameter.shape
        for value in entry.values()
        if isinstance(value, DTensor)
    )


def _give_back(optimizer: torch.optim.Optimizer) -> None:
    """Put the DTensors back, with the state that the step has made or changed."""
    loan = _loans.pop(optimizer, None)
    if loan is None:
        return
    lent = optimizer.state
    for group, parameters in zip(optimizer.param_groups, loan.lists):
        group["params"] = parameters
    optimizer.state = loan.state
    for parameter in loan.parameters:
        entry = lent.pop(parameter.owner, None)
        before = loan.again.get(id(parameter))
        if entry is not None and not (before is not None and entry is before.local and before.is_unchanged()):
            _show(loan.state[parameter], entry, parameter)
    loan.state.update(lent)


def _show(shown: dict[str, Any], entry: dict[str, Any], parameter: ShardedParameter) -> None:
    """Let a parameter's state be what a step has left in ``entry``."""
    updated = {key: _as_dtensor(parameter, key, value, shown.get(key)) for key, value in entry.items()}
    shown.clear()
    shown.update(updated)
    holder = next((value for value in shown.values() if isinstance(value, ParameterTensor)), None)
    if holder is not None:
        holder.lent = LentState(entry, spec_of(parameter))


def _as_dtensor(parameter: ShardedParameter, key: str, value: Any, before: Any) -> Any:
    if not isinstance(value, torch.Tensor) or key in SCALARS:
        return value
    if isinstance(before, DTensor) and local_part(before) is value:
        return before
    return parameter.placed(value)
