"""The ranks of a generation: the first one decides, all others run what it announces."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch

from runtime.execution.engine import Engine
from runtime.generation.cache_layout import rows_divisor
from runtime.generation.phase_models import LAST, POSITION
from runtime.generation.phase_programs import PhasePrograms, Prompt
from runtime.mesh.first_rank import broadcast_objects, is_first_rank

#: Settings (rows, prompt, length) whose programs and caches are kept.
MAX_SETTINGS = 4


class GenerationSession:
    """What runs prompts, tokens and reorderings on every rank of an engine.

    Attributes:
        is_broken: whether a step failed, on all ranks alike: nothing more is announced then.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_broken = False
        #: Of the first rank: what its loop calls, and the key of the original's attributes that it was made with.
        self.generating: tuple[Hashable, Any] | None = None
        self._settings: OrderedDict[Hashable, PhasePrograms] = OrderedDict()
        self._current: PhasePrograms | None = None

    @property
    def is_first(self) -> bool:
        return is_first_rank(self.engine.places.device_mesh)

    @property
    def rows_divisor(self) -> int:
        """Number of ranks that rows are divided over."""
        assert self.engine.plan is not None
        return rows_divisor(self.engine.plan)

    @property
    def num_cache_bytes(self) -> int:
        """Bytes of the cache that generated last, on this rank."""
        parts = self._current.memory.parts.values() if self._current is not None else ()
        return sum(part.nbytes for part in parts)

    @property
    def is_checked(self) -> bool:
        """Whether the current programs have been held against each other. Of the first rank."""
        return self._current is not None and self._current.is_checked

    @is_checked.setter
    def is_checked(self, value: bool) -> None:
        assert self._current is not None
        self._current.is_checked = value

    def prompt(self, prompt: Prompt) -> torch.Tensor:
        """The logits [rows, 1, vocabulary] behind a prompt; the cache is filled. On the first rank."""
        return self._announced("prompt", prompt)  # type: ignore[no-any-return]

    def token(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The logits [rows, 1, vocabulary] behind one more token. On the first rank."""
        return self._announced("token", tensors)  # type: ignore[no-any-return]

    def reorder(self, rows: torch.Tensor) -> None:
        """Replace the rows of the cache, as a beam search does. On the first rank."""
        self._announced("reorder", rows)

    def end(self, result: Any) -> None:
        """Tell the other ranks what was generated."""
        self._send("end", result)

    def fail(self, error: Exception) -> None:
        """Tell the other ranks that the first one failed outside of what all run."""
        if not self.is_broken:
            self._send("fail", f"generate failed on the first rank: {type(error).__name__}: {error}")

    def follow(self) -> Any:
        """Run what the first rank announces; what it generated.

        Raises:
            ValueError: if it failed.
        """
        while True:
            message: list[Any] = [None]
            broadcast_objects(message, self.engine.places.device_mesh)
            verb, content = message[0]
            if verb == "end":
                return content
            if verb == "fail":
                raise ValueError(content)
            self._run(verb, content)

    def _announced(self, verb: str, content: Any) -> Any:
        self._send(verb, content)
        try:
            return self._run(verb, content)
        except Exception:
            self.is_broken = True
            raise

    def _send(self, verb: str, content: Any) -> None:
        if not self.engine.ranks.is_alone:
            broadcast_objects([(verb, content)], self.engine.places.device_mesh)

    def _run(self, verb: str, content: Any) -> Any:
        if verb == "prompt":
            self._current = self._setting(content)
            self._current.start()
            return self._current.run(LAST, content.tensors)
        assert self._current is not None
        return self._current.run(POSITION, content) if verb == "token" else self._current.reorder(content)

    def _setting(self, prompt: Prompt) -> PhasePrograms:
        self.engine.watch.update()
        key = prompt.key, self.engine.watch.key
        if key not in self._settings:
            while len(self._settings) >= MAX_SETTINGS:
                self._settings.popitem(last=False)
            self._settings[key] = self.engine.ranks.together(lambda: PhasePrograms(self.engine, prompt))
        self._settings.move_to_end(key)
        return self._settings[key]
