"""An ``autograd.Function`` on tensors of random numbers, apart from the trace that is under way.

The function closes over stand-ins without data (a layer's weights). Functions of torch that it calls see, for each of
them, a tensor of float64 of the same shape.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from passes.capture.float64 import keep_float64
from passes.capture.stand_in import OneDevice
from passes.capture.watch import WatchedForward
from passes.ir.errors import CaptureError
from passes.torch_compat.engine_calls import engine_calls_in, in_backward
from passes.torch_compat.operators import TorchDispatchMode, tree_leaves, tree_map
from passes.torch_compat.random_seeds import seeds_in_order
from passes.torch_compat.tensor_fields import FakeTensor
from passes.torch_compat.transforms import apart_from_trace, detect_fake_mode

#: Whether this thread is in a trial, in which functions are called as they are.
_in_trial: ContextVar[bool] = ContextVar("in_trial", default=False)
#: Arguments of a function → its outputs.
Run = Callable[[tuple[Any, ...]], Any]
#: Whole numbers and truth values that take the place of unknown ones: they index, they mask.
FILLS = ("mixed", "ones", "zeros")


@dataclass(frozen=True)
class TrialGradients:
    """What a trial computed.

    Attributes:
        outputs: those of floats.
        of_args: gradients of the arguments; None for one without.
        of_states: likewise of what the function closes over, by the identity of its stand-in.
        is_finite: whether all of them are.
    """

    outputs: list[torch.Tensor]
    of_args: list[torch.Tensor | None]
    of_states: dict[int, torch.Tensor | None]
    is_finite: bool


def is_traced() -> bool:
    """Whether functions that are called now are traced: not within a trial."""
    return not _in_trial.get()


def gradients_in_trial(run: Run, args: tuple[Any, ...], *, fill: str) -> TrialGradients:
    """The gradients of ``run`` by torch's engine, where those of its outputs are random, the same in every trial.

    Args:
        args: as in the trace.
        fill: of ``FILLS``.

    Raises:
        CaptureError: if the function reaches a tensor with a gradient that is neither an argument nor a parameter.
    """
    generator = torch.Generator().manual_seed(0)
    twins = _Twins(generator, fill)

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        with OneDevice(torch.device("cpu")), keep_float64(new_too=True), twins:
            yield

    with _trial(), torch.enable_grad():
        own = tuple(_copied(twin_of(arg, generator, fill) if isinstance(arg, torch.Tensor) else arg) for arg in args)
        with engine_calls_in(modes), modes():
            outputs = [output for output in tree_leaves(run(own)) if isinstance(output, torch.Tensor)]
            differentiable = [output for output in outputs if output.requires_grad]
            of_outputs = [random_floats(output.shape, torch.Generator().manual_seed(1)) for output in differentiable]
            torch.autograd.backward(differentiable, of_outputs)
        of_args = [arg.grad if isinstance(arg, torch.Tensor) else None for arg in own]
        of_states = twins.gradients()
        outputs = [output.detach() for output in outputs]
        tensors = [tensor for tensor in (*outputs, *of_args, *of_states.values()) if tensor is not None]
        is_finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
    return TrialGradients(outputs, of_args, of_states, is_finite)


def work_if_it_differentiates(apply: Run, args: tuple[Any, ...]) -> int | None:
    """Floating-point operations of a call, and of its backward until that calls the autograd engine.

    Returns:
        None if it never does.
    """
    stand_ins = detect_fake_mode([arg for arg in args if isinstance(arg, torch.Tensor)])
    counter = _Work()
    with _trial(), stand_ins or contextlib.nullcontext(), torch.enable_grad(), counter:
        try:
            outputs = tree_leaves(apply(tuple(_copied(_leaf(arg)) for arg in args)))
            outputs = [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
            with engine_calls_in(_outermost):
                torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
        except _EngineCalled:
            return counter.operations
        except Exception:  # what it raises without data, tracing reports with its line
            return None
    return None


class _Work(TorchDispatchMode):
    """Counts the floating-point operations of products."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.operations += int(formula(*args, **(kwargs or {}), out_val=result))
        return result


class _EngineCalled(Exception):
    """A backward called the autograd engine."""


def _outermost() -> AbstractContextManager[None]:
    if in_backward():
        raise _EngineCalled
    return contextlib.nullcontext()


class _Twins(TorchFunctionMode):
    """Functions of torch that are called inside see real tensors in the place of stand-ins."""

    def __init__(self, generator: torch.Generator, fill: str) -> None:
        super().__init__()
        self._generator = generator
        self._fill = fill
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(self._in_place_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def gradients(self) -> dict[int, torch.Tensor | None]:
        return {identity: twin.grad for identity, (_, twin) in self._twins.items() if twin.requires_grad}

    def _in_place_of(self, entry: Any) -> Any:
        if not isinstance(entry, FakeTensor):
            return entry
        if id(entry) not in self._twins:
            if entry.requires_grad and not entry.is_leaf:
                raise CaptureError(
                    f"it reaches a tensor of shape {list(entry.shape)} that has a gradient and is no argument of its "
                    "call: pass the tensor as an argument"
                )
            self._twins[id(entry)] = (entry, twin_of(entry, self._generator, self._fill))
        return self._twins[id(entry)][1]


def twin_of(tensor: torch.Tensor, generator: torch.Generator, fill: str) -> torch.Tensor:
    """A leaf of random numbers of float64; of whole numbers and truth values as ``fill`` says."""
    shape = tuple(tensor.shape)
    if tensor.is_complex():
        return torch.randn(shape, dtype=torch.complex128, generator=generator).requires_grad_(tensor.requires_grad)
    if not tensor.is_floating_point():
        mixed = torch.randint(2, shape, generator=generator)
        return {"mixed": mixed, "ones": torch.ones_like(mixed), "zeros": torch.zeros_like(mixed)}[fill].to(tensor.dtype)
    twin = random_floats(shape, generator)
    if isinstance(tensor, torch.nn.Parameter) and len(shape) > 1:
        twin /= math.sqrt(twin[0].numel())
    elif len(shape) < 2:
        twin = twin.abs() + 0.5  # scales and variances
    return twin.requires_grad_(tensor.requires_grad)


def random_floats(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator)


@contextlib.contextmanager
def _trial() -> Iterator[None]:
    """Nothing in the block is traced; what it draws is the same in every trial, and has no effect on later draws."""
    token = _in_trial.set(True)
    try:
        with apart_from_trace(WatchedForward), seeds_in_order():
            torch.manual_seed(0)
            yield
    finally:
        _in_trial.reset(token)


def _leaf(arg: Any) -> Any:
    return arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg


def _copied(arg: Any) -> Any:
    """Lists that a function fills are those of the trace alone."""
    return copy.copy(arg) if isinstance(arg, (list, dict, set)) else arg
