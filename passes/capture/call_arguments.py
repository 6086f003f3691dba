"""Arguments of an example call: by name, by position, or some each way."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, init=False)
class CallArguments:
    """Arguments of one call, written as in the call: ``CallArguments(first, second, mask=mask)``.

    As ``example_inputs`` it stands for a call that neither a tuple (all by position) nor a mapping (all by name) can
    say, such as one of ``forward(self, *images, mask)``.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)


#: Arguments by name, by position, or both.
ExampleInputs = Mapping[str, Any] | tuple[Any, ...] | CallArguments


def arguments_of(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and those by name of ``example_inputs``.

    Raises:
        ValueError: for anything else: a tensor by itself, say.
    """
    if isinstance(example_inputs, CallArguments):
        return example_inputs.args, dict(example_inputs.kwargs)
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise ValueError(
        f"example_inputs is a {type(example_inputs).__name__}: give the arguments of a call, by name (a mapping), by "
        "position (a tuple; of one argument (x,)), or both ways (planner.CallArguments(x, mask=mask))"
    )


def batch_for_loss(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> Any:
    """What a ``loss_fn`` gets as ``batch``: the one positional argument, the tuple of them, or all by name.

    Args:
        parameters: of the model's ``forward``, which name positional arguments where others have names.

    Raises:
        ValueError: if a positional argument beside others by name has none.
    """
    if not kwargs:
        return args[0] if len(args) == 1 else args
    places = names_of_places(parameters)
    batch = dict(zip(places, args))
    rest = args[len(places) :]
    if rest:
        of_rest = next((name for name, one in parameters.items() if one.kind is inspect.Parameter.VAR_POSITIONAL), None)
        if of_rest is None:
            raise ValueError(
                f"the call has {len(args)} arguments by position, of which forward names {len(places)}, beside others "
                "by name: loss_fn would not see the rest; pass by name what forward does not take"
            )
        batch[of_rest] = rest
    return {**batch, **kwargs}


def names_of_places(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """The parameters of a signature that may be given by position, in order, without those that ``*args`` takes."""
    by_place = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, parameter in parameters.items() if parameter.kind in by_place]
