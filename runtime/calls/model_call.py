"""A call of the model taken apart: tensors by path, and what must be equal for two calls to run the same program."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from passes.capture.call_arguments import names_of_places
from passes.capture.nested_values import Structure, flatten, rebuild
from passes.capture.refusals import refuse_inputs
from passes.plan import Plan
from runtime.calls.content_keys import structure_key

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class ModelCall:
    """Arguments of one call. ``tensors`` are by path: ``("input_ids",)``, ``(0,)``, ``("batch", "x")``.

    ``case`` tells calls apart whose Python code reads other values of the same arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    structures: tuple[Structure, ...]
    tensors: dict[Path, torch.Tensor]
    case: int = 0

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Path, shape and dtype of every tensor, and whether it carries a gradient."""
        return tuple(
            (path, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for path, tensor in self.tensors.items()
        )

    @functools.cached_property
    def signature(self) -> tuple[Any, ...]:
        """Equal for calls of one case with the same arguments but for the values of tensors.

        Raises:
            ValueError: for an argument whose content cannot be compared from call to call.
        """
        return self.shapes, tuple(structure_key(structure, "") for structure in self.structures), self.case

    def with_shapes(self, shapes: Mapping[Path, tuple[int, ...]]) -> ModelCall:
        """The same call with empty meta tensors of other shapes."""
        tensors = {
            path: torch.empty(shapes.get(path, tuple(tensor.shape)), dtype=tensor.dtype, device="meta").requires_grad_(
                tensor.requires_grad
            )
            for path, tensor in self.tensors.items()
        }
        args, kwargs = (rebuild(structure, tensors) for structure in self.structures)
        return ModelCall(tuple(args), dict(kwargs), self.structures, tensors, self.case)


def read_call(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, positional: int | None = 0
) -> ModelCall:
    """A call of ``forward`` written one way, however it was made: the first ``positional`` arguments by position.

    With ``positional=None`` it is kept as it was made (a loss function sees the batch in that form).

    Raises:
        ValueError: if the arguments do not fit the signature of ``forward``, or one is a sparse or nested tensor.
    """
    named = dict(kwargs)
    if positional is not None:
        args, named = _by_place(forward, *_by_name(forward, args, kwargs), positional)
    args_structure, tensors = flatten(tuple(args))
    kwargs_structure, more = flatten(named)
    tensors |= more
    refuse_inputs(tensors)
    return ModelCall(tuple(args), named, (args_structure, kwargs_structure), tensors)


def _by_name(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What ``*args`` takes, and the other arguments by name."""
    signature, names, takes_any = _signature_of(forward)
    if not args and names is not None:
        # Those of the signature, in its order; a loss function may ask for more of the batch than the model does.
        return (), {**{name: kwargs[name] for name in names if name in kwargs}, **kwargs}
    extra = {} if takes_any else {name: kwargs[name] for name in kwargs if name not in signature.parameters}
    try:
        bound = signature.bind_partial(*args, **{name: kwargs[name] for name in kwargs if name not in extra})
    except TypeError as error:
        raise ValueError(f"the call does not fit the model's forward{signature}: {error}") from error
    named: dict[str, Any] = {}
    rest: tuple[Any, ...] = ()
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            twice = sorted(value.keys() & named.keys())
            if twice:
                raise ValueError(f"argument {twice[0]!r} is given by position and by name, which a plan knows as one")
            named.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            rest = value
        else:
            named[name] = value
    return rest, {**named, **extra}


def _by_place(
    forward: Callable[..., Any], rest: tuple[Any, ...], named: dict[str, Any], positional: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first ``positional`` arguments moved to their places, and more where only places can say them.

    Places end at the first argument that is left to its default. ``rest`` is what ``*args`` takes.
    """
    parameters = _signature_of(forward)[0].parameters
    places = names_of_places(parameters)
    only_by_place = sum(parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY for name in places)
    number = len(places) if rest else max(positional, only_by_place)
    first = list(itertools.takewhile(named.__contains__, places[:number]))
    return (*(named.pop(name) for name in first), *rest), named


#: What is read of a signature: itself; names of arguments, None if some are only taken by position; any others.
_Signature = tuple[inspect.Signature, tuple[str, ...] | None, bool]
_signatures: weakref.WeakKeyDictionary[Any, _Signature] = weakref.WeakKeyDictionary()


def _signature_of(forward: Callable[..., Any]) -> _Signature:
    """The signature of ``forward``; that of a method is read once for its function."""
    if not isinstance(forward, types.MethodType):
        return _read_signature(forward)
    if forward.__func__ not in _signatures:
        _signatures[forward.__func__] = _read_signature(forward)
    return _signatures[forward.__func__]


def _read_signature(forward: Callable[..., Any]) -> _Signature:
    signature = inspect.signature(forward)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    names = tuple(name for name, kind in kinds.items() if kind in named)
    only_by_place = inspect.Parameter.POSITIONAL_ONLY in kinds.values()
    return signature, None if only_by_place else names, inspect.Parameter.VAR_KEYWORD in kinds.values()


def positional_of(plan: Plan | None, loss_fn: Callable[..., Any] | None) -> int | None:
    """How many arguments the plan knows by position; None to leave them as they come."""
    if loss_fn is not None:
        return None
    if plan is None:
        return 0
    places = [int(head) for head in (name.split(".")[0] for name in plan.inputs) if head.isdigit()]
    return max(places) + 1 if places else 0
