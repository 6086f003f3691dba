"""Attributes of the original model that change after it was compiled: its programs were traced with the old ones.

The engine traces a copy of the model without data. A number, a string or a flag that is set on the original's modules,
or on plain objects that they hold (a config), is set on the copy too, and the next call is traced with it; so are
tensors, arrays and containers (``held_attributes``). Other changes are announced. The original is looked at as long as
somebody else holds it. Methods that are called by way of the parallel module run on the copy: from the first one on,
what they set there counts as well.

What trains, and which submodules are in which mode, is the parallel module's own: it is refused on the original, where
it would change nothing. The whole original may be frozen or put into another mode (to be a teacher, or compared with).
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from passes.torch_compat.module_tables import HOOKS
from runtime.calls.held_attributes import HeldAttributes
from runtime.calls.held_values import held
from runtime.calls.modes import other_modes
from runtime.calls.surroundings import Surroundings, in_words
from runtime.torch_compat.host_state import dict_version

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
CONTAINERS = (list, dict, set)
_COMPARED = (*_PLAIN, *CONTAINERS)
#: What every module has; modes and tensors are the parallel module's own.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

#: Module path, attribute of the module, attribute of the object that stands there ("" for the attribute itself).
Place = tuple[str, str, str]


@dataclass
class _Owner:
    """Something with attributes: a module, or a plain object that a module holds."""

    path: str
    attribute: str
    reference: Callable[[], Any]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    num_hooks: int
    #: Changes whenever an attribute is set.
    version: Any
    #: Whether the value may change without a new version.
    changes_inside: bool


class ModelWatch:
    """Keeps ``copy`` in step with the plain attributes of ``model``.

    Args:
        loss_fn: what computes the loss, whose code is looked at, too.

    Attributes:
        changed: plain attributes that are other than when the model was compiled.
        other_modes: paths of submodules of ``copy`` whose training mode is not its root's.
        frozen: names of parameters that no longer train, of those that the plan trains.
    """

    def __init__(self, model: nn.Module, copy: nn.Module, *, loss_fn: Callable[..., Any] | None = None) -> None:
        self.changed: dict[Place, Any] = {}
        self.other_modes = other_modes(copy)
        self.frozen: tuple[str, ...] = ()
        self._copy = copy
        self._root = weakref.ref(model)
        self._first: dict[Place, Any] = {}
        self._announced: set[Place] = set()
        self._owners = list(_owners(model))
        # What users reach as attributes of the parallel module (its config).
        self._settings = list(_settings(copy, ""))
        self._owners_of_copy: list[_Owner] = []
        self._num_handles = RemovableHandle.next_id
        self._parameters = [weakref.ref(parameter) for parameter in model.parameters()]
        self._trained: list[bool | None] = [parameter.requires_grad for parameter in model.parameters()]
        self._trained_first = self._trained
        self._modes_first = self.other_modes
        self._original_modes: tuple[str, ...] | None = None
        self._surroundings = Surroundings(model, loss_fn)
        self._held = HeldAttributes(model, copy, self._surroundings.may_read)

    def watch_original_of(self, before: ModelWatch) -> None:
        """Look at the original that ``before`` looked at: the copy was made from its copy."""
        self._root, self._owners = before._root, before._owners
        self._num_handles, self._announced = before._num_handles, before._announced
        self._held.watch_original_of(before._held)
        self._surroundings.continue_from(before._surroundings)
        self._parameters, self._trained = before._parameters, before._trained
        self._trained_first, self._modes_first = before._trained_first, before._modes_first

    def look_at_copy(self) -> None:
        """Take up what is set on the copy from now on: a method of it is called, or a container handed out."""
        self._held.look_at_copy()
        if not self._owners_of_copy:
            self._owners_of_copy = [owner for owner in _owners(self._copy) if owner.path or not owner.attribute]

    @property
    def key(self) -> Hashable:
        """A key that is equal as long as programs traced with the copy stay the same."""
        attributes = tuple((place, type(value), held(value) or repr(value)) for place, value in self.changed.items())
        return attributes, self.other_modes, self._surroundings.key, self._held.key

    @property
    def other_values(self) -> list[str]:
        """Attributes and what is around the code that have changed, in words that are the same in every process."""
        attributes = [f"{'.'.join(filter(None, place))}={value!r}" for place, value in self.changed.items()]
        around = [f"{name}={in_words(value)}" for name, value in sorted(self._surroundings.changed.items())]
        return [*attributes, *self._held.differences, *around]

    @property
    def differences(self) -> list[str]:
        """The changes since the model was compiled, in words that are the same in every process."""
        modes = [f"{path!r} in the other mode" for path in self.other_modes]
        return [*self.other_values, *modes, *(f"{name!r} frozen" for name in self.frozen)]

    @contextmanager
    def unwritten(self) -> Iterator[None]:
        """Undo what ``forward`` itself sets on the copy's settings while it is traced: not every rank traces."""
        settings = [(vars(owner.reference()), dict(vars(owner.reference()))) for owner in self._settings]
        try:
            yield
        finally:
            for attributes, before in settings:
                if attributes != before:
                    attributes.clear()
                    attributes.update(before)

    def update(self) -> None:
        """Take up what changed since the last call."""
        self._surroundings.update()
        self._held.update()
        for owner in self._settings:
            self._update_owner(owner, owner.reference().__dict__)
        for owner in self._owners_of_copy:
            attributes = owner.reference().__dict__
            if owner.changes_inside or dict_version(attributes) != owner.version:
                self._update_owner(owner, attributes, is_of_copy=True)
        if self._root() is None or not self._owners:
            return
        hooks = self._num_handles != RemovableHandle.next_id
        self._num_handles = RemovableHandle.next_id
        for owner in self._owners:
            target = owner.reference()
            if target is None:
                self._announce((owner.path, owner.attribute, ""), "was replaced or deleted")
                self._owners = [other for other in self._owners if other is not owner]
                continue
            attributes = target.__dict__
            if hooks or owner.changes_inside or dict_version(attributes) != owner.version:
                self._update_owner(owner, attributes)

    def _update_owner(self, owner: _Owner, attributes: dict[str, Any], *, is_of_copy: bool = False) -> None:
        version = dict_version(attributes)
        values = tuple(map(attributes.get, owner.names))
        if is_of_copy:
            values = tuple(map(_if_light, values))
        # Comparing tuples compares entries by identity first, then by value.
        if version != owner.version or values != owner.values:
            self._take(owner, attributes, is_of_copy=is_of_copy)
            self._original_modes = None
        owner.version = version
        if not (owner.attribute or is_of_copy) and _num_hooks(attributes) != owner.num_hooks:
            owner.num_hooks = _num_hooks(attributes)
            self._announce_hooks(owner.path)

    def check(self, trains: Callable[[str], bool]) -> None:
        """Refuse changes of the original that are the parallel module's to make.

        Args:
            trains: whether a parameter of the parallel module requires a gradient.

        Raises:
            ValueError: if a part of the original was frozen, thawed, or put into another mode than its root's, since it
                was compiled, and not so the parallel module's part.
        """
        model = self._root()
        if model is None:
            return
        if self._original_modes is None:
            self._original_modes = other_modes(model)
        if self._original_modes not in ((), self._modes_first, self.other_modes):
            path = sorted({*self._original_modes} ^ {*self.other_modes})[0]
            mode = "training" if model.get_submodule(path).training else "evaluation"
            raise ValueError(
                f"{path!r} of the model was put into {mode} mode after it was compiled, which would change nothing: "
                f"call parallel.get_submodule({path!r}).{'train' if mode == 'training' else 'eval'}() (again after "
                "parallel.train())"
            )
        now = [getattr(reference(), "requires_grad", None) for reference in self._parameters]
        if now not in (self._trained, self._trained_first):
            self._check_trained(model, trains)
            self._trained = now

    def _check_trained(self, model: nn.Module, trains: Callable[[str], bool]) -> None:
        parameters = dict(model.named_parameters())
        if not any(parameter.requires_grad for parameter in parameters.values()):
            return
        for name, parameter in parameters.items():
            if parameter.requires_grad != trains(name):
                what = "thawed" if parameter.requires_grad else "frozen"
                raise ValueError(
                    f"{name!r} of the model was {what} after it was compiled, which would change nothing: set "
                    "requires_grad of the parallel module's parameters, or before planner.compile"
                )

    def continue_from(self, earlier: ModelWatch) -> None:
        """Take over what changed on the copy under ``earlier``, and which parameters it saw train at first."""
        for place, value in earlier.changed.items():
            self.set(place, value)
        self._trained = self._trained_first = earlier._trained_first

    def set(self, place: Place, value: Any) -> None:
        """Set a plain attribute of the copy."""
        path, attribute, inner = place
        target: Any = self._copy.get_submodule(path)
        setattr(target if not inner else getattr(target, attribute), inner or attribute, value)
        self._note(place, value)

    def _note(self, place: Place, value: Any) -> None:
        self.changed[place] = value
        if place in self._first and _same(value, self._first[place]):
            del self.changed[place]

    def _take(self, owner: _Owner, attributes: Mapping[str, Any], *, is_of_copy: bool) -> None:
        names = tuple(attributes) if owner.attribute else _watched(attributes)
        before = dict(zip(owner.names, owner.values))
        for name in names:
            value = attributes[name]
            place = (owner.path, owner.attribute, name) if owner.attribute else (owner.path, name, "")
            if (is_of_copy and not is_light(value)) or (name in before and _same(value, before[name])):
                continue
            if isinstance(value, _COMPARED if is_of_copy else _PLAIN):
                if name in before:
                    self._first.setdefault(place, before[name])
                if is_of_copy:
                    self._note(place, _snapshot(value))
                else:
                    self.set(place, value)
            elif owner.attribute or not self._held.follows(owner.path, name):
                self._announce(place, "was set")
        values = [attributes[name] for name in names]
        owner.names = names
        owner.values = tuple(map(_snapshot, map(_if_light, values) if is_of_copy else values))
        owner.changes_inside = _changes_inside(owner.values, owner.num_hooks)

    def _announce_hooks(self, path: str) -> None:
        warnings.warn(
            f"hooks were registered on or removed from module {path!r} after the model was compiled: the programs "
            "do as it did then; change hooks before planner.compile",
            stacklevel=3,
        )

    def _announce(self, place: Place, what: str) -> None:
        if place in self._announced:
            return
        self._announced.add(place)
        name = ".".join(part for part in place if part)
        warnings.warn(
            f"{name!r} of the model {what} after it was compiled: the programs keep what they were traced with; if "
            "that matters, compile again",
            stacklevel=2,
        )


