"""Submodules of a parallel module as users see them: modules of the original's classes that hold this rank's weights.

Scripts look for modules by what they are: batch norms to freeze, linear layers whose weights decay or are drawn again,
dropout whose probability changes. So a node of the tree of weights is an instance of a class that derives from the
class of the original's module at its path: ``isinstance`` and the class's own methods hold, attributes are read from
the copy that programs are traced of and set on it, and a call is refused, as programs call no modules.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes.torch_compat.module_tables import buffers_of, children_of, tensors_of
from runtime.calls.model_watch import CONTAINERS, ModelWatch
from runtime.parameters.fixed_structure import FixedStructure, refused_changes, write_buffer
from runtime.parameters.tensors_elsewhere import StagesOf, elsewhere
from runtime.state.weight_tree import WeightTree, refuse_hook


def show_kinds(tree: WeightTree, model: nn.Module, watch: ModelWatch, stages_of: StagesOf) -> None:
    """Give every node of ``tree`` below its root the class of the module of ``model`` at the same path.

    A class that Python cannot give to an object (one with slots) is left out.

    Args:
        watch: of ``model``, which programs are traced of: by it the next call is traced with what is set.
        stages_of: pipeline stages that have the tensor at a path.
    """
    kinds: dict[type, type] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        node = tree.node(path)
        _order(children_of(node), children_of(module))
        if not path:
            continue
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = _shown_kind(kind)
        try:
            node.__class__ = kinds[kind]
        except TypeError:
            continue
        node.__dict__["_place"] = _PlaceOfModule(path, module, watch, stages_of)


def _order(children: dict[str, nn.Module | None], originals: Mapping[str, nn.Module | None]) -> None:
    """Bring children into the order of the original's, which lists count by; what users have added comes last."""
    for name in [
        *(name for name in originals if name in children),
        *(name for name in children if name not in originals),
    ]:
        children[name] = children.pop(name)


@dataclass(frozen=True)
class _PlaceOfModule:
    """Where a shown module stands: its path, the copy's module there, and the pipeline stages of tensors by path."""

    path: str
    original: nn.Module
    watch: ModelWatch
    stages_of: StagesOf

    def __deepcopy__(self, memo: dict[int, Any]) -> _PlaceOfModule:
        return self


def _shown_kind(kind: type[nn.Module]) -> type:
    """A class of shown modules that derives from ``kind``: what every module does is done by ``nn.Module``'s code."""
    own: dict[str, Any] = {
        name: value
        for name, value in vars(nn.Module).items()
        if isinstance(value, types.FunctionType) and name not in _OTHERWISE and name != "__init__"
    }
    own |= refused_changes(kind)
    own |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return types.new_class(kind.__name__, (_ShownModule, kind), exec_body=lambda namespace: namespace.update(own))


class _ShownModule(FixedStructure):
    """What shown modules do otherwise than the original's."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A library that lists classes derived from its own does not learn of this one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"{self._name()} of a parallel module cannot be called by itself, as programs run forward of the whole "
            "model alone: let that forward do it (behind an argument, say, with an example of such a call), and call "
            "the parallel module"
        )

    def _fixed_path(self) -> str | None:
        place: _PlaceOfModule | None = self.__dict__.get("_place")
        return None if place is None else place.path

    def _elsewhere(self, name: str) -> torch.Tensor | None:
        place: _PlaceOfModule | None = self.__dict__.get("_place")
        return None if place is None or name in buffers_of(self) else buffers_of(place.original).get(name)

    def _name(self) -> str:
        place: _PlaceOfModule | None = self.__dict__.get("_place")
        return repr(place.path) if place is not None else f"this {type(self).__name__}"

    def __getattr__(self, name: str) -> Any:
        """Plain attributes of the original first: a class's own ``__getattr__`` reads them."""
        place: _PlaceOfModule | None = self.__dict__.get("_place")
        if place is not None and name in vars(place.original):
            value = vars(place.original)[name]
            if isinstance(value, CONTAINERS):
                place.watch.look_at_copy()
            return value
        try:
            return super().__getattr__(name)
        except AttributeError:
            if place is None or name.startswith("__"):
                raise
        original = place.original
        tensor = tensors_of(original).get(name)
        return getattr(original, name) if tensor is None else elsewhere(tensor, f"{place.path}.{name}", place.stages_of)

    def __setattr__(self, name: str, value: Any) -> None:
        place: _PlaceOfModule | None = self.__dict__.get("_place")
        if place is None or name == "training":
            super().__setattr__(name, value)
            return
        if name in vars(place.original):
            place.watch.set((place.path, name, ""), value)
        elif name in buffers_of(self) or self._elsewhere(name) is not None:
            write_buffer(self, place.path, name, value)
        else:
            self._set_own(name, value)

    def _set_own(self, name: str, value: Any) -> None:
        is_property = isinstance(getattr(type(self), name, None), property)
        if isinstance(value, (bool, int, float, str)) and name[:1] != "_" and not is_property:
            raise ValueError(
                f"setting {name!r} here would change nothing: the model's own {self._name()} has no such attribute; "
                "set it there (the next call sees that), or before planner.compile"
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        place: _PlaceOfModule | None = self.__dict__.get("_place")
        return "" if place is None else place.original.extra_repr()

    register_forward_hook = register_forward_pre_hook = refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = refuse_hook

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            f"{self._name()} of a parallel module cannot be pickled: it is one rank's part. Save its state_dict(), or "
            "the whole by planner.CheckpointManager"
        )


#: Methods that are not ``nn.Module``'s own in a shown module.
_OTHERWISE = {*vars(_ShownModule), *vars(FixedStructure)}
