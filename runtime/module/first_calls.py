"""A parallel module that is planned at its first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from runtime.agreement.call_agreement import FORWARD
from runtime.execution.engine import Engine
from runtime.parameters import ParameterTree, ShardedParameter

#: The engine to run from the first call on, made from the one until then, what is called (``TRAIN_STEP``, ``FORWARD``)
#: and its arguments.
FirstCall = Callable[[Engine, str, tuple[Any, ...], dict[str, Any]], Engine]


class FirstCalls:
    """Goes before ``nn.Module`` among the bases of ``ParallelModule``."""

    _engine: Engine
    _tree: ParameterTree
    _first_call: FirstCall | None
    _when_planned: list[Callable[[], None]]
    _counted_as_trained: tuple[torch.Tensor, ...]
    _check: Callable[[], None]
    _hold: Callable[[Engine, Mapping[str, ShardedParameter]], None]

    def _plan_for(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, local_inputs: bool) -> None:
        """Plan for the first call, if that is when planning happens."""
        if self._first_call is None:
            return
        if local_inputs:
            raise ValueError(
                "local_inputs=True at the first call, which is planned for and says nothing of the global batch: pass "
                "that, or give example_inputs to planner.compile"
            )
        self._tree.take_gradients()
        self._check()
        paused = [one for one in self._counted_as_trained if not one.requires_grad]
        for parameter in paused:
            parameter.requires_grad_(True)
        try:
            engine = self._first_call(self._engine, verb, args, kwargs)
            self._first_call = None
            self._hold(engine, self._tree.shown())
        finally:
            for parameter in paused:
                parameter.requires_grad_(False)

    def plan_for(self, *args: Any, **kwargs: Any) -> None:
        """Plan now, if that is done at the first call, as a call of the module with these arguments would."""
        self._plan_for(FORWARD, args, kwargs, local_inputs=False)

    def count_as_trained(self) -> None:
        """Plan for training all parameters that are trained now, also where some are frozen during the first call.

        Scripts with several models freeze one while another one learns.
        """
        parameters = self._tree.shown().values()
        self._counted_as_trained = tuple(one for one in parameters if one.requires_grad)

    def when_planned(self, function: Callable[[], None]) -> None:
        """Call ``function`` once there is a plan, on all ranks: now, or at the end of the first call."""
        if self._engine.plan is not None:
            function()
        else:
            self._when_planned.append(function)

    def _settle(self) -> None:
        """At the end of a call that did not fail."""
        self._engine.calls.settle()
        waiting, self._when_planned = self._when_planned, []
        for function in waiting:
            function()
