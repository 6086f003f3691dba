"""Attributes of a model's modules that hold tensors beside parameters and buffers: another tensor is another program.

The engine traces a copy of the model, which has containers of its own and shares the tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from passes.capture.state_holders import NOTES_OF_LIBRARIES
from runtime.calls.tensor_serials import Serials, serials
from runtime.torch_compat.host_state import dict_version

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass
class _Holder:
    """A module that is looked at.

    Attributes:
        first: its tensors by attribute when the model was compiled.
        now: as last seen.
        version: changes whenever an attribute is set.
    """

    path: str
    module: weakref.ref[nn.Module]
    first: dict[str, Serials]
    now: dict[str, Serials]
    version: Any

    @property
    def changes_inside(self) -> bool:
        return any(not held.is_of_one for held in self.now.values())


class HeldAttributes:
    """Keeps ``copy`` in step with the tensors that attributes of ``model`` hold.

    Args:
        written: names of attributes that the model's own code sets, which are not looked at.

    Attributes:
        changed: module path and attribute of what is held now and was not at first; None for what is gone.
    """

    def __init__(self, model: nn.Module, copy: nn.Module, written: Collection[str]) -> None:
        self.changed: dict[tuple[str, str], Serials | None] = {}
        self._copy = copy
        self._written = frozenset(written) | NOTES_OF_LIBRARIES | _OF_EVERY_MODULE
        self._holders = list(self._look(model))
        self._holders_of_copy: list[_Holder] = []

    def watch_original_of(self, before: HeldAttributes) -> None:
        """Look at the original that ``before`` looked at: the copy was made from its copy."""
        self._holders, self.changed = before._holders, dict(before.changed)

    def look_at_copy(self) -> None:
        """Look at what is put into the copy's containers from now on."""
        if not self._holders_of_copy:
            self._holders_of_copy = [holder for holder in self._look(self._copy) if holder.now]

    @property
    def key(self) -> Hashable:
        """A key that is equal as long as the tensors are the same."""
        return tuple(self.changed.items())

    @property
    def differences(self) -> list[str]:
        """What is held instead of what was at first, in words that are the same in every process."""
        return [
            f"{path + '.' if path else ''}{name}={held.words if held else 'nothing'}"
            for (path, name), held in self.changed.items()
        ]

    def update(self) -> None:
        """Take up what was put in the place of what was there at the last call."""
        for holder in self._holders:
            module = holder.module()
            if module is not None:
                for name in self._changed_in(holder, module):
                    target = self._copy.get_submodule(holder.path)
                    if name in vars(module):
                        vars(target)[name] = _own_containers(vars(module)[name])
                    else:
                        vars(target).pop(name, None)
        for holder in self._holders_of_copy:
            module = holder.module()
            if module is not None:
                self._changed_in(holder, module)

    def _changed_in(self, holder: _Holder, module: nn.Module) -> list[str]:
        version = dict_version(vars(module))
        if version == holder.version and not holder.changes_inside:
            return []
        before, now = holder.now, self._held(module)
        holder.version, holder.now = version, now
        names = [name for name in (*now, *(before.keys() - now.keys())) if now.get(name) != before.get(name)]
        for name in names:
            place = (holder.path, name)
            self.changed[place] = now.get(name)
            if now.get(name) == holder.first.get(name):
                del self.changed[place]
        return names

    def _look(self, model: nn.Module) -> Iterator[_Holder]:
        for path, module in model.named_modules():
            held = self._held(module)
            yield _Holder(path, weakref.ref(module), held, held, dict_version(vars(module)))

    def _held(self, module: nn.Module) -> dict[str, Serials]:
        attributes = vars(module)
        found = {name: serials(attributes[name], in_objects=True) for name in attributes.keys() - self._written}
        return {name: held for name, held in sorted(found.items()) if held is not None}


def _own_containers(value: Any) -> Any:
    """``value`` with lists and dicts of its own."""
    if type(value) in (list, tuple):
        return type(value)(map(_own_containers, value))
    return {key: _own_containers(entry) for key, entry in value.items()} if type(value) is dict else value
