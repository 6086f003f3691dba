"""Calls of a parallel module that one rank may make alone; the others join in at their next call of any module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runtime.agreement.joinable_calls import JoinableCall, register
from runtime.execution.engine import Engine

#: Calls of every parallel module that can be joined → the method by which ranks join in.
METHODS = {
    "full_state_dict": "_full_state_dict",
    "save_pretrained": "_save_pretrained",
    "generate()": "_join_generation",
    "generate(gathered=True)": "_join_generation",
}


class JoinedCalls:
    """Goes before ``nn.Module`` among the bases of ``ParallelModule``."""

    _engine: Engine
    _joined: dict[str, Callable[..., Any]]

    def call_joined(self, name: str, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """``function(**arguments)``, once all other ranks make the same call, or join in with these arguments.

        They run what ``let_join`` was given for ``name``, or a method of ``METHODS``: it must do with the other ranks
        what ``function`` does.

        Raises:
            ValueError: if the other ranks have ended, and what ``function`` raises.
        """
        calls = self._engine.calls
        try:
            calls.check(f"calls {name}", joinable=JoinableCall(calls.number, name, arguments))
        except RuntimeError as error:
            raise ValueError(
                f"{name} takes all ranks, and others have ended: call it on all of them, or let them wait until it is "
                f"done (parallel.wait_for_ranks(), accelerator.wait_for_everyone()); {error}"
            ) from error
        return function(**arguments)

    def let_join(self, name: str, function: Callable[..., Any]) -> None:
        """Let this rank run ``function`` where another one makes the call ``name`` alone."""
        self._joined[name] = function

    def join(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Make a call with the ranks that make it; what it returns is dropped."""
        function = self._joined.get(name) or getattr(self, METHODS[name])
        function(**arguments)

    def wait_for_ranks(self) -> None:
        """Wait until all ranks of the mesh are here; meanwhile join in what one of them calls alone (a save, say)."""
        if not self._engine.waits:
            self._engine.calls.check("waits for all ranks")

    def _let_join_calls_of(self, engine: Engine) -> None:
        register(engine.calls.number, self)
