"""Short names for modules of which a method uses several weights: ``attn = w.self_attn``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from passes.emit.paths import attribute
from passes.emit.roles import module_alias
from passes.emit.variable_names import RESERVED
from passes.shard import StateRef
from passes.shard.operations import Operation, used_by

#: A short name is worth a line if each use is shorter by so many characters.
_LEAST_SAVED = 6

#: Index of the root, path below it.
_Module = tuple[int | None, str]


class Aliases:
    """The short names of one method.

    Args:
        base_of: gives what the method calls the weights below a root.
        beside: names of its values, which are none of modules.
    """

    def __init__(
        self, operations: Iterable[Operation], base_of: Callable[[int | None], str], *, beside: Collection[str]
    ) -> None:
        self.base_of = base_of
        states = [local.state for operation in operations for local in used_by(operation) if local.state is not None]
        uses = Counter(map(_module_of, states))
        self.short: dict[_Module, str] = {}
        for (root, path), count in uses.items():
            alias = module_alias(path)
            saved = len(attribute(base_of(root), path)) - len(alias)
            if alias and count > 1 and saved >= _LEAST_SAVED and alias not in {*RESERVED, *beside}:
                self.short[root, path] = alias
        self.names = frozenset(self.short.values())
        self._bound: dict[str, _Module] = {}

    def introduce(self, states: Iterable[StateRef]) -> tuple[list[str], str]:
        """The lines that one statement with these states needs before it, and the first module with a short name.

        Of modules with the same short name the first has it in this statement; others are written in full.
        """
        lines, modules, taken = [], [], set[str]()
        for module in dict.fromkeys(map(_module_of, states)):
            alias = self.short.get(module)
            if alias is None or alias in taken:
                continue
            taken.add(alias)
            modules.append(module[1])
            if self._bound.get(alias) != module:
                self._bound[alias] = module
                lines.append(f"{alias} = {attribute(self.base_of(module[0]), module[1])}")
        return lines, next(iter(modules), "")

    def source_of(self, state: StateRef) -> str:
        """A state as source: by the short name of its module, if that stands for it now."""
        module = _module_of(state)
        alias = self.short.get(module)
        if alias is None or self._bound.get(alias) != module:
            return attribute(self.base_of(state.root), state.path)
        return attribute(alias, state.path[len(module[1]) + 1 :])


def _module_of(state: StateRef) -> _Module:
    """The module that the state's own module is in."""
    return state.root, ".".join(state.path.split(".")[:-2])
