"""Trace a model with all but a few of its repeated entries skipped.

The model's own ``forward`` runs in full, with every step of its loops over layers. Entries that a ``RepeatedEntries``
calls copies are replaced, in the copy of the model that is traced, by stand-ins without tensors: their call is compared
with that of the same entry one period before, and gives its outputs, each through ``meshwright.skipped`` which says
whose output it stands for. The copies are put into the graph afterwards (``passes.capture.unfold``).

An entry may be skipped only if its call differs from the one a period before in nothing but what the entry before it
gave. Whatever is seen to break this raises ``NotRepeated``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from passes.capture.likeness import moving_attributes
from passes.capture.nested_values import Path, Structure, flatten, rebuild
from passes.capture.repeats import RepeatedEntries
from passes.torch_compat.module_tables import CONTENT, HOOKS, buffers_of, children_of, has_hooks
from passes.torch_compat.tensor_fields import DisableTorchFunction, versions

SKIPPED = "meshwright.skipped.default"

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define("skipped(Tensor x, int repeat, int entry) -> Tensor")
_LIBRARY.impl("skipped", lambda x, repeat, entry: torch.empty_like(x), "CompositeExplicitAutograd")
torch.library.register_autograd("meshwright::skipped", lambda ctx, grad: (grad, None, None), lib=_LIBRARY)


class NotRepeated(Exception):
    """The model does not treat its entries as repetitions of each other."""


@contextlib.contextmanager
def shortened(model: nn.Module, repeats: Sequence[RepeatedEntries]) -> Iterator[None]:
    """Skip entries that are copies; ``model`` is a copy made for the trace, and stays so.

    Raises:
        NotRepeated: from inside ``model``'s forward, or at the end of the block if not every entry was called.
    """
    calls = [_EntryCalls(number, repeat) for number, repeat in enumerate(repeats)]
    for each in calls:
        _skip(model, each)
    yield
    for each in calls:
        each.expect(each.visits and each.visits[-1].entry == each.repeat.stop - 1)


@dataclass
class _Visit:
    """One call of an entry: its arguments and results taken apart."""

    entry: int
    with_gradient: bool
    structure: Structure
    tensors: dict[Path, torch.Tensor]
    result: Structure | None = None
    outputs: dict[Path, torch.Tensor] = field(default_factory=dict)

    @property
    def own_outputs(self) -> dict[Path, torch.Tensor]:
        """Outputs without the tensors that the call only passed on."""
        passed = {id(tensor) for tensor in self.tensors.values()}
        return {path: tensor for path, tensor in self.outputs.items() if id(tensor) not in passed}


class _EntryCalls:
    """The calls of a repeat's entries, which must come in order, each entry once."""

    def __init__(self, number: int, repeat: RepeatedEntries) -> None:
        self.number = number
        self.repeat = repeat
        self.visits: list[_Visit] = []
        self.own_output_ids: set[int] = set()
        self.inside = False

    def expect(self, holds: Any) -> None:
        if not holds:
            raise NotRepeated(self.repeat.path)

    def enter(self, entry: int, module: nn.Module, args: Any, kwargs: Any) -> _Visit:
        self.expect(not self.inside and entry == self.repeat.start + len(self.visits))
        self.expect(not any(has_hooks(part) for part in module.modules()))
        return _Visit(entry, torch.is_grad_enabled(), *flatten((args, kwargs)))

    def traced(self, entry: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The method ``forward``, noting the call."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            visit = self.enter(entry, module, args, kwargs)
            before = _contents(module), _versions(visit)
            self.inside = True
            try:
                results = forward(module, *args, **kwargs)
            finally:
                self.inside = False
            self.expect(before == (_contents(module), _versions(visit)))
            visit.result, visit.outputs = flatten(results)
            if entry >= self.repeat.start + self.repeat.period:
                self.compare(visit)
            self.add(visit)
            return results

        return call

    def skipped(self, entry: int, module: nn.Module) -> Callable[..., Any]:
        """The replacement for the forward of an entry that is a copy."""

        def call(*args: Any, **kwargs: Any) -> Any:
            visit = self.enter(entry, module, args, kwargs)
            model = self.compare(visit)
            passed = {id(tensor): visit.tensors[path] for path, tensor in model.tensors.items()}
            output_by_id: dict[int, torch.Tensor] = {}
            for path, output in model.outputs.items():
                if id(output) in passed:
                    visit.outputs[path] = passed[id(output)]
                    continue
                if id(output) not in output_by_id:
                    template = self.template(model)[path]
                    output_by_id[id(output)] = torch.ops.meshwright.skipped(template, self.number, entry)
                visit.outputs[path] = output_by_id[id(output)]
            assert model.result is not None
            visit.result = model.result
            self.add(visit)
            return rebuild(model.result, visit.outputs)

        return call

    def template(self, visit: _Visit) -> dict[Path, torch.Tensor]:
        """The traced outputs of the entry that a copy is made of."""
        place = (visit.entry - self.repeat.start) % self.repeat.period
        return self.visits[self.repeat.period + place].outputs

    def compare(self, visit: _Visit) -> _Visit:
        """The call one period before, after checking that this one does the same with what its predecessor gave."""
        index = visit.entry - self.repeat.start
        model, previous = self.visits[index - self.repeat.period], self.visits[index - 1]
        self.expect((visit.structure, visit.with_gradient) == (model.structure, model.with_gradient))
        before = self.visits[index - self.repeat.period - 1] if index > self.repeat.period else None
        path_by_id = {id(tensor): path for path, tensor in previous.own_outputs.items()}
        for path, tensor in visit.tensors.items():
            other = model.tensors[path]
            if tensor is other and id(tensor) not in self.own_output_ids:
                continue
            source = path_by_id.get(id(tensor))
            self.expect(source is not None and (before is None or before.outputs.get(source) is other))
            # What enters the first unit may carry no gradient where what it gives does.
            self.expect(_kind(tensor, before is not None) == _kind(other, before is not None))
        return model

    def add(self, visit: _Visit) -> None:
        self.visits.append(visit)
        self.own_output_ids.update(map(id, visit.own_outputs.values()))


def _kind(tensor: torch.Tensor, with_gradient: bool) -> tuple[Any, ...]:
    with DisableTorchFunction():  # the tracer looks at every attribute that is read
        return tensor.shape, tensor.stride(), tensor.dtype, with_gradient and tensor.requires_grad


def _versions(visit: _Visit) -> list[int]:
    """How often each argument was written to."""
    return versions(list(visit.tensors.values()))


def _contents(module: nn.Module) -> list[tuple[Any, ...]]:
    """What the module and those inside it hold, by identity: a forward that leaves something behind changes it."""
    return [
        tuple((name, id(entry)) for owner in (part.__dict__, buffers_of(part)) for name, entry in owner.items())
        for part in module.modules()
    ]


def _skip(model: nn.Module, calls: _EntryCalls) -> None:
    """Replace the entries of one repeat by ones that are watched or skipped."""
    repeat = calls.repeat
    children = children_of(model.get_submodule(repeat.path))
    entries = {index: children[str(index)] for index in range(repeat.start, repeat.stop)}
    for index, entry in entries.items():
        assert entry is not None
        if repeat.is_copied(index):
            children[str(index)] = _stand_in(entry, calls, index)
        else:
            _watch_numbers(entry, entries[_neighbour(repeat, index)], calls)
            calls.expect("forward" not in entry.__dict__)
            watched = object.__new__(_subclass(type(entry), {"forward": calls.traced(index, type(entry).forward)}))
            watched.__dict__.update(entry.__dict__)
            children[str(index)] = watched


def _neighbour(repeat: RepeatedEntries, entry: int) -> int:
    """An entry of another unit that is like ``entry``."""
    return entry + (repeat.period if entry + repeat.period < repeat.stop else -repeat.period)


def _stand_in(entry: nn.Module, calls: _EntryCalls, index: int) -> nn.Module:
    """An object of the entry's class with its attributes, whose tensors and modules must not be asked for."""

    def missing(self: nn.Module, name: str) -> Any:
        calls.expect(not hasattr(entry, name))
        raise AttributeError(name)

    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise NotRepeated(calls.repeat.path)

    refused = dict.fromkeys(("parameters", "named_parameters", "buffers", "named_buffers", "state_dict"), refuse)
    stand_in: Any = object.__new__(_subclass(type(entry), {"__getattr__": missing, **refused}))
    empty = {name: type(entry.__dict__[name])() for name in (*CONTENT, *HOOKS)}
    stand_in.__dict__.update({**entry.__dict__, **empty})
    stand_in.__dict__["forward"] = calls.skipped(index, stand_in)
    return stand_in


def _subclass(kind: type[nn.Module], members: dict[str, Any]) -> Any:
    """A class with the name of ``kind`` that has these members instead of its own."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **members})


def _watch_numbers(entry: nn.Module, other: nn.Module | None, calls: _EntryCalls) -> None:
    """Replace the attributes that count layers by numbers that must not be looked at while the entry is called."""
    assert other is not None
    for path, name in moving_attributes(entry, other):
        owner = entry.get_submodule(path).__dict__
        owner[name] = _Number(owner[name])
        owner[name].calls = calls


class _Number(int):
    """A layer's number: a layer that reads it is not like the others."""

    calls: _EntryCalls


def _unless_inside(name: str) -> Callable[..., Any]:
    original = getattr(int, name)

    def method(self: _Number, *args: Any) -> Any:
        self.calls.expect(not self.calls.inside)
        return original(self, *args)

    return method


_READS = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "index", "int", "float", "bool", "add", "radd", "sub", "rsub",
          "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "and", "rand",
          "neg", "abs", "str", "repr", "format", "divmod", "lshift", "rshift", "or", "xor")  # fmt: skip
for _name in _READS:
    setattr(_Number, f"__{_name}__", _unless_inside(f"__{_name}__"))
