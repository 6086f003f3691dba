"""``autograd.Function`` whose backward differentiates again: reentrant checkpoints, reversible layers.

Its forward runs where gradients are off; its backward runs layers once more and calls ``backward`` on what they give.
Traced is its forward with gradients on, as if there were no function. The gradients of that are compared with those of
the function itself first, on random numbers in float64 (``function_trials``): of every argument, of every parameter. A
mask of dropout that backward draws anew, a layer that backward leaves out, a factor on a gradient then differ. A call
of torch's own checkpoint that is too large for a trial is taken at its word.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from passes.capture.function_trials import FILLS, TrialGradients, gradients_in_trial
from passes.ir.errors import CaptureError
from passes.torch_compat.random_seeds import seeds_in_order
from passes.torch_compat.tensor_fields import FakeTensor
from passes.torch_compat.tracer_questions import outside_of_tracing

#: Largest difference of two gradients, as a part of the largest entry of one, and as a part of the largest of all.
_TOLERANCE, _FLOOR = 1e-9, 1e-13
#: Floating-point operations of a call and its backward that are worth a trial: seconds on a CPU.
_MAX_WORK = 10**12
#: Which regions without gradients have them: those that forward enters first, none, all.
_REGIONS = ("outermost", "none", "all")
#: Which tensors stay attached to their gradient where forward detaches them.
_DETACHED = ("none", "arguments", "all")


class GradientsOn(TorchFunctionMode):
    """A function's forward, which runs without gradients, with them.

    Args:
        regions: of ``torch.no_grad`` that have no effect, of ``_REGIONS``.
        detached: tensors whose ``detach`` has none, of ``_DETACHED``.
        arguments: of the function.
    """

    def __init__(self, regions: str, detached: str, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self._regions = regions
        self._detached = detached
        self._arguments = {id(arg): arg for arg in arguments if isinstance(arg, torch.Tensor)}
        self._depth = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "_set_grad_enabled" and self._is_ignored(*args):
            return None
        if (name in ("detach", "detach_") or func is _DATA) and self._stays_attached(args[0]):
            return args[0]
        return func(*args, **(kwargs or {}))

    def _stays_attached(self, tensor: torch.Tensor) -> bool:
        return self._detached == "all" or (self._detached == "arguments" and id(tensor) in self._arguments)

    def _is_ignored(self, enabled: bool) -> bool:
        self._depth = max(0, self._depth + (-1 if enabled else 1))
        if self._regions == "outermost":
            return not enabled and self._depth == 1
        return not enabled and self._regions == "all"


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class RecomputedFunction:
    """A call of a function whose backward differentiates again.

    Attributes:
        apply: the call of the class, as torch has it, of arguments.
        forward: its forward alone, with a context of its own.
        names: of parameters, by the identity of their stand-ins.
        work: floating-point operations of the call.
    """

    cls: Any
    args: tuple[Any, ...]
    apply: Callable[[tuple[Any, ...]], Any]
    forward: Callable[[tuple[Any, ...]], Any]
    names: Mapping[int, str]
    work: int

    def traced(self) -> Any:
        """The outputs of its forward, with gradients.

        Raises:
            CaptureError: if these are not the gradients of its backward; it names one that differs, and the backward.
        """
        with seeds_in_order():
            return self._with_gradients(*self._same_gradients(), self.args)

    def _same_gradients(self) -> tuple[str, str]:
        """The regions that have gradients, and what stays attached, where forward has the function's own gradients."""
        if self.work > _MAX_WORK:
            if self.cls is CheckpointFunction and self.args[1]:  # it keeps the state of random numbers
                return _REGIONS[0], _DETACHED[0]
            raise self._refusal(
                f"a call of {self.work:.0e} operations is too large to compare its gradients in a trial"
            )
        fill, expected = self._own_gradients()
        differences = []
        for detached, regions in itertools.product(_DETACHED, _REGIONS):
            run = functools.partial(self._with_gradients, regions, detached)
            actual = gradients_in_trial(run, self.args, fill=fill)
            with outside_of_tracing():
                difference = self._difference(actual, expected)
            if difference is None:
                return regions, detached
            differences.append(difference)
        raise self._refusal(f"it gives other gradients than its forward has: {differences[0]}")

    def _with_gradients(self, regions: str, detached: str, args: tuple[Any, ...]) -> Any:
        with torch.enable_grad(), GradientsOn(regions, detached, args):
            return self.forward(args)

    def _own_gradients(self) -> tuple[str, TrialGradients]:
        """The gradients by the function's own backward, and the filling with which they are finite."""
        for fill in FILLS:
            try:
                gradients = gradients_in_trial(self.apply, self.args, fill=fill)
            except CaptureError as error:
                raise self._refusal(str(error)) from error
            if gradients.is_finite:
                return fill, gradients
        raise self._refusal("its gradients on random numbers are not finite")

    def _difference(self, actual: TrialGradients, expected: TrialGradients) -> str | None:
        """The first gradient that differs; None if none does."""
        largest = max(map(_size, (*expected.of_args, *expected.of_states.values())), default=0.0)
        pairs: list[tuple[str, Any, torch.Tensor | None, torch.Tensor | None]] = [
            (f"output {n}", None, *pair) for n, pair in enumerate(zip(actual.outputs, expected.outputs, strict=True))
        ]
        for place, (arg, *pair) in enumerate(zip(self.args, actual.of_args, expected.of_args, strict=True)):
            pairs.append((f"the gradient of argument {place}", arg, *pair))
        for identity in dict.fromkeys((*actual.of_states, *expected.of_states)):
            name = f"the gradient of {self.names.get(identity, 'a tensor')!r}"
            pairs.append((name, None, actual.of_states.get(identity), expected.of_states.get(identity)))
        for what, arg, one, other in pairs:
            error = one if other is None else other if one is None else one - other
            most = max(_TOLERANCE * _size(other), _FLOOR * largest)
            if error is not None and not _size(error) <= most and not _vanishes_before(arg, error, most):
                return f"{what} differs by {_size(error) / max(_size(other), most, 1e-300):.1e} of its size"
        return None

    def _refusal(self, reason: str) -> CaptureError:
        code = inspect.unwrap(self.cls.backward).__code__
        return CaptureError(
            f"{self.cls.__qualname__} is an autograd.Function whose backward "
            f"({code.co_filename}:{code.co_firstlineno}) differentiates again, which is "
            f"traced as its forward with gradients; {reason}. Use "
            "torch.utils.checkpoint(…, use_reentrant=False), or register an operator with torch.library.custom_op and "
            "register_autograd"
        )


def _size(tensor: torch.Tensor | None) -> float:
    return float(tensor.abs().max()) if tensor is not None and tensor.numel() else 0.0


def _vanishes_before(arg: torch.Tensor | None, difference: torch.Tensor, most: float) -> bool:
    """Whether a difference in the gradient of ``arg`` makes none in those of what ``arg`` was joined or reshaped from.

    Two halves in the wrong order are as good as in the right one, where the argument is one tensor joined with itself.
    """
    node: Any = None if arg is None else arg.grad_fn
    if node is None:
        return False
    try:
        results = node(difference)
    except Exception:  # it needs values, which stand-ins have not
        return False
    sums: dict[Any, torch.Tensor] = {}
    for source, result in zip(node.next_functions, results if isinstance(results, tuple) else (results,), strict=True):
        if source[0] is not None and result is not None:
            sums[source] = sums[source] + result if source in sums else result
    return all(not isinstance(total, FakeTensor) and _size(total) <= most for total in sums.values())
