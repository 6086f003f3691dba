"""Parameters that a script chose by their place in ``parameters()``, of which each stage of a pipeline has its own.

``list(parallel.parameters())[:-2]`` is all but the last layer on one device, and all but the last of each stage's where
a pipeline cuts the model. What a script meant cannot be known: the first ranks to find it say so.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from runtime.agreement.ranks_together import Ranks
from runtime.parameters.optimizer_steps import optimizers_of
from runtime.parameters.sharded import ShardedParameter

#: Calls of a module after which ranks tell each other what was chosen, until an optimizer has stepped.
_ASKED_AFTER = frozenset({1, 2, 4, 8, 16, 32, 64, 128})


class ChoicesByPlace:
    """Compares over the stages of a pipeline how optimizers and ``requires_grad`` divide the parameters.

    Args:
        names: of all parameters of the model, in its order.
    """

    def __init__(self, ranks: Ranks, names: Sequence[str]) -> None:
        self._ranks = ranks
        self._names = tuple(names)
        self._num_calls = 0
        self._is_done = False

    def compare(self, parameters: Mapping[str, ShardedParameter]) -> None:
        """Warn if every stage chose the same places of its parameters; all ranks must call it, before each call.

        Args:
            parameters: of this rank, by name.
        """
        self._num_calls += 1
        if self._is_done or self._num_calls - 1 not in _ASKED_AFTER:
            return
        optimizers = optimizers_of(parameters.values())
        told = self._ranks.gathered((bool(optimizers), choices(parameters, optimizers)))
        self._is_done = any(has_stepped for has_stepped, _ in told)
        if chose_by_place([chosen for _, chosen in told], self._names):
            self._is_done = True
            warnings.warn(
                "optimizer groups (or requires_grad) divide the parameters of each pipeline stage at the same places. "
                "If they were chosen by place (list(parallel.parameters())[:k]), that is not what they are on one "
                "device: a rank has the parameters of its own stage. Choose them by name, or before planner.compile, "
                "or let compile plan at the first call; if this is what you mean, ignore this warning",
                stacklevel=4,
            )


def choices(
    parameters: Mapping[str, ShardedParameter], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, tuple[Any, ...]]:
    """What was chosen for each parameter, by name: whether it trains, and the options of the groups that have it."""
    options: dict[int, list[str]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            plain = sorted((key, str(value)) for key, value in group.items() if key != "params")
            for parameter in group["params"]:
                options.setdefault(id(parameter), []).append(f"{type(optimizer).__name__}{plain}")
    return {
        name: (parameter.requires_grad, *sorted(options.get(id(parameter), ())))
        for name, parameter in parameters.items()
    }


def chose_by_place(stages: Sequence[Mapping[str, Any]], names: Sequence[str]) -> bool:
    """Whether several stages divide their parameters into runs at the same places, and the whole model is in none.

    A division of the whole model (a head apart, a learning rate by layer) gives each choice one run of it.

    Args:
        stages: of every rank, what was chosen for its parameters, by name.
        names: of all parameters, in the model's order.

    Example:
        >>> names = ["a", "b", "c", "d"]
        >>> chose_by_place([{"a": 1, "b": 2}, {"c": 1, "d": 2}], names)
        True
        >>> chose_by_place([{"a": 1, "b": 2}, {"c": 2, "d": 2}], names)
        False
    """
    whole: dict[str, Any] = {}
    for stage in stages:
        whole |= stage
    if _is_in_runs([whole[name] for name in names if name in whole]):
        return False
    own = {tuple(stage): [stage[name] for name in names if name in stage] for stage in stages}
    divided = [one for one in own.values() if len(set(one)) > 1]
    if len(divided) < 2 or not all(_is_in_runs(one) for one in divided):
        return False
    first, *others = ([len(list(run)) for _, run in groupby(one)] for one in divided)
    return all(one[:-1] == first[:-1] for one in others) or all(one[1:] == first[1:] for one in others)


def _is_in_runs(chosen: Sequence[Any]) -> bool:
    """Whether everything that was chosen was chosen for neighbours alone."""
    return len([key for key, _ in groupby(chosen)]) == len(set(chosen))
