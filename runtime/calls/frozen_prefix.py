"""A model whose first, frozen layers need not be computed: its forward gives their output, or takes it.

The class of a copy of the model is replaced by one whose ``forward`` has three arguments more. ``frozen_after`` is the
path of a module: alone it asks for that module's output in the place of the model's; with ``frozen_output`` the model
goes on with that tensor as what the module gave. With ``frozen_from``, the path of an earlier module, ``frozen_output``
is what that gave, and the output of ``frozen_after`` is asked for. What depends on none of them is traced as ever:
operators that made the output are then needed by nobody, and are dropped; masks and positions that later layers use,
too, stay.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from runtime.calls.model_call import ModelCall

#: Names of the three arguments.
AFTER, OUTPUT, FROM = "frozen_after", "frozen_output", "frozen_from"
ARGUMENTS = frozenset({AFTER, OUTPUT, FROM})
_CLASS = "prefix_is_cached"


def asks_for_prefix(call: ModelCall) -> bool:
    """Whether a call asks for the output of the frozen layers alone."""
    return AFTER in call.kwargs and (OUTPUT not in call.kwargs or FROM in call.kwargs)


def without_prefix(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call without these three."""
    return {name: value for name, value in kwargs.items() if name not in ARGUMENTS}


def take_frozen_outputs(model: nn.Module) -> None:
    """Give the class of a model, which is a copy of the user's, the three arguments; once.

    Raises:
        ValueError: if its forward has an argument of these names.
    """
    original = type(model)
    if not getattr(original, _CLASS, False):
        model.__class__ = _with_arguments(original)


def _with_arguments(original: type[nn.Module]) -> type[nn.Module]:
    signature = inspect.signature(original.forward)
    taken = sorted(ARGUMENTS & set(signature.parameters))
    if taken:
        raise ValueError(f"{original.__name__}.forward has an argument {taken[0]!r} of its own: rename it")

    def forward(
        self: nn.Module,
        *args: Any,
        frozen_after: str | None = None,
        frozen_output: torch.Tensor | None = None,
        frozen_from: str | None = None,
        **kwargs: Any,
    ) -> Any:
        if frozen_after is None:
            return original.forward(self, *args, **kwargs)
        given = None if frozen_output is None else frozen_from or frozen_after
        outputs: dict[str, list[torch.Tensor]] = {frozen_after: [], **({} if given is None else {given: []})}

        def watch(path: str) -> RemovableHandle:
            def at_boundary(_: nn.Module, inputs: Any, output: Any) -> Any:
                # A copy: later layers may hand the same tensor on (a cast to the dtype that it has), and the output
                # that is traced would be what they call it.
                outputs[path].append(_tensor_of(output, path).clone())
                return _replaced(output, frozen_output) if path == given else None

            return self.get_submodule(path).register_forward_hook(at_boundary)

        with contextlib.ExitStack() as hooks:
            for path in outputs:
                hooks.enter_context(watch(path))
            result = original.forward(self, *args, **kwargs)
        for path, runs in outputs.items():
            if len(runs) != 1:
                raise ValueError(
                    f"{path!r} runs {len(runs)} times in a forward: name a module that runs once to cache behind"
                )
        return result if given == frozen_after else outputs[frozen_after][0]

    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in (AFTER, OUTPUT, FROM)]
    parameters = list(signature.parameters.values())
    end = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    forward.__signature__ = signature.replace(parameters=[*parameters[:end], *more, *parameters[end:]])  # type: ignore[attr-defined]
    names = {"forward": forward, "__module__": original.__module__, _CLASS: True}
    return type(original.__name__, (original,), names)


def _tensor_of(output: Any, path: str) -> torch.Tensor:
    first = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(first, torch.Tensor):
        raise ValueError(
            f"{path!r} gives a {type(output).__name__}: activations are cached behind a module that gives a tensor, or "
            "a tuple that begins with one"
        )
    return first


def _replaced(output: Any, tensor: torch.Tensor | None) -> Any:
    return (tensor, *output[1:]) if isinstance(output, tuple) else tensor
