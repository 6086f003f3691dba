"""State of the inner and the outer optimizer as that of one, so that checkpoints of any plan store and resume both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from runtime.parameters import SCALARS, ShardedParameter

#: Before the keys of what the outer optimizer keeps of a parameter; an optimizer of its own may have a ``step``.
OUTER = "outer_"
WEIGHT, STEP = OUTER + "weight", OUTER + "num_inner_steps"


class JointState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """Parameter → state of both optimizers: keys of the outer one's begin with ``outer_``.

    Args:
        inner: the inner optimizer, asked at each use: loading replaces its state.
        outer: the outer optimizer, over whole copies of what this rank holds.
        copies: this rank's copy of a parameter, as the islands last agreed on it; None where it has none.
        steps: reads, or with a number sets, the count of inner steps.
        cleared: called when all state is dropped, as a checkpoint does that is loaded.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer,
        copies: Callable[[torch.Tensor], torch.Tensor | None],
        steps: Callable[[int | None], int],
        cleared: Callable[[], None],
    ) -> None:
        self._inner, self._outer, self._copies, self._steps = inner, outer, copies, steps
        self._cleared = cleared

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = dict(self._inner.state.get(parameter, {}))
        copy = self._copies(parameter)
        if copy is not None:
            state[WEIGHT], state[STEP] = _placed(parameter, WEIGHT, copy.detach()), self._steps(None)
            for key, value in self._outer.state.get(copy, {}).items():
                state[OUTER + key] = _placed(parameter, key, value)
        return state

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        copy = self._copies(parameter)
        if copy is not None:
            if WEIGHT not in state or STEP not in state:
                raise ValueError("the checkpoint was saved without an outer optimizer: load it into the inner one")
            with torch.no_grad():
                copy.copy_(_local(parameter, state[WEIGHT]))
            self._steps(int(state[STEP]))
            outer = {key.removeprefix(OUTER): value for key, value in state.items() if key.startswith(OUTER)}
            self._outer.state[copy] = {
                key: _local(parameter, value) for key, value in outer.items() if OUTER + key not in (WEIGHT, STEP)
            }
        self._inner.state[parameter] = {key: value for key, value in state.items() if not key.startswith(OUTER)}

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self._inner.state.pop(parameter, None)
        copy = self._copies(parameter)
        if copy is not None:
            self._outer.state.pop(copy, None)

    def clear(self) -> None:
        """Forget the state of both."""
        self._inner.state.clear()
        self._outer.state.clear()
        self._cleared()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self._inner.param_groups for parameter in group["params"])

    def __len__(self) -> int:
        return sum(len(group["params"]) for group in self._inner.param_groups)


def _placed(parameter: torch.Tensor, key: str, value: Any) -> Any:
    if isinstance(parameter, ShardedParameter) and isinstance(value, torch.Tensor) and key not in SCALARS:
        return parameter.placed(value)
    return value


def _local(parameter: torch.Tensor, value: Any) -> Any:
    return parameter.local(value) if isinstance(parameter, ShardedParameter) and isinstance(value, DTensor) else value