def _same(value: Any, before: Any) -> bool:
    return value is before or (type(value) is type(before) and isinstance(value, _COMPARED) and value == before)


def _watched(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a module's own attributes that may be kept alive."""
    return tuple(name for name, value in attributes.items() if name not in _OF_EVERY_MODULE and is_light(value))


def _if_light(value: Any) -> Any:
    """``value``, or None for what holds tensors, which do not compare as others do."""
    return value if is_light(value) else None


def is_light(value: Any, depth: int = 0) -> bool:
    """Whether keeping ``value`` alive surely keeps no weights alive: a number, a function, a config."""
    if isinstance(value, (*_PLAIN, type, types.BuiltinFunctionType)):
        return True
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None
    if isinstance(value, (nn.Module, torch.Tensor)) or callable(value) or depth > 3:
        return False
    if isinstance(value, Mapping):
        return all(is_light(entry, depth + 1) for entry in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(is_light(entry, depth + 1) for entry in value)
    return hasattr(value, "__dict__") and all(is_light(entry, depth + 1) for entry in vars(value).values())


def is_plain_object(value: Any) -> bool:
    """Whether ``value`` has attributes and is neither called nor a container."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, (Mapping, list, tuple, set))


def _snapshot(value: Any) -> Any:
    """A copy of a list, dict or set; any other value itself."""
    return type(value)(value) if type(value) in CONTAINERS else value


def _owners(model: nn.Module) -> Iterator[_Owner]:
    visited: set[int] = set()
    for path, module in model.named_modules():
        yield _owner(path, "", module, _watched(vars(module)))
        for owner in _settings(module, path):
            value = owner.reference()
            if id(value) not in visited:
                visited.add(id(value))
                yield owner


def _settings(module: nn.Module, path: str) -> Iterator[_Owner]:
    """The plain objects that a module holds itself."""
    for name in _watched(vars(module)):
        value = vars(module)[name]
        if is_plain_object(value):
            yield _owner(path, name, value, tuple(vars(value)))


def _reference(target: Any) -> Callable[[], Any]:
    """A call that gives ``target``, without keeping a module alive."""
    try:
        return weakref.ref(target)
    except TypeError:  # as a SimpleNamespace; it is light
        return lambda: target


def _owner(path: str, attribute: str, target: Any, names: tuple[str, ...]) -> _Owner:
    values = tuple(_snapshot(vars(target)[name]) for name in names)
    num_hooks = 0 if attribute else _num_hooks(vars(target))
    version = dict_version(vars(target))
    changes_inside = _changes_inside(values, num_hooks)
    return _Owner(path, attribute, _reference(target), names, values, num_hooks, version, changes_inside)


def _changes_inside(values: tuple[Any, ...], num_hooks: int) -> bool:
    return num_hooks > 0 or any(isinstance(value, CONTAINERS) for value in values)


def _num_hooks(attributes: Mapping[str, Any]) -> int:
    return sum(len(attributes[table]) for table in HOOKS)
