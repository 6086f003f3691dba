"""Variable names of one emitted function: unique among what is still needed, never hiding what the source needs."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

from passes.shard import Local

#: Names that emitted source uses itself.
RESERVED = frozenset(
    (
        "torch", "F", "spmd", "ops", "kernels", "math", "I", "P", "R", "S", "V", "w", "self", "Block", "Program",
        "layer", "layers", "draw", "each",
    )
)  # fmt: skip
#: Names for values whose operator is called like a builtin.
_INSTEAD = {
    "abs": "magnitude", "all": "all_true", "any": "any_true", "max": "largest", "min": "smallest", "pow": "power",
    "round": "rounded", "slice": "part", "sum": "total",
}  # fmt: skip
#: In ASCII: Python takes some different letters for the same name.
_NOT_A_NAME = re.compile(r"\W+", re.ASCII)


class Names:
    """Gives out names; the same base gets a number from the second time on."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self.names_in_use = {*RESERVED, *reserved}

    def new(self, base: str) -> str:
        name = _free(base, self.names_in_use)
        self.names_in_use.add(name)
        return name


class Variables:
    """Names of local tensors; a name is given again where what it stood for is done with.

    ``last_use`` is the position of the last statement that reads each tensor; what is never read is not in it.
    """

    def __init__(self, reserved: Iterable[str], last_use: dict[Local, int]) -> None:
        self.reserved = {*RESERVED, *reserved}
        self.last_use = last_use
        self.names: dict[Local, str] = {}
        self._live: dict[Local, str] = {}

    def __getitem__(self, local: Local) -> str:
        return self.names[local]

    def __contains__(self, local: Local) -> bool:
        return local in self.names

    def bind(self, local: Local, base: str, position: int, *, beside: Iterable[str] = ()) -> str:
        """A name for what the statement at ``position`` assigns; not one of ``beside``."""
        if position >= 0 and local not in self.last_use:
            self.names[local] = "_"
            return "_"
        name = self.free(base, position, beside=beside)
        self.share(local, name)
        return name

    def free(self, base: str, position: int, *, beside: Iterable[str] = ()) -> str:
        """A name that no live value has."""
        return _free(base, self.reserved | self.live(position) | set(beside))

    def share(self, local: Local, name: str) -> None:
        """Let ``local`` have a name that stands for the same tensor, or is free."""
        self.names[local] = self._live[local] = name

    def live(self, position: int) -> set[str]:
        """Names of what statements behind ``position`` read; positions never go back."""
        self._live = {local: name for local, name in self._live.items() if self.last_use.get(local, -1) > position}
        return set(self._live.values())

    def is_done(self, local: Local, position: int) -> bool:
        """Whether nothing behind ``position`` reads what has the name of ``local``."""
        return self.names[local] not in self.live(position)


def _free(base: str, used_names: set[str]) -> str:
    base = identifier(base)
    name, number = base, 1
    while name in used_names:
        name, number = f"{base}_{number}", number + 1
    return name


def identifier(text: str) -> str:
    """``text`` as an identifier that hides no keyword and no builtin."""
    name = _NOT_A_NAME.sub("_", text).strip("_") or "value"
    if name[0].isdigit():
        name = f"value_{name}"
    name = _INSTEAD.get(name, name)
    if keyword.iskeyword(name) or hasattr(builtins, name):
        name += "_"
    return name


def class_name(text: str) -> str:
    """A class name for a block."""
    name = _NOT_A_NAME.sub("", text)
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"Block{name}"
