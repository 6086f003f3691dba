"""Whole weights and gradients of a parallel module, under the original names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from runtime.execution.engine import Engine
from runtime.mesh.first_rank import FirstRanksState, broadcast_objects
from runtime.module.extra_state import extra_states, take_extra_states
from runtime.parameters import ParameterTree


class WholeState:
    """A base of ``ParallelModule``."""

    _engine: Engine
    _tree: ParameterTree
    call_joined: Callable[..., Any]
    weights_changed: Callable[[], None]

    def full_state_dict(self, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """The original's state dict, with whole tensors, on every rank.

        All ranks must call it, or come to another call, where they join in.

        Args:
            names: of the tensors to gather; None for all.
        """
        state: dict[str, torch.Tensor] = self.call_joined("full_state_dict", self._full_state_dict, names=names)
        return state

    def _full_state_dict(self, names: Collection[str] | None) -> dict[str, torch.Tensor]:
        return self._engine.state.full_state_dict(names) | extra_states(self._engine.model, names)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Take this rank's part of a state dict of the original model (all ranks must call it).

        The first rank's values count, as those of the model do in ``planner.compile``: others may pass ``{}``.

        Raises:
            ValueError: on all ranks, for a tensor of another shape, or a shard; with ``strict`` also for missing and
                unknown names.
        """
        self._engine.calls.check(f"calls load_full_state_dict(strict={strict})")
        places, is_alone = self._engine.places, self._engine.ranks.is_alone
        share = None if is_alone else partial(broadcast_objects, device_mesh=places.device_mesh)
        state = take_extra_states(self._engine.model, state, share=share)
        if not is_alone:
            state = FirstRanksState(state, places.device_mesh, self._engine.layout.device, self._engine.ranks)
        self._engine.state.load_full_state_dict(state, strict=strict)
        self.weights_changed()

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients by parameter name, on every rank (all ranks must call it)."""
        self._engine.calls.together(self._tree.take_gradients)
        self._engine.calls.check("calls full_gradients")
        return self._engine.state.full_gradients()
