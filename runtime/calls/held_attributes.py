"""Attributes of a model's modules that are neither numbers nor weights: with other ones another program is made.

Tensors, arrays, containers, objects that are called. The engine traces a copy of the model, which has containers of its
own and shares the tensors.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes.capture.state_holders import NOTES_OF_LIBRARIES
from passes.torch_compat.module_tables import tensors_of
from runtime.calls.held_values import Held, held
from runtime.torch_compat.host_state import dict_version

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ABSENT = object()
_CONTAINERS = (list, tuple, dict, set, deque)
#: Whether an attribute of a module of this class may be read by the code of the model.
IsRead = Callable[[type, str], bool]


@dataclass
class _Holder:
    """A module that is looked at.

    Attributes:
        first: what its attributes held when the model was compiled.
        now: as last seen.
        version: changes whenever an attribute is set.
    """

    path: str
    module: weakref.ref[nn.Module]
    first: dict[str, Held]
    now: dict[str, Held]
    version: Any

    @property
    def changes_inside(self) -> bool:
        return any(not content.is_fixed for content in self.now.values())


class HeldAttributes:
    """Keeps ``copy`` in step with what attributes of ``model`` hold.

    Args:
        is_read: attributes for which it is False are not looked at.

    Attributes:
        changed: by module path and attribute what is held now and was not at first; None for what is gone.
    """

    def __init__(self, model: nn.Module, copy: nn.Module, is_read: IsRead) -> None:
        self.changed: dict[tuple[str, str], Held | None] = {}
        self._copy = copy
        self._is_read = is_read
        self._holders = list(self._look(model))
        self._holders_of_copy: list[_Holder] = []

    def watch_original_of(self, before: HeldAttributes) -> None:
        """Look at the original that ``before`` looked at: the copy was made from its copy."""
        self._holders, self.changed = before._holders, dict(before.changed)

    def look_at_copy(self) -> None:
        """Look at what is put into the copy's containers from now on."""
        if not self._holders_of_copy:
            self._holders_of_copy = [holder for holder in self._look(self._copy) if holder.now]

    def follows(self, path: str, name: str) -> bool:
        """Whether an attribute of a module is looked at."""
        return (path, name) in self.changed or any(
            name in holder.now for holder in self._holders if holder.path == path
        )

    @property
    def key(self) -> Hashable:
        """A key that is equal as long as what is held is the same."""
        return tuple(self.changed.items())

    @property
    def differences(self) -> list[str]:
        """What is held instead of what was at first, in words that are the same in every process."""
        return [
            f"{path + '.' if path else ''}{name}={content.words if content else 'nothing'}"
            for (path, name), content in self.changed.items()
        ]

    def update(self) -> None:
        """Take up what was put in the place of what was there at the last call."""
        for holder in self._holders:
            module = holder.module()
            if module is not None:
                for name in self._changed_in(holder, module):
                    self._bring_over(name, vars(module), vars(self._copy.get_submodule(holder.path)))
        for holder in self._holders_of_copy:
            module = holder.module()
            if module is not None:
                self._changed_in(holder, module)

    def _bring_over(self, name: str, attributes: dict[str, Any], own: dict[str, Any]) -> None:
        if name in attributes:
            brought_over = _BroughtOver(self._counterparts())
            own[name] = brought_over.of(own.get(name, _ABSENT), attributes[name])
        else:
            own.pop(name, None)

    def _counterparts(self) -> dict[int, Any]:
        """Modules, parameters and buffers of the copy, by the ids of the original's."""
        pairs = [(holder.module(), self._copy.get_submodule(holder.path)) for holder in self._holders]
        counterparts: dict[int, Any] = {}
        for module, own in pairs:
            if module is not None:
                weights = tensors_of(own)
                counterparts |= {id(one): weights.get(name) for name, one in tensors_of(module).items()}
                counterparts[id(module)] = own
        counterparts.pop(id(None), None)
        return counterparts

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
            content = self._held(module)
            yield _Holder(path, weakref.ref(module), content, content, dict_version(vars(module)))

    def _held(self, module: nn.Module) -> dict[str, Held]:
        attributes, kind = vars(module), type(module)
        names = sorted(attributes.keys() - _OF_EVERY_MODULE - NOTES_OF_LIBRARIES)
        contents = {
            name: held(attributes[name], in_objects=True, plain=isinstance(attributes[name], _CONTAINERS))
            for name in names
            if self._is_read(kind, name)
        }
        return {name: content for name, content in contents.items() if content is not None}


class _BroughtOver:
    """What the copy of a model holds in the place of what the model does.

    Args:
        counterparts: modules, parameters and buffers of the copy, by the ids of the model's.
    """

    def __init__(self, counterparts: Mapping[int, Any]) -> None:
        self._counterparts = counterparts

    def of(self, own: Any, value: Any) -> Any:
        """``value`` with the copy's own modules, weights, containers and objects; ``own`` is what the copy has now."""
        if own is value:
            return own
        if id(value) in self._counterparts:
            return self._counterparts[id(value)]
        if isinstance(value, set):
            return set(value)
        if type(value) in (list, tuple, deque):
            before = list(own) if type(own) is type(value) else []
            pairs = itertools.zip_longest(before[: len(value)], value, fillvalue=_ABSENT)
            return type(value)([self.of(old, entry) for old, entry in pairs])
        if type(value) in (dict, OrderedDict):
            table = own if isinstance(own, dict) else {}
            keys = [self._counterparts.get(id(key), key) for key in value]
            return type(value)(
                (key, self.of(table.get(key, _ABSENT), entry)) for key, entry in zip(keys, value.values())
            )
        if type(own) is not type(value) or not _is_object(value):
            return value
        for name, entry in vars(value).items():
            vars(own)[name] = self.of(vars(own).get(name, _ABSENT), entry)
        return own


def _is_object(value: Any) -> bool:
    """Whether what a value is lies in its attributes."""
    is_other = isinstance(
        value, (nn.Module, torch.Tensor, type, types.FunctionType, types.MethodType, functools.partial, dict)
    )
    return not is_other and isinstance(getattr(value, "__dict__", None), dict)
