"""The plain tensors of a parameter's optimizer state, kept from one step to the next."""

from __future__ import annotations

from operator import is_
from typing import Any

from runtime.torch_compat.dtensors import local_parts


class LentState:
    """What a step was lent of a parameter's state, to be lent again while it is the same: tensors are updated in place.

    It lies with a DTensor of that state, and goes with it.

    Args:
        local: the state with plain tensors.
        spec: how the parameter is placed.
    """

    def __init__(self, local: dict[str, Any], spec: Any) -> None:
        self.local, self._spec = local, spec
        self._values = tuple(local.values())

    def is_of(self, entry: dict[str, Any], spec: Any) -> bool:
        """Whether ``entry`` shows these tensors, and the parameter is still placed as ``spec`` was."""
        return (
            spec is self._spec
            and entry.keys() == self.local.keys()
            and all(map(is_, local_parts(entry.values()), self._values))
        )

    def is_unchanged(self) -> bool:
        """Whether the step has put nothing else in the place of these tensors, and added none."""
        return len(self.local) == len(self._values) and all(map(is_, self.local.values(), self._values))
